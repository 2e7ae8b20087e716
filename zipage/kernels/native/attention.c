/* Paged attention of one layer on the CPU, fp32.
 *
 * A row is one query token of one query head. Rows that share a KV head are processed ROWS at a
 * time against tiles of TILE slots, so each cached key and value is read once for ROWS rows.
 *
 * A row's result is bitwise the same whatever else is in the batch, however many threads run, and
 * whether it comes from a decode step or a prefill chunk:
 *   - tiles start at slot 0 and have a fixed size that depends neither on the block size nor on
 *     the step; within a row every sum runs in slot order (or a fixed tree over vector lanes);
 *   - the softmax restarts every CHUNK slots and chunks are merged in order, which is what allows
 *     long sequences to be split over threads without changing a bit;
 *   - rows occupy separate accumulators everywhere. Slots a row may not see get weight 0, which
 *     leaves its accumulators unchanged;
 *   - the compiler may not rearrange arithmetic (see attention.h).
 */
#include "attention.h"

#include <stdlib.h>

#include "attention_plan.h"
#include "attention_tile.h"
#include "attention_write.h"

/* Denormals are flushed on every thread alike: threads may have been started under different
 * modes, and a result must not depend on which of them computed it. */
#if defined(__SSE__)
typedef unsigned int fp_mode_t;
static fp_mode_t flush_denormals(void) {
    const fp_mode_t old = _mm_getcsr();
    _mm_setcsr(old | 0x8040u);
    return old;
}
static void restore_fp_mode(fp_mode_t mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t fp_mode_t;
static fp_mode_t flush_denormals(void) {
    fp_mode_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(old | (1ull << 24)));
    return old;
}
static void restore_fp_mode(fp_mode_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
typedef int fp_mode_t;
static fp_mode_t flush_denormals(void) { return 0; }
static void restore_fp_mode(fp_mode_t mode) { (void)mode; }
#endif

/* --- One chunk of slots for the rows of a work item --------------------------------------- */

/* Keys of the quarters of the tile at `slot`; quarters beyond the last slot repeat that one. */
ZP_INLINE void find_quarters(const zp_attn_layer *layer, const int32_t *table, int64_t kv_head,
                             int64_t slot, int64_t end, const float **quarters) {
    for (int i = 0; i < 4; i++, slot += QUARTER)
        quarters[i] = key_at(layer, table, kv_head, slot < end ? slot : end - 1);
}

/* Fills `to` with the partial softmax of an item's rows over one chunk. `dim` is a compile-time
 * constant in all callers but one; `packed` says that quarter tiles are contiguous in the cache and
 * rows are whole lines, so that tiles are read in place. `next` is the item this thread probably
 * runs afterwards, or NULL. */
ZP_INLINE void attend_chunk(const job_t *job, const item_t *item, int64_t chunk, state_t to,
                            const item_t *next, const int dim, const int packed) {
    const zp_attn_layer *layer = job->layer;
    const zp_attn_step *step = job->step;
    const int stride = row_stride(dim);
    const int group = (int)(layer->heads / layer->kv_heads);
    const int32_t *table = step->block_tables + item->sequence * step->max_blocks;
    const int64_t start = step->query_start[item->sequence];
    const int64_t fresh = step->query_start[item->sequence + 1] - start;
    const int64_t before = step->cache_lens[item->sequence] - fresh;
    const int64_t head_floats = layer->block_size * dim; /* from head to head */
    const int64_t values = layer->kv_heads * head_floats; /* from keys to values */

    float kt[(packed ? dim : MAX_DIM) * TILE] ZP_ALIGN;
    float gathered[packed ? 1 : 2 * TILE * MAX_DIM] ZP_ALIGN; /* keys, then values */
    float sums[ITEM_ROWS * ZP_VL] ZP_ALIGN, tops[ITEM_ROWS / ROWS * ZP_VL] ZP_ALIGN;
    const float *q[ITEM_ROWS];
    int64_t limit[ITEM_ROWS];

    const int all_rows = item->padded * item->kv_heads;
    for (int h = 0; h < item->kv_heads; h++) {
        const int64_t first_head = (start - job->q_row) * layer->heads
                                   + (item->kv_head + h) * group;
        for (int r = 0; r < item->padded; r++) {
            const int row = item->row + (r < item->rows ? r : item->rows - 1);
            q[h * item->padded + r] = job->q
                + (first_head + row / group * layer->heads + row % group) * dim;
            limit[h * item->padded + r] = before + row / group + 1;
        }
    }
    for (int i = 0; i < all_rows / ROWS * ZP_VL; i++) tops[i] = MASKED;
    memset(to.o, 0, sizeof(float) * (size_t)(all_rows * stride));
    memset(sums, 0, sizeof(float) * (size_t)(all_rows * ZP_VL));
    if (!packed) memset(gathered, 0, sizeof(float) * (size_t)(2 * TILE * stride));

    const int64_t end = limit[item->padded - 1];
    const int64_t stop = end < (chunk + 1) * CHUNK ? end : (chunk + 1) * CHUNK;
    /* With more rows arithmetic outweighs the reading of the cache. */
    const int fetching = packed && item->padded <= 2 * ROWS;

    /* Keys of the item's first KV head: quarters of this tile and of the one that follows. */
    const float *here[4], *then[4];
    if (packed) find_quarters(layer, table, item->kv_head, chunk * CHUNK, end, here);
    for (int64_t slot0 = chunk * CHUNK; slot0 < stop; slot0 += TILE) {
        if (packed && slot0 + TILE < end)
            find_quarters(layer, table, item->kv_head, slot0 + TILE, end, then);
        else if (fetching && next)
            find_quarters(layer, step->block_tables + next->sequence * step->max_blocks,
                          next->kv_head, (int64_t)next->first_chunk * CHUNK,
                          step->cache_lens[next->sequence], then);
        else
            memcpy(then, here, sizeof then);
        for (int h = 0; h < item->kv_heads; h++) {
            tile_t tile = {
                .kt = kt, .v_stride = packed ? dim : stride, .start = slot0,
                .slots = (int)(stop - slot0 < TILE ? stop - slot0 : TILE),
                .q = q + h * item->padded, .limit = limit + h * item->padded,
                .o = to.o + h * item->padded * stride,
                .tops = tops + h * item->padded / ROWS * ZP_VL,
                .sums = sums + h * item->padded * ZP_VL,
            };
            /* Quarters of this tile's values, then of the keys that follow. */
            const float *ahead[8];
            for (int i = 0; fetching && i < 4; i++) {
                ahead[i] = here[i] + h * head_floats + values;
                ahead[4 + i] = h + 1 < item->kv_heads ? here[i] + (h + 1) * head_floats : then[i];
            }
            if (packed) {
                for (int t = 0; t < tile.slots; t += QUARTER) {
                    const int i = t / QUARTER, left = tile.slots - t;
                    const float *keys = here[i] + h * head_floats;
                    for (int j = 0; j < QUARTER; j += ZP_VL)
                        tile.v[(t + j) / ZP_VL] = keys + values + j * dim;
                    if (fetching)
                        transpose_quarter(keys, dim, kt + t, dim, left,
                                          ahead[i / 2] + i % 2 * dim / 2 * LINE);
                    else
                        transpose_quarter(keys, dim, kt + t, dim, left, NULL);
                }
            } else {
                float *keys = gathered, *copies = gathered + TILE * stride;
                for (int t = 0; t < tile.slots; t++) {
                    const float *key = key_at(layer, table, item->kv_head + h, slot0 + t);
                    memcpy(keys + t * stride, key, sizeof(float) * (size_t)dim);
                    memcpy(copies + t * stride, key + values, sizeof(float) * (size_t)dim);
                }
                for (int t = 0; t < tile.slots; t += ZP_VL) tile.v[t / ZP_VL] = copies + t * stride;
                for (int t = 0; t < tile.slots; t += QUARTER)
                    transpose_quarter(keys + t * stride, stride, kt + t, stride, tile.slots - t,
                                      NULL);
            }
            const int whole = tile.slots == TILE;
            for (int i = 4; fetching && !whole && i < 8; i++)
                for (int line = 0; line < dim; line++) fetch(ahead[i] + line * LINE);
            for (int r0 = 0; r0 < item->padded; r0 += ROWS) {
                if (tile.limit[r0 + ROWS - 1] <= slot0) continue;
                if (fetching && whole && r0 == 0)
                    attend_tile(&tile, r0, dim, stride, ahead + 2);
                else
                    attend_tile(&tile, r0, dim, stride, NULL);
            }
        }
        memcpy(here, then, sizeof here);
    }
    for (int r = 0; r < all_rows; r++) {
        to.l[r] = zp_sum(zp_load(sums + r * ZP_VL));
        to.m[r] = tops[r / ROWS * ZP_VL + r % ROWS];
    }
}

typedef void (*attend_chunk_fn)(const job_t *, const item_t *, int64_t, state_t, const item_t *);

#define ATTEND_CHUNK(name, dim, packed)                                                          \
    static void name(const job_t *job, const item_t *item, int64_t chunk, state_t to,            \
                     const item_t *next) {                                                       \
        attend_chunk(job, item, chunk, to, next, dim, packed);                                   \
    }
ATTEND_CHUNK(attend_chunk_64, 64, 1)
ATTEND_CHUNK(attend_chunk_80, 80, 1)
ATTEND_CHUNK(attend_chunk_96, 96, 1)
ATTEND_CHUNK(attend_chunk_128, 128, 1)
ATTEND_CHUNK(attend_chunk_any, (int)job->layer->dim, 0)

static attend_chunk_fn kernel_for(const zp_attn_layer *layer) {
    if (layer->block_size % QUARTER) return attend_chunk_any;
    switch (layer->dim) {
    case 64: return attend_chunk_64;
    case 80: return attend_chunk_80;
    case 96: return attend_chunk_96;
    case 128: return attend_chunk_128;
    default: return attend_chunk_any;
    }
}

/* --- Chunks to rows ----------------------------------------------------------------------- */

/* total := total and part together. Rows that see no slot of the chunk are left alone. */
static void merge(const job_t *job, const item_t *item, int64_t chunk, state_t total,
                  state_t part) {
    const int stride = row_stride((int)job->layer->dim);
    const int group = (int)(job->layer->heads / job->layer->kv_heads);
    const int32_t *start = job->step->query_start + item->sequence;
    const int64_t before = job->step->cache_lens[item->sequence] - (start[1] - start[0]);
    for (int r = 0; r < item->padded * item->kv_heads; r++) {
        const int row = r % item->padded;
        if (row >= item->rows || before + (item->row + row) / group + 1 <= chunk * CHUNK) continue;
        const float m = total.m[r] > part.m[r] ? total.m[r] : part.m[r];
        float weights[ZP_VL] ZP_ALIGN = {total.m[r] - m, part.m[r] - m};
        zp_store(weights, zp_exp2_neg(zp_load(weights)));
        const zp_vf a = zp_set1(weights[0]), b = zp_set1(weights[1]);
        float *to = total.o + r * stride;
        const float *from = part.o + r * stride;
        for (int d = 0; d < stride; d += ZP_VL)
            zp_store(to + d, zp_fma(zp_load(to + d), a, zp_load(from + d) * b));
        total.l[r] = total.l[r] * weights[0] + part.l[r] * weights[1];
        total.m[r] = m;
    }
}

static void write_output(const job_t *job, const item_t *item, state_t total) {
    const int64_t heads = job->layer->heads;
    const int dim = (int)job->layer->dim, stride = row_stride(dim);
    const int group = (int)(heads / job->layer->kv_heads);
    const int64_t start = job->step->query_start[item->sequence];
    for (int r = 0; r < item->padded * item->kv_heads; r++) {
        if (r % item->padded >= item->rows) continue;
        const int row = item->row + r % item->padded;
        const int64_t head = (item->kv_head + r / item->padded) * group + row % group;
        float *to = job->out + ((start + row / group) * heads + head) * dim;
        const float *from = total.o + r * stride;
        const float inverse = 1.0f / total.l[r];
        int d = 0;
        for (; d + ZP_VL <= dim; d += ZP_VL) zp_store(to + d, zp_load(from + d) * zp_set1(inverse));
        for (; d < dim; d++) to[d] = from[d] * inverse;
    }
}

static state_t partial_state(const job_t *job, int64_t row, state_t partials) {
    const int64_t stride = row_stride((int)job->layer->dim);
    return (state_t){partials.o + row * stride, partials.m + row, partials.l + row};
}

static void run_item(const job_t *job, const item_t *item, const item_t *next,
                     attend_chunk_fn kernel, state_t partials) {
    if (item->partial >= 0) {
        kernel(job, item, item->first_chunk, partial_state(job, item->partial, partials), next);
        return;
    }
    float o[2][ITEM_ROWS * MAX_DIM] ZP_ALIGN, m[2][ITEM_ROWS], l[2][ITEM_ROWS];
    const state_t total = {o[0], m[0], l[0]}, part = {o[1], m[1], l[1]};
    kernel(job, item, 0, total, item->chunks == 1 ? next : NULL);
    for (int chunk = 1; chunk < item->chunks; chunk++) {
        kernel(job, item, chunk, part, chunk == item->chunks - 1 ? next : NULL);
        merge(job, item, chunk, total, part);
    }
    write_output(job, item, total);
}

/* `item` is the first of the consecutive items that hold the chunks of the same rows. */
static void merge_item(const job_t *job, const item_t *item, state_t partials) {
    const state_t total = partial_state(job, item->partial, partials);
    for (int chunk = 1; chunk < item->chunks; chunk++)
        merge(job, item, chunk, total, partial_state(job, item[chunk].partial, partials));
    write_output(job, item, total);
}

/* --- Entry ------------------------------------------------------------------------------------ */

static int check_step(const zp_attn_layer *layer, const zp_attn_step *step) {
    if (layer->dim < 1 || layer->dim > MAX_DIM || 2 * layer->half > layer->dim
        || layer->heads % layer->kv_heads || layer->block_size < 1)
        return BAD_SHAPE;
    if (step->tokens < 0 || step->tokens > step->rows) return BAD_SEQUENCE;
    if (step->query_start[0] != 0 || step->query_start[step->sequences] != step->tokens)
        return BAD_SEQUENCE;
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t fresh = step->query_start[s + 1] - step->query_start[s];
        const int64_t blocks = ceil_div(step->cache_lens[s], layer->block_size);
        if (fresh < 0 || fresh > step->cache_lens[s] || blocks > step->max_blocks)
            return BAD_SEQUENCE;
        for (int64_t i = 0; fresh && i < blocks; i++) {
            const int32_t id = step->block_tables[s * step->max_blocks + i];
            if (id < 0 || id >= layer->num_blocks) return BAD_BLOCK;
        }
    }
    for (int64_t row = 0; row < step->tokens; row++) {
        const int64_t slot = step->slot_mapping[row], capture = step->capture[row];
        if (step->positions[row] < 0 || step->positions[row] >= layer->max_positions)
            return BAD_POSITION;
        if (slot < -1 || slot >= layer->num_blocks * layer->block_size) return BAD_SLOT;
        if (capture < -1 || capture >= layer->capture_rows) return BAD_CAPTURE;
    }
    return DONE;
}

