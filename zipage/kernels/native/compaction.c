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

/* The source slot of every target slot; target block n takes the place of source block n. Stable:
 * survivors in slot order. Otherwise a survivor in the first `keep` slots keeps its slot, and the
 * others fill the remaining ones in slot order. */
static void plan_slots(const uint8_t *kept, int64_t T, int64_t keep, int stable, int32_t *movers,
                       int32_t *from)
{
    int64_t count = 0;
    for (int64_t t = stable ? 0 : keep; t < T; t++) {
        movers[count] = (int32_t)t;
        count += kept[t];
    }
    for (int64_t i = 0; i < keep; i++)
        from[i] = !stable && kept[i] ? (int32_t)i : *movers++;
}

ZP_INLINE void copy_row(float *to, const float *from, int64_t dim)
{
    int64_t d = 0;
    for (; d + ZP_VL <= dim; d += ZP_VL)
        zp_store(to + d, zp_load(from + d));
    for (; d < dim; d++)
        to[d] = from[d];
}

/* Fill the target blocks of one layer and head. A survivor never moves to a later slot, so that in
 * slot order none is overwritten before it is read. */
static void move_tokens(const struct zp_comp_cache *c, const struct zp_comp_job *job,
                        const int32_t *target, int64_t num_target, int64_t layer, int64_t head,
                        const int32_t *from, const int32_t *position, const float *stored)
{
    const int64_t b = c->block_size, dim = c->dim;
    for (int64_t n = 0; n < num_target; n++) {
        float *keys = zp_tile(c, layer, target[n], 0, head);
        float *values = zp_tile(c, layer, target[n], 1, head);
        const int64_t state = zp_state(c, layer, target[n], head);
        const int in_place = target[n] == job->source[n];
        for (int64_t i = 0; i < b; i++) {
            const int64_t t = from[n * b + i];
            c->scores[state + i] = stored ? stored[t] : 0.f;
            c->positions[state + i] = position[t];
            if (in_place && t == n * b + i)
                continue;
            copy_row(keys + i * dim, zp_tile(c, layer, job->source[t / b], 0, head) + t % b * dim,
                     dim);
            copy_row(values + i * dim, zp_tile(c, layer, job->source[t / b], 1, head) + t % b * dim,
                     dim);
        }
    }
}

/* Keep the best `num_target * b` tokens of each layer and KV head and pack them, with their
 * values, scores and positions, into the target blocks.
 *
 * scores: final scores [L, H, T], larger is kept. stored: scores to store with the tokens, same
 * shape, or NULL for 0. The last `window` slots and positions below `protect_below` are kept
 * whatever their scores. Entry n of `target` is source block n, or a block that is no source block.
 * Blocks that are not targets are only read.
 * Returns 0, or -1 if memory ran out, before anything was written. */
int zp_comp_compact(const struct zp_comp_cache *c, const struct zp_comp_job *job,
                    const float *scores, const float *stored, const int32_t *target,
                    int64_t num_target, int64_t window, int32_t protect_below, int stable,
                    int threads)
{
    const int64_t T = job->length, keep = num_target * c->block_size;
    const int64_t tasks = c->layers * c->kv_heads;
    /* positions, movers, from, keys, kept */
    const size_t bytes = (sizeof(int32_t) * (size_t)(3 * T + 1 + keep) + (size_t)T + 63) / 64 * 64;
    char *memory = zp_scratch(bytes * (size_t)threads);
    if (!memory)
        return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++) {
        int32_t *position = (int32_t *)(memory + bytes * (size_t)part);
        int32_t *movers = position + T, *from = movers + T + 1;
        uint32_t *key = (uint32_t *)(from + keep);
        uint8_t *kept = (uint8_t *)(key + T);
        for (int64_t task = tasks * part / threads; task < tasks * (part + 1) / threads; task++) {
            const int64_t layer = task / c->kv_heads, head = task % c->kv_heads;
            zp_read_positions(c, job, layer, head, position);
            select_tokens(scores + task * T, position, T, keep, window, protect_below, key, kept);
            plan_slots(kept, T, keep, stable, movers, from);
            move_tokens(c, job, target, num_target, layer, head, from, position,
                        stored ? stored + task * T : NULL);
        }
    }
    free(memory);
    return 0;
}
