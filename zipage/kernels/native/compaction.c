/* Selecting the survivors of one request's cache and packing them into its target blocks.
 *
 * The torch reference is zipage/compression/select.py and compactor.py.
 */
#include "compression.h"

/* An unsigned integer in the order of the float with these bits: NaN counts as -inf, -0 as 0. */
ZP_INLINE uint32_t order_key(uint32_t bits)
{
    bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0xff800000u : bits;
    bits = bits == 0x80000000u ? 0u : bits;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Mark the `keep` best of T tokens; equal scores: the newer slot wins. The threshold is found
 * bit by bit, counting with vector compares: no branches, and linear in T whatever the scores. */
static void select_tokens(const float *scores, const int32_t *position, int64_t T, int64_t keep,
                          int64_t window, int32_t protect_below, uint32_t *key, uint8_t *kept)
{
    const uint32_t always = order_key(0x7f800000u);
    for (int64_t t = 0; t < T; t++) {
        uint32_t bits;
        memcpy(&bits, scores + t, sizeof bits);
        const uint32_t k = order_key(bits);
        key[t] = position[t] < protect_below ? always : k;
    }
    for (int64_t t = T - window; t < T; t++)
        key[t] = always;

    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t candidate = threshold | 1u << bit;
        int32_t count = 0;
        for (int64_t t = 0; t < T; t++)
            count += key[t] >= candidate;
        if (count >= keep)
            threshold = candidate;
    }
    int64_t ties = keep;
    for (int64_t t = 0; t < T; t++)
        ties -= key[t] > threshold;
    for (int64_t t = T - 1; t >= 0; t--) {
        const int equal = key[t] == threshold && ties > 0;
        ties -= equal;
        kept[t] = key[t] > threshold || equal;
    }
}

/* Where the target blocks come from. */
struct plan {
    const int32_t *target;
    int64_t num_target;
    int64_t *held;      /* [num_target] index among the source blocks, or -1 if new */
    uint8_t *is_target; /* [num_source] */
    int stable;
    int staged;         /* survivors are copied aside before they are written */
};

static void make_plan(struct plan *plan, const struct zp_comp_job *job)
{
    /* Moving in slot order never overwrites a survivor that has yet to move, unless a block comes
     * earlier among the targets than among the sources. */
    int in_order = 1;
    for (int64_t n = 0; n < plan->num_target; n++) {
        plan->held[n] = -1;
        for (int64_t m = 0; m < job->num_source; m++)
            if (job->source[m] == plan->target[n]) {
                plan->held[n] = m;
                plan->is_target[m] = 1;
                in_order &= m <= n;
            }
    }
    plan->staged = plan->stable && !in_order;
}

/* The source slot of every target slot. Stable: survivors in slot order. Otherwise a survivor
 * whose block is a target stays, and the others fill the remaining target slots in slot order. */
static void plan_slots(const struct plan *plan, const uint8_t *kept, int64_t T, int64_t b,
                       int32_t *movers, int32_t *from)
{
    int64_t count = 0;
    for (int64_t m = 0; m * b < T; m++) {
        const int64_t end = (m + 1) * b < T ? (m + 1) * b : T;
        for (int64_t t = m * b; t < end && (plan->stable || !plan->is_target[m]); t++) {
            movers[count] = (int32_t)t;
            count += kept[t];
        }
    }
    for (int64_t n = 0; n < plan->num_target; n++)
        for (int64_t i = 0; i < b; i++) {
            const int64_t here = plan->held[n] * b + i;
            const int stays = !plan->stable && plan->held[n] >= 0 && here < T && kept[here];
            from[n * b + i] = stays ? (int32_t)here : *movers++;
        }
}

ZP_INLINE void copy_row(float *to, const float *from, int64_t dim)
{
    int64_t d = 0;
    for (; d + ZP_VL <= dim; d += ZP_VL)
        zp_store(to + d, zp_load(from + d));
    for (; d < dim; d++)
        to[d] = from[d];
}