/* What every thread of the team runs; alone, outside a parallel region, a thread does all of it. */
static void run_team(const job_t *job, const plan_t *plan, state_t partials, int team) {
    const attend_chunk_fn kernel = kernel_for(job->layer);
    const fp_mode_t mode = flush_denormals();
    if (!plan->decoding) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < job->step->tokens; row++)
            write_row(job, row, 0, job->layer->kv_heads);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan->count; i++) {
        const item_t *item = &plan->items[plan->order[i]];
        const int64_t then = i + team;
        const item_t *next = then < plan->count ? &plan->items[plan->order[then]] : NULL;
        if (plan->decoding) {
            /* No other item needs what this one writes: queries stay in this core's cache. */
            float queries[OWN_QUERIES] ZP_ALIGN;
            job_t alone = *job;
            alone.q = queries;
            alone.q_row = job->step->query_start[item->sequence];
            write_row(&alone, alone.q_row, item->kv_head, item->kv_heads);
            run_item(&alone, item, next, kernel, partials);
        } else {
            run_item(job, item, next, kernel, partials);
        }
    }
    if (plan->partial_rows) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan->count; i++)
            if (plan->items[i].partial >= 0 && plan->items[i].first_chunk == 0)
                merge_item(job, &plan->items[i], partials);
    }
    restore_fp_mode(mode);
}

