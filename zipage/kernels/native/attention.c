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
 *     leaves its accumulators unchanged. This needs the compiler to keep the order of sums as
 *     written, hence the pragma below; nothing here gains from reassociation.
 */
#if defined(__clang__)
#pragma clang fp reassociate(off)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("no-associative-math", "no-reciprocal-math")
#endif

#include <math.h>
#include <stdlib.h>

#include "vec.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#ifndef HINT
#define HINT 2
#endif
enum {
    ROWS = 4,       /* rows of one micro-kernel call */
    TILE = 64,      /* slots of one softmax update */
    CHUNK = 512,    /* slots of one independent partial softmax */
    ITEM_ROWS = 64, /* most rows of one work item; they share the transposed keys of a tile */
    MAX_DIM = 256,
    GROUPS = TILE / ZP_VL,
    QUARTER = TILE / 4, /* slots that must lie in one block for tiles to be read in place */
    LINE = 16, /* floats of a cache line */
#if ZP_VL == 8
    COLUMNS = 2, /* vectors per row held in registers; 16 registers on AVX2, 32 elsewhere */
#else
    COLUMNS = 4,
#endif
    SMALL_WORK = 1 << 17, /* bytes of KV below which waking other threads costs more than it saves */
};

/* Where scores of masked slots go; finite, so that no comparison relies on infinities. */
#define MASKED (-1e30f)

typedef struct {
    float *kv;           /* [blocks, 2, kv_heads, block_size, dim], one layer */
    float *queries;      /* [capture_rows, heads, dim] */
    const float *q_norm; /* [dim] or NULL */
    const float *k_norm; /* [dim] or NULL */
    const float *cos;    /* [max_positions, half] */
    const float *sin;    /* [max_positions, half] */
    int64_t num_blocks, block_size, heads, kv_heads, dim, half, max_positions, capture_rows;
    float norm_eps, scale;
} zp_attn_layer;

typedef struct {
    const int64_t *positions;    /* [rows] */
    const int64_t *slot_mapping; /* [rows] */
    const int64_t *capture;      /* [rows] */
    const int32_t *query_start;  /* [sequences + 1] */
    const int32_t *cache_lens;   /* [sequences] */
    const int32_t *block_tables; /* [sequences, max_blocks] */
    int64_t rows, tokens, sequences, max_blocks;
} zp_attn_step;

/* Return codes of zp_attn_forward. */
enum {
    DONE = 0,
    BAD_SLOT = 1,
    BAD_POSITION = 2,
    BAD_CAPTURE = 3,
    BAD_SEQUENCE = 4,
    BAD_BLOCK = 5,
    NO_MEMORY = 6,
    BAD_SHAPE = 7,
};

typedef struct {
    const zp_attn_layer *layer;
    const zp_attn_step *step;
    const float *q; /* [rows, heads, dim], scaled by softmax scale * log2(e) */
    float *out;     /* [rows, heads, dim] */
} job_t;

/* Rows [row, row + rows) of one sequence and KV head; row = token * group + head in group. */
typedef struct {
    int32_t sequence, kv_head, row, rows;
    int32_t first_chunk, chunks;
    int64_t partial; /* first row of its partial states, or -1 if it writes the output itself */
} item_t;

/* The state of a partial softmax over some slots: sum of weights times values, maximum score and
 * sum of weights. */
typedef struct {
    float *o; /* [rows, stride] */
    float *m; /* [rows] */
    float *l; /* [rows] */
} state_t;

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

/* --- Norm, RoPE, cache write -------------------------------------------------------------- */

static void normalise(const float *x, const float *weight, float eps, int dim, float *out) {
    zp_vf squares = zp_set1(0.0f);
    float rest = 0.0f;
    int i = 0;
    for (; i + ZP_VL <= dim; i += ZP_VL) {
        const zp_vf v = zp_load(x + i);
        squares += v * v;
    }
    for (; i < dim; i++) rest += x[i] * x[i];
    const float inverse = 1.0f / sqrtf((zp_sum(squares) + rest) / (float)dim + eps);
    for (i = 0; i + ZP_VL <= dim; i += ZP_VL)
        zp_store(out + i, zp_load(x + i) * zp_set1(inverse) * zp_load(weight + i));
    for (; i < dim; i++) out[i] = x[i] * inverse * weight[i];
}