/* Fill the target blocks of one layer and head. */
static void move_tokens(const struct zp_comp_cache *c, const struct zp_comp_job *job,
                        const struct plan *plan, int64_t layer, int64_t head,
                        const int32_t *from, const int32_t *position, const float *stored,
                        float *staging)
{
    const int64_t b = c->block_size, dim = c->dim;
    for (int64_t i = 0; plan->staged && i < plan->num_target * b; i++)
        for (int value = 0; value < 2; value++)
            copy_row(staging + (2 * i + value) * dim,
                     zp_tile(c, layer, job->source[from[i] / b], value, head) + from[i] % b * dim,
                     dim);
    for (int64_t n = 0; n < plan->num_target; n++) {
        float *keys = zp_tile(c, layer, plan->target[n], 0, head);
        float *values = zp_tile(c, layer, plan->target[n], 1, head);
        const int64_t state = zp_state(c, layer, plan->target[n], head);
        for (int64_t i = 0; i < b; i++) {
            const int64_t t = from[n * b + i];
            c->scores[state + i] = stored ? stored[t] : 0.f;
            c->positions[state + i] = position[t];
            if (plan->held[n] >= 0 && t == plan->held[n] * b + i)
                continue;
            const float *key, *value;
            if (plan->staged) {
                key = staging + 2 * (n * b + i) * dim;
                value = key + dim;
            } else {
                key = zp_tile(c, layer, job->source[t / b], 0, head) + t % b * dim;
                value = zp_tile(c, layer, job->source[t / b], 1, head) + t % b * dim;
            }
            copy_row(keys + i * dim, key, dim);
            copy_row(values + i * dim, value, dim);
        }
    }
}

/* Keep the best `num_target * b` tokens of each layer and KV head and pack them, with their
 * values, scores and positions, into the target blocks.
 *
 * scores: final scores [L, H, T], larger is kept. stored: scores to store with the tokens, same
 * shape, or NULL for 0. The last `window` slots and positions below `protect_below` are kept
 * whatever their scores. Blocks that are not targets are only read.
 * Returns 0, or -1 if memory ran out, before anything was written. */
int zp_comp_compact(const struct zp_comp_cache *c, const struct zp_comp_job *job,
                    const float *scores, const float *stored, const int32_t *target,
                    int64_t num_target, int64_t window, int32_t protect_below, int stable,
                    int threads)
{
    const int64_t b = c->block_size, T = job->length, keep = num_target * b;
    const int64_t tasks = c->layers * c->kv_heads;
    struct plan plan = {.target = target, .num_target = num_target, .stable = stable};
    plan.held = malloc(sizeof(int64_t) * (size_t)num_target);
    plan.is_target = calloc((size_t)job->num_source, 1);
    char *memory = NULL;
    size_t bytes = 0;
    int failed = !plan.held || !plan.is_target;
    if (!failed) {
        make_plan(&plan, job);
        /* positions, movers, from, keys, staging, kept */
        bytes = sizeof(int32_t) * (size_t)(3 * T + 1 + keep) + (size_t)T
            + (plan.staged ? sizeof(float) * (size_t)(2 * keep * c->dim) : 0);
        bytes = (bytes + 63) / 64 * 64;
        failed = !(memory = zp_scratch(bytes * (size_t)threads));
    }
    if (!failed) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int part = 0; part < threads; part++) {
            int32_t *position = (int32_t *)(memory + bytes * (size_t)part);
            int32_t *movers = position + T, *from = movers + T + 1;
            uint32_t *key = (uint32_t *)(from + keep);
            float *staging = (float *)(key + T);
            uint8_t *kept = (uint8_t *)(staging + (plan.staged ? 2 * keep * c->dim : 0));
            for (int64_t task = tasks * part / threads; task < tasks * (part + 1) / threads;
                 task++) {
                const int64_t layer = task / c->kv_heads, head = task % c->kv_heads;
                zp_read_positions(c, job, layer, head, position);
                select_tokens(scores + task * T, position, T, keep, window, protect_below, key,
                              kept);
                plan_slots(&plan, kept, T, b, movers, from);
                move_tokens(c, job, &plan, layer, head, from, position,
                            stored ? stored + task * T : NULL, staging);
            }
        }
    }
    free(memory);
    free(plan.held);
    free(plan.is_target);
    return failed ? -1 : 0;
}