/* Norms and rotates queries and keys, writes keys and values to the cache, stores captured
 * queries, and attends.
 *
 * qkv: [rows, (heads + 2 kv_heads) * dim]; out: [rows, heads * dim], zero in padding rows.
 * Returns DONE or the reason why nothing was done. */
int zp_attn_forward(const zp_attn_layer *layer, const zp_attn_step *step, const float *qkv,
                    float *out, int threads) {
    int status = check_step(layer, step);
    if (status) return status;
    plan_t plan;
    status = make_plan(layer, step, threads, &plan);
    if (status) return status;
    /* Partial states, then queries that several threads need. */
    const int64_t width = layer->heads * layer->dim;
    const int64_t stride = row_stride((int)layer->dim);
    const int64_t state_floats = plan.partial_rows * (stride + 2);
    const int64_t floats = state_floats + (plan.decoding ? 0 : step->tokens * width);
    float *workspace = NULL;
    if (floats && posix_memalign((void **)&workspace, 64, sizeof(float) * (size_t)floats)) {
        free(plan.items);
        return NO_MEMORY;
    }
    const state_t partials = {workspace, workspace + plan.partial_rows * stride,
                              workspace + plan.partial_rows * (stride + 1)};
    const job_t job = {.layer = layer, .step = step, .qkv = qkv, .out = out,
                       .q = workspace + state_floats};
    memset(out + step->tokens * width, 0,
           sizeof(float) * (size_t)((step->rows - step->tokens) * width));
    const int team = plan.cost < SMALL_WORK ? 1 : threads;
    if (team > 1) {
#pragma omp parallel num_threads(team)
        run_team(&job, &plan, partials, team);
    } else {
        run_team(&job, &plan, partials, 1);
    }
    free(workspace);
    free(plan.items);
    return DONE;
}