static void rotate(float *x, const float *cos, const float *sin, int half) {
    int i = 0;
    for (; i + ZP_VL <= half; i += ZP_VL) {
        const zp_vf a = zp_load(x + i), b = zp_load(x + half + i);
        const zp_vf c = zp_load(cos + i), s = zp_load(sin + i);
        zp_store(x + i, a * c - b * s);
        zp_store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

static int write_row(const zp_attn_layer *layer, const zp_attn_step *step, int64_t row,
                     const float *qkv, float *q, float *out) {
    const int dim = (int)layer->dim, half = (int)layer->half;
    const int64_t heads = layer->heads, kv_heads = layer->kv_heads, block = layer->block_size;
    const int64_t slot = step->slot_mapping[row], capture = step->capture[row];
    const int64_t position = step->positions[row];
    const size_t bytes = sizeof(float) * (size_t)dim;
    if (row >= step->tokens) {
        memset(out + row * heads * dim, 0, bytes * (size_t)heads);
        return DONE;
    }
    if (position < 0 || position >= layer->max_positions) return BAD_POSITION;
    if (slot < -1 || slot >= layer->num_blocks * block) return BAD_SLOT;
    if (capture < -1 || capture >= layer->capture_rows) return BAD_CAPTURE;
    const float *cos = layer->cos + position * half, *sin = layer->sin + position * half;
    const float *x = qkv + row * (heads + 2 * kv_heads) * dim;
    const float factor = layer->scale * 1.44269504088896341f;
    float y[MAX_DIM] ZP_ALIGN;
    for (int64_t h = 0; h < heads; h++, x += dim) {
        if (layer->q_norm)
            normalise(x, layer->q_norm, layer->norm_eps, dim, y);
        else
            memcpy(y, x, bytes);
        rotate(y, cos, sin, half);
        if (capture >= 0) memcpy(layer->queries + (capture * heads + h) * dim, y, bytes);
        float *to = q + (row * heads + h) * dim;
        for (int i = 0; i < dim; i++) to[i] = y[i] * factor;
    }
    if (slot < 0) return DONE;
    float *to = layer->kv + (slot / block * 2 * kv_heads * block + slot % block) * dim;
    for (int64_t h = 0; h < kv_heads; h++, x += dim) {
        if (layer->k_norm)
            normalise(x, layer->k_norm, layer->norm_eps, dim, y);
        else
            memcpy(y, x, bytes);
        rotate(y, cos, sin, half);
        memcpy(to + h * block * dim, y, bytes);
    }
    to += kv_heads * block * dim;
    for (int64_t h = 0; h < kv_heads; h++, x += dim) memcpy(to + h * block * dim, x, bytes);
    return DONE;
}

/* --- Micro-kernels: ROWS rows against one tile -------------------------------------------- */

/* Scores of `columns` vectors of slots: s[r][t] = q[r] . k[t], summed over the dimension in order. */
ZP_INLINE void score_columns(const float *kt, const float *const *q, float *s, int dim,
                             const int columns, const float *next0, const float *next1) {
    zp_vf acc[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) acc[r][c] = zp_set1(0.0f);
    for (int d = 0; d < dim; d++) {
        if (next0) {
            __builtin_prefetch(next0 + d * LINE, 0, HINT);
            __builtin_prefetch(next1 + d * LINE, 0, HINT);
        }
        zp_vf k[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) k[c] = zp_load(kt + d * TILE + c * ZP_VL);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const zp_vf x = zp_set1(q[r][d]);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) acc[r][c] += x * k[c];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) zp_store(s + r * TILE + c * ZP_VL, acc[r][c]);
}

/* Turns the scores of a row into weights relative to the row's new maximum, which it returns.
 * Slots from `visible` on are masked; `sum` becomes the weights' sum in each lane. */
ZP_INLINE float soften(float *s, int groups, int visible, float m, zp_vf *sum) {
    zp_vf top = zp_set1(MASKED);
    for (int g = 0; g < groups; g++) {
        zp_vf x = zp_load(s + g * ZP_VL);
        if (visible < (g + 1) * ZP_VL) {
            x = zp_select(zp_iota() < zp_set1_int(visible - g * ZP_VL), x, zp_set1(MASKED));
            zp_store(s + g * ZP_VL, x);
        }
        top = zp_max(x, top);
    }
    const float tile_max = zp_max_lane(top);
    const float next = tile_max > m ? tile_max : m;
    zp_vf total = zp_set1(0.0f);
    for (int g = 0; g < groups; g++) {
        const zp_vf p = zp_exp2_neg(zp_load(s + g * ZP_VL) - zp_set1(next));
        total += p;
        zp_store(s + g * ZP_VL, p);
    }
    *sum = total;
    return next;
}

/* o[r] = o[r] * decay[r] + sum over the tile's slots of p[r][t] v[t], for `columns` vectors. */
ZP_INLINE void accumulate_columns(const float *const *v, int64_t v_stride, int slots,
                                  const float *p, const float *decay, float *o, int o_stride,
                                  const int columns, const float *const *next) {
    zp_vf acc[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            acc[r][c] = zp_load(o + r * o_stride + c * ZP_VL) * zp_set1(decay[r]);
    for (int t0 = 0; t0 < slots; t0 += ZP_VL, p += ZP_VL) {
        const float *row = v[t0 / ZP_VL];
        const int count = slots - t0 < ZP_VL ? slots - t0 : ZP_VL;
        const float *pf = next ? next[t0 / QUARTER] + t0 % QUARTER * v_stride : 0;
        for (int t = 0; t < count; t++, row += v_stride) {
            if (next) {
#pragma GCC unroll 4
              for (int c = 0; c < columns * ZP_VL; c += LINE) __builtin_prefetch(pf + c, 0, HINT);
              pf += v_stride;
            }
            zp_vf x[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) x[c] = zp_load(row + c * ZP_VL);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const zp_vf weight = zp_set1(p[r * TILE + t]);
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) acc[r][c] += weight * x[c];
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            zp_store(o + r * o_stride + c * ZP_VL, acc[r][c]);
}

/* --- One chunk of slots for the rows of a work item --------------------------------------- */

/* Fills `to` with the partial softmax of rows [item->row, + item->rows) over one chunk. `dim` is a
 * compile-time constant in all callers but one; `packed` says that groups of ZP_VL slots are
 * contiguous in the cache and rows whole vectors, so that tiles are read in place. */
ZP_INLINE void attend_chunk(const job_t *job, const item_t *item, int64_t chunk, state_t to,
                            const int dim, const int packed) {
    const zp_attn_layer *layer = job->layer;
    const zp_attn_step *step = job->step;
    const int stride = (dim + ZP_VL - 1) / ZP_VL * ZP_VL;
    const int group = (int)(layer->heads / layer->kv_heads);
    const int32_t *table = step->block_tables + item->sequence * step->max_blocks;
    const int64_t start = step->query_start[item->sequence];
    const int64_t first_row = start * layer->heads + item->kv_head * group;
    const int64_t fresh = step->query_start[item->sequence + 1] - start;
    const int64_t before = step->cache_lens[item->sequence] - fresh;
    const uint32_t block = (uint32_t)layer->block_size;
    const int64_t head_size = block * dim, value_offset = layer->kv_heads * head_size;
    const float *kv = layer->kv + item->kv_head * head_size;

    float kt[(packed ? dim : MAX_DIM) * TILE] ZP_ALIGN;
    float gathered[packed ? 1 : 2 * TILE * MAX_DIM] ZP_ALIGN;
    float sums[ITEM_ROWS * ZP_VL] ZP_ALIGN;
    const float *q[ITEM_ROWS];
    int64_t limit[ITEM_ROWS];

    const int padded = (item->rows + ROWS - 1) / ROWS * ROWS;
    for (int r = 0; r < padded; r++) {
        const int row = item->row + (r < item->rows ? r : item->rows - 1);
        q[r] = job->q + (first_row + (int64_t)(row / group) * layer->heads + row % group) * dim;
        limit[r] = before + row / group + 1;
        to.m[r] = MASKED;
    }
    memset(to.o, 0, sizeof(float) * (size_t)(padded * stride));
    memset(sums, 0, sizeof(float) * (size_t)(padded * ZP_VL));
    if (!packed) memset(gathered, 0, sizeof gathered);

    const int64_t stop = limit[padded - 1] < (chunk + 1) * CHUNK ? limit[padded - 1]
                                                                : (chunk + 1) * CHUNK;
    const int64_t end = limit[padded - 1];
    for (int64_t tile = chunk * CHUNK; tile < stop; tile += TILE) {
        const int slots = (int)(stop - tile < TILE ? stop - tile : TILE);
        const float *values[GROUPS], *next_k[4], *next_v[4];
        int64_t value_stride = dim;
        const int more = packed && tile + 2 * TILE <= end;
        for (int i = 0; more && i < 4; i++) {
            const uint32_t slot = (uint32_t)(tile + TILE + i * QUARTER);
            next_k[i] = kv + table[slot / block] * 2 * value_offset + (int64_t)(slot % block) * dim;
            next_v[i] = next_k[i] + value_offset;
        }
        if (packed) {
            for (int t = 0; t < slots; t += ZP_VL) {
                const uint32_t slot = (uint32_t)(tile + t);
                const float *keys = kv + table[slot / block] * 2 * value_offset
                                    + (int64_t)(slot % block) * dim;
                values[t / ZP_VL] = keys + value_offset;
                if (more) {
                    const float *next = next_k[t / QUARTER / 2] + (t % (2 * QUARTER)) * dim / 2;
                    for (int d = 0; d < dim; d += ZP_VL) {
                        for (int i = 0; i < ZP_VL * ZP_VL / 2; i += LINE) __builtin_prefetch(next + d * ZP_VL / 2 + i, 0, HINT);
                        zp_transpose(keys + d, dim, kt + d * TILE + t, TILE);
                    }
                } else
                for (int d = 0; d < dim; d += ZP_VL)
                    zp_transpose(keys + d, dim, kt + d * TILE + t, TILE);
            }
        } else {
            float *keys = gathered, *copies = gathered + TILE * stride;
            value_stride = stride;
            for (int t = 0; t < slots; t++) {
                const uint32_t slot = (uint32_t)(tile + t);
                const float *key = kv + table[slot / block] * 2 * value_offset
                                   + (int64_t)(slot % block) * dim;
                memcpy(keys + t * stride, key, sizeof(float) * (size_t)dim);
                memcpy(copies + t * stride, key + value_offset, sizeof(float) * (size_t)dim);
            }
            for (int t = 0; t < slots; t += ZP_VL) {
                values[t / ZP_VL] = copies + t * stride;
                for (int d = 0; d < stride; d += ZP_VL)
                    zp_transpose(keys + t * stride + d, stride, kt + d * TILE + t, TILE);
            }
        }
        for (int r0 = 0; r0 < padded; r0 += ROWS) {
            const int64_t seen = limit[r0 + ROWS - 1] - tile;
            if (seen <= 0) continue;
            const int used = (int)(seen < slots ? seen : slots);
            const int groups = (used + ZP_VL - 1) / ZP_VL;
            float s[ROWS * TILE] ZP_ALIGN;
            int g = 0;
            if (more && r0 == 0) {
            for (; g + COLUMNS <= groups; g += COLUMNS)
                score_columns(kt + g * ZP_VL, q + r0, s + g * ZP_VL, dim, COLUMNS, next_k[2], next_k[3]);
            } else
            for (; g + COLUMNS <= groups; g += COLUMNS)
                score_columns(kt + g * ZP_VL, q + r0, s + g * ZP_VL, dim, COLUMNS, 0, 0);
            for (; g < groups; g++) score_columns(kt + g * ZP_VL, q + r0, s + g * ZP_VL, dim, 1, 0, 0);
            float decay[ZP_VL] ZP_ALIGN = {0};
            zp_vf sum[ROWS];
            for (int r = 0; r < ROWS; r++) {
                const int64_t row_seen = limit[r0 + r] - tile;
                const int visible = (int)(row_seen < TILE ? row_seen : TILE);
                const float m = soften(s + r * TILE, groups, visible, to.m[r0 + r], &sum[r]);
                decay[r] = to.m[r0 + r] - m;
                to.m[r0 + r] = m;
            }
            zp_store(decay, zp_exp2_neg(zp_load(decay)));
            for (int r = 0; r < ROWS; r++) {
                float *lanes = sums + (r0 + r) * ZP_VL;
                zp_store(lanes, zp_load(lanes) * zp_set1(decay[r]) + sum[r]);
            }
            float *o = to.o + r0 * stride;
            int d = 0;
            for (; d + COLUMNS * ZP_VL <= stride; d += COLUMNS * ZP_VL) {
                const float *shifted[GROUPS];
                for (int i = 0; i < groups; i++) shifted[i] = values[i] + d;
                if (more && r0 == 0) {
                const float *shifted_v[GROUPS];
                for (int i = 0; i < 4; i++) shifted_v[i] = next_v[i] + d;
                accumulate_columns(shifted, value_stride, used, s, decay, o + d, stride, COLUMNS, shifted_v);
                } else
                accumulate_columns(shifted, value_stride, used, s, decay, o + d, stride, COLUMNS, 0);
            }
            for (; d < stride; d += ZP_VL) {
                const float *shifted[GROUPS];
                for (int i = 0; i < groups; i++) shifted[i] = values[i] + d;
                accumulate_columns(shifted, value_stride, used, s, decay, o + d, stride, 1, 0);
            }
        }
    }
    for (int r = 0; r < padded; r++) to.l[r] = zp_sum(zp_load(sums + r * ZP_VL));
}

typedef void (*attend_chunk_fn)(const job_t *, const item_t *, int64_t, state_t);

#define ATTEND_CHUNK(name, dim, packed)                                                          \
    static void name(const job_t *job, const item_t *item, int64_t chunk, state_t to) {          \
        attend_chunk(job, item, chunk, to, dim, packed);                                         \
    }
ATTEND_CHUNK(attend_chunk_64, 64, 1)
ATTEND_CHUNK(attend_chunk_80, 80, 1)
ATTEND_CHUNK(attend_chunk_96, 96, 1)
ATTEND_CHUNK(attend_chunk_128, 128, 1)
ATTEND_CHUNK(attend_chunk_any, (int)job->layer->dim, 0)

static attend_chunk_fn kernel_for(const zp_attn_layer *layer) {
    if (layer->block_size % ZP_VL) return attend_chunk_any;
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
static void merge(const job_t *job, const item_t *item, int64_t chunk, state_t total, state_t part) {
    const int stride = ((int)job->layer->dim + ZP_VL - 1) / ZP_VL * ZP_VL;
    const int group = (int)(job->layer->heads / job->layer->kv_heads);
    const int32_t *start = job->step->query_start + item->sequence;
    const int64_t before = job->step->cache_lens[item->sequence] - (start[1] - start[0]);
    for (int r = 0; r < item->rows; r++) {
        if (before + (item->row + r) / group + 1 <= chunk * CHUNK) continue;
        const float m = total.m[r] > part.m[r] ? total.m[r] : part.m[r];
        float weights[ZP_VL] ZP_ALIGN = {total.m[r] - m, part.m[r] - m};
        zp_store(weights, zp_exp2_neg(zp_load(weights)));
        const zp_vf a = zp_set1(weights[0]), b = zp_set1(weights[1]);
        float *to = total.o + r * stride;
        const float *from = part.o + r * stride;
        for (int d = 0; d < stride; d += ZP_VL)
            zp_store(to + d, zp_load(to + d) * a + zp_load(from + d) * b);
        total.l[r] = total.l[r] * weights[0] + part.l[r] * weights[1];
        total.m[r] = m;
    }
}

static void write_output(const job_t *job, const item_t *item, state_t total) {
    const int64_t heads = job->layer->heads;
    const int dim = (int)job->layer->dim, stride = (dim + ZP_VL - 1) / ZP_VL * ZP_VL;
    const int group = (int)(heads / job->layer->kv_heads);
    const int64_t start = job->step->query_start[item->sequence];
    for (int r = 0; r < item->rows; r++) {
        const int row = item->row + r;
        const int64_t head = item->kv_head * group + row % group;
        float *to = job->out + ((start + row / group) * heads + head) * dim;
        const float *from = total.o + r * stride;
        const float inverse = 1.0f / total.l[r];
        int d = 0;
        for (; d + ZP_VL <= dim; d += ZP_VL) zp_store(to + d, zp_load(from + d) * zp_set1(inverse));
        for (; d < dim; d++) to[d] = from[d] * inverse;
    }
}

static void run_item(const job_t *job, const item_t *item, attend_chunk_fn kernel, state_t partials) {
    const int64_t stride = (job->layer->dim + ZP_VL - 1) / ZP_VL * ZP_VL;
    if (item->partial >= 0) {
        const state_t to = {partials.o + item->partial * stride, partials.m + item->partial,
                            partials.l + item->partial};
        kernel(job, item, item->first_chunk, to);
        return;
    }
    float o[2][ITEM_ROWS * MAX_DIM] ZP_ALIGN, m[2][ITEM_ROWS], l[2][ITEM_ROWS];
    const state_t total = {o[0], m[0], l[0]}, part = {o[1], m[1], l[1]};
    kernel(job, item, 0, total);
    for (int chunk = 1; chunk < item->chunks; chunk++) {
        kernel(job, item, chunk, part);
        merge(job, item, chunk, total, part);
    }
    write_output(job, item, total);
}

/* `item` is the first of the consecutive items that hold the chunks of the same rows. */
static void merge_item(const job_t *job, const item_t *item, state_t partials) {
    const int64_t stride = (job->layer->dim + ZP_VL - 1) / ZP_VL * ZP_VL;
    const state_t total = {partials.o + item->partial * stride, partials.m + item->partial,
                           partials.l + item->partial};
    for (int chunk = 1; chunk < item->chunks; chunk++) {
        const int64_t at = item[chunk].partial;
        const state_t part = {partials.o + at * stride, partials.m + at, partials.l + at};
        merge(job, item, chunk, total, part);
    }
    write_output(job, item, total);
}

/* --- Work items ----------------------------------------------------------------------------- */

typedef struct {
    item_t *items;
    int32_t *order; /* items, most expensive first */
    int64_t count, partial_rows, kv_bytes;
} plan_t;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Slots the last row of an item sees. */
static int64_t item_slots(const zp_attn_step *step, int64_t seq, int64_t last_row, int64_t group) {
    const int64_t fresh = step->query_start[seq + 1] - step->query_start[seq];
    return step->cache_lens[seq] - fresh + last_row / group + 1;
}

static int check_step(const zp_attn_layer *layer, const zp_attn_step *step) {
    if (layer->dim < 1 || layer->dim > MAX_DIM || 2 * layer->half > layer->dim
        || layer->heads % layer->kv_heads || layer->block_size < 1)
        return BAD_SHAPE;
    if (step->tokens < 0 || step->tokens > step->rows) return BAD_SEQUENCE;
    if (step->sequences && (step->query_start[0] != 0
                            || step->query_start[step->sequences] > step->tokens))
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
    return DONE;
}

static int make_plan(const zp_attn_layer *layer, const zp_attn_step *step, int threads,
                     plan_t *plan) {
    const int64_t group = layer->heads / layer->kv_heads;
    int64_t whole = 0, split = 0;
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t rows = (step->query_start[s + 1] - step->query_start[s]) * group;
        for (int64_t row = 0; row < rows; row += ITEM_ROWS) {
            const int64_t last = (row + ITEM_ROWS < rows ? row + ITEM_ROWS : rows) - 1;
            whole += layer->kv_heads;
            split += layer->kv_heads * ceil_div(item_slots(step, s, last, group), CHUNK);
        }
    }
    const int by_chunk = split > whole && whole < 4 * (int64_t)threads && threads > 1;
    plan->count = by_chunk ? split : whole;
    plan->partial_rows = plan->kv_bytes = 0;
    plan->items = malloc((size_t)(plan->count + 1) * (sizeof(item_t) + sizeof(int32_t)));
    if (!plan->items) return NO_MEMORY;
    plan->order = (int32_t *)(plan->items + plan->count);

    int64_t n = 0, most = 1;
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t rows = (step->query_start[s + 1] - step->query_start[s]) * group;
        for (int64_t row = 0; row < rows; row += ITEM_ROWS) {
            const int64_t here = row + ITEM_ROWS < rows ? ITEM_ROWS : rows - row;
            const int64_t slots = item_slots(step, s, row + here - 1, group);
            const int64_t chunks = ceil_div(slots, CHUNK);
            if (slots * (here + ROWS) > most) most = slots * (here + ROWS);
            plan->kv_bytes += layer->kv_heads * slots * layer->dim * 8;
            for (int64_t h = 0; h < layer->kv_heads; h++)
                for (int64_t c = 0; c < (by_chunk ? chunks : 1); c++) {
                    const int parts = by_chunk && chunks > 1;
                    plan->items[n++] = (item_t){
                        .sequence = (int32_t)s, .kv_head = (int32_t)h, .row = (int32_t)row,
                        .rows = (int32_t)here, .first_chunk = (int32_t)c, .chunks = (int32_t)chunks,
                        .partial = parts ? plan->partial_rows : -1,
                    };
                    if (parts) plan->partial_rows += ceil_div(here, ROWS) * ROWS;
                }
        }
    }
    /* Longest first, by a counting sort on rounded cost: keeps the threads' finishing times close. */
    enum { BUCKETS = 64 };
    int32_t start[BUCKETS + 1] = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < n; i++) {
            const item_t *item = &plan->items[i];
            int64_t slots = item_slots(step, item->sequence, item->row + item->rows - 1, group);
            if (item->partial >= 0) {
                slots -= (int64_t)item->first_chunk * CHUNK;
                if (slots > CHUNK) slots = CHUNK;
            }
            const int64_t bucket = (most - slots * (item->rows + ROWS)) * (BUCKETS - 1) / most;
            if (pass == 0)
                start[bucket + 1]++;
            else
                plan->order[start[bucket]++] = (int32_t)i;
        }
        for (int b = 0; pass == 0 && b < BUCKETS; b++) start[b + 1] += start[b];
    }
    return DONE;
}

/* Norms and rotates queries and keys, writes keys and values to the cache, stores captured
 * queries, and attends.
 *
 * qkv: [rows, (heads + 2 kv_heads) * dim]; q: scratch [rows, heads * dim];
 * out: [rows, heads * dim], zero in padding rows. Returns DONE or the reason why nothing was
 * computed (the cache may have been written in part). */
int zp_attn_forward(const zp_attn_layer *layer, const zp_attn_step *step, const float *qkv, float *q,
                    float *out, int threads) {
    int status = check_step(layer, step);
    if (status) return status;
    plan_t plan;
    status = make_plan(layer, step, threads, &plan);
    if (status) return status;
    const int64_t stride = ceil_div(layer->dim, ZP_VL) * ZP_VL;
    float *workspace = NULL;
    if (plan.partial_rows
        && posix_memalign((void **)&workspace, 64,
                          sizeof(float) * (size_t)(plan.partial_rows * (stride + 2)))) {
        free(plan.items);
        return NO_MEMORY;
    }
    const state_t partials = {workspace, workspace + plan.partial_rows * stride,
                              workspace + plan.partial_rows * (stride + 1)};
    const job_t job = {layer, step, q, out};
    const attend_chunk_fn kernel = kernel_for(layer);
    const int team = plan.kv_bytes < SMALL_WORK ? 1 : threads;

#pragma omp parallel num_threads(team)
    {
        const fp_mode_t mode = flush_denormals();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < step->rows; row++) {
            const int bad = write_row(layer, step, row, qkv, q, out);
            if (bad) {
#pragma omp atomic write
                status = bad;
            }
        }
        if (!status) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < plan.count; i++)
                run_item(&job, &plan.items[plan.order[i]], kernel, partials);
            if (plan.partial_rows) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t i = 0; i < plan.count; i++)
                    if (plan.items[i].partial >= 0 && plan.items[i].first_chunk == 0)
                        merge_item(&job, &plan.items[i], partials);
            }
        }
        restore_fp_mode(mode);
    }
    free(workspace);
    free(plan.items);
    return status;
}
