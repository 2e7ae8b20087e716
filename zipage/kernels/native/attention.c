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
 *   - the compiler may neither reorder sums nor choose which products to fuse with them, since it
 *     would choose differently in differently specialised copies of a loop: hence the pragmas and
 *     zp_fma.
 */
#if defined(__clang__)
#pragma clang fp reassociate(off) contract(off)
#else
#pragma GCC optimize("no-associative-math", "no-reciprocal-math", "fp-contract=off")
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
    ITEM_ROWS = 64, /* most rows of one work item; rows of a KV head share its transposed keys */
    ITEM_BYTES = 1 << 17, /* most KV bytes of one tile of a work item: it waits in the L2 cache */
    MAX_DIM = 256,
    QUARTER = TILE / 4, /* slots that must be contiguous for tiles to be read in place */
    LINE = 16,          /* floats of a cache line */
    GROUPS = TILE / ZP_VL,
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

/* Rows [row, row + rows) of one sequence in each of `kv_heads` KV heads; row = token * group + head
 * in the group. In a state the rows of one KV head are padded to a multiple of ROWS. */
typedef struct {
    int32_t sequence, kv_head, kv_heads, row, rows, padded;
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
        squares = zp_fma(v, v, squares);
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
        zp_store(x + i, zp_fma(a, c, -(b * s)));
        zp_store(x + half + i, zp_fma(b, c, a * s));
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

/* --- Prefetch ------------------------------------------------------------------------------ */

/* The quarter tiles a thread will read next, in the order of their addresses. A decode step reads
 * blocks scattered over more memory than any cache holds, and each jump stops the hardware's
 * prefetcher; asking for the lines one tile early, evenly spread over the arithmetic, hides it. */
typedef struct {
    const float *kv; /* keys of the first KV head in block 0 */
    const int32_t *table;
    int64_t tile, end;            /* first slot of the tile being fetched, slots in all */
    int64_t block, dim;           /* slots of a block, floats of a slot */
    int64_t block_floats, values; /* floats from block to block, from keys to values */
    int heads, run; /* KV heads, quarters of a tile that are contiguous in one block */
    int part, region, quarter; /* position: run of the tile, key or value head, quarter of run */
} stream_t;

static void open_stream(stream_t *stream, const job_t *job, const item_t *item, int64_t slot) {
    const zp_attn_layer *layer = job->layer;
    const int64_t head_floats = layer->block_size * layer->dim;
    const int64_t fresh = job->step->query_start[item->sequence + 1]
                          - job->step->query_start[item->sequence];
    const int64_t group = layer->heads / layer->kv_heads;
    *stream = (stream_t){
        .kv = layer->kv + item->kv_head * head_floats,
        .table = job->step->block_tables + item->sequence * job->step->max_blocks,
        .tile = slot,
        .end = job->step->cache_lens[item->sequence] - fresh
               + (item->row + item->rows - 1) / group + 1,
        .block = layer->block_size,
        .dim = layer->dim,
        .block_floats = 2 * layer->kv_heads * head_floats,
        .values = layer->kv_heads * head_floats,
        .heads = item->kv_heads,
        .run = layer->block_size % TILE == 0 ? 4 : layer->block_size % (2 * QUARTER) == 0 ? 2 : 1,
    };
}

/* The next quarter tile of the stream, or NULL at its end. */
static const float *next_quarter(stream_t *s) {
    while (s->tile < s->end) {
        const int64_t slot = s->tile + (s->part * s->run + s->quarter) * QUARTER;
        const int region = s->region;
        if (++s->quarter == s->run) {
            s->quarter = 0;
            if (++s->region == 2 * s->heads) {
                s->region = 0;
                if (++s->part * s->run == 4) {
                    s->part = 0;
                    s->tile += TILE;
                }
            }
        }
        if (slot >= s->end) continue;
        const float *block = s->kv + s->table[(uint32_t)slot / (uint32_t)s->block] * s->block_floats;
        const int64_t head = region < s->heads ? region : region - s->heads;
        return block + (region < s->heads ? 0 : s->values) + head * s->block * s->dim
               + (int64_t)((uint32_t)slot % (uint32_t)s->block) * s->dim;
    }
    return NULL;
}

ZP_INLINE void fetch(const float *line) { __builtin_prefetch(line, 0, HINT); }

/* --- Micro-kernels: ROWS rows against one tile -------------------------------------------- */

/* Transposes the keys of the quarter tile at slot `t`: kt[d][t + i] = keys[i][d]. Asks for half of
 * the quarter tile `ahead`. */
ZP_INLINE void transpose_quarter(const float *keys, int64_t stride, float *kt, int dim, int slots,
                                 const float *ahead) {
    for (int t = 0; t < slots; t += ZP_VL)
        for (int d = 0; d < dim; d += LINE) {
            if (ahead)
                for (int i = 0; i < ZP_VL / 2; i++, ahead += LINE) fetch(ahead);
            for (int e = d; e < d + LINE && e < dim; e += ZP_VL)
                zp_transpose(keys + t * stride + e, stride, kt + e * TILE + t, TILE);
        }
}

/* Scores of `columns` vectors of slots: s[r][t] = q[r] . k[t], summed over the dimension in order.
 * Asks for `parts` quarter tiles `ahead`. */
ZP_INLINE void score_columns(const float *kt, const float *const *q, float *s, const int dim,
                             const int columns, const float *const *ahead, const int parts) {
    zp_vf acc[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) acc[r][c] = zp_set1(0.0f);
    for (int part = 0; part < parts; part++) {
        const float *line = ahead ? ahead[part] : NULL;
        for (int d = part * dim / parts; d < (part + 1) * dim / parts; d++) {
            for (int i = 0; ahead && i < parts; i++, line += LINE) fetch(line);
            zp_vf k[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                k[c] = zp_load(kt + d * TILE + c * ZP_VL);
                ZP_PIN(k[c]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const zp_vf x = zp_set1(q[r][d]);
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) acc[r][c] = zp_fma(x, k[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) zp_store(s + r * TILE + c * ZP_VL, acc[r][c]);
}

/* Turns scores into weights relative to each row's new maximum. Row r sees `visible[r]` slots of
 * the tile. `top` holds the maxima (row r in lanes r, r + 4, ..), `sums` ZP_VL partial sums of the
 * weights per row; both are updated, and `decay` receives what earlier sums are to be scaled by. */
ZP_INLINE void soften(float *s, const int groups, const int *visible, float *top, float *sums,
                      float *decay) {
    zp_vf tops[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        tops[r] = zp_set1(MASKED);
        for (int g = 0; g < groups; g++) {
            zp_vf x = zp_load(s + r * TILE + g * ZP_VL);
            if (visible[r] < (g + 1) * ZP_VL) {
                x = zp_select(zp_iota() < zp_set1_int(visible[r] - g * ZP_VL), x, zp_set1(MASKED));
                zp_store(s + r * TILE + g * ZP_VL, x);
            }
            tops[r] = zp_max(x, tops[r]);
        }
    }
    const zp_vf old = zp_load(top);
    const zp_vf next = zp_max(zp_max_of_four(tops[0], tops[1], tops[2], tops[3]), old);
    const zp_vf fading = zp_exp2_neg(old - next);
    zp_store(top, next);
    zp_store(decay, fading);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        const zp_vf shift = zp_set1(next[r]);
        zp_vf total = zp_set1(0.0f);
        for (int g = 0; g < groups; g++) {
            const zp_vf p = zp_exp2_neg(zp_load(s + r * TILE + g * ZP_VL) - shift);
            total += p;
            zp_store(s + r * TILE + g * ZP_VL, p);
        }
        float *lanes = sums + r * ZP_VL;
        zp_store(lanes, zp_fma(zp_load(lanes), zp_set1(fading[r]), total));
    }
}

/* o[r] = o[r] * decay[r] + sum over the tile's slots of p[r][t] v[t], for `columns` vectors.
 * v and ahead point to the rows of every ZP_VL slots. */
ZP_INLINE void accumulate_columns(const float *const *v, int64_t stride, int slots, const float *p,
                                  const float *decay, float *o, int o_stride, const int columns,
                                  const float *const *ahead) {
    zp_vf acc[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            acc[r][c] = zp_load(o + r * o_stride + c * ZP_VL) * zp_set1(decay[r]);
    for (int t0 = 0; t0 < slots; t0 += ZP_VL, p += ZP_VL) {
        const float *row = v[t0 / ZP_VL], *line = ahead ? ahead[t0 / ZP_VL] : NULL;
        const int count = slots - t0 < ZP_VL ? slots - t0 : ZP_VL;
        for (int t = 0; t < count; t++, row += stride) {
            if (ahead)
#pragma GCC unroll 4
                for (int c = 0; c < columns * ZP_VL; c += LINE, line += LINE) fetch(line);
            zp_vf x[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                x[c] = zp_load(row + c * ZP_VL);
                ZP_PIN(x[c]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const zp_vf weight = zp_set1(p[r * TILE + t]);
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) acc[r][c] = zp_fma(weight, x[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            zp_store(o + r * o_stride + c * ZP_VL, acc[r][c]);
}

/* The rows of one KV head in one tile. */
typedef struct {
    const float *kt;           /* [dim, TILE] */
    const float *v[GROUPS];    /* rows of every ZP_VL slots */
    int64_t v_stride;
    int64_t start;             /* first slot */
    int slots;
    const float *const *q;     /* row -> query */
    const int64_t *limit;      /* row -> slots it sees */
    float *o, *tops, *sums;    /* state, see soften */
} tile_t;

/* Attends ROWS rows from `r0` to a tile. `ahead`, if any, names six quarter tiles to ask for. */
ZP_INLINE void attend_tile(const tile_t *tile, int r0, const int dim, const int stride,
                           const float *const *ahead) {
    enum { PARTS = COLUMNS * ZP_VL == TILE ? 2 : 1 };
    const int64_t seen = tile->limit[r0 + ROWS - 1] - tile->start;
    const int used = (int)(seen < tile->slots ? seen : tile->slots);
    const int groups = (used + ZP_VL - 1) / ZP_VL;
    const float *const *q = tile->q + r0;
    float s[ROWS * TILE] ZP_ALIGN;
    int g = 0;
    if (ahead)
        for (; g + COLUMNS <= groups && g / COLUMNS < 2 / PARTS; g += COLUMNS)
            score_columns(tile->kt + g * ZP_VL, q, s + g * ZP_VL, dim, COLUMNS,
                          ahead + g / COLUMNS, PARTS);
    for (; g + COLUMNS <= groups; g += COLUMNS)
        score_columns(tile->kt + g * ZP_VL, q, s + g * ZP_VL, dim, COLUMNS, NULL, 1);
    for (; g < groups; g++)
        score_columns(tile->kt + g * ZP_VL, q, s + g * ZP_VL, dim, 1, NULL, 1);

    int visible[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const int64_t row_seen = tile->limit[r0 + r] - tile->start;
        visible[r] = (int)(row_seen < TILE ? row_seen : TILE);
    }
    float decay[ZP_VL] ZP_ALIGN;
    float *top = tile->tops + r0 / ROWS * ZP_VL, *sums = tile->sums + r0 * ZP_VL;
    if (groups == GROUPS)
        soften(s, GROUPS, visible, top, sums, decay);
    else
        soften(s, groups, visible, top, sums, decay);

    float *o = tile->o + r0 * stride;
    int d = 0;
    for (; d + COLUMNS * ZP_VL <= stride; d += COLUMNS * ZP_VL) {
        const float *v[GROUPS], *lines[GROUPS];
        for (int i = 0; i < groups; i++) {
            v[i] = tile->v[i] + d;
            if (ahead) {
                const int line = (d / LINE * TILE) + i * ZP_VL * (COLUMNS * ZP_VL / LINE);
                lines[i] = ahead[2 + line / dim] + line % dim * LINE;
            }
        }
        if (ahead)
            accumulate_columns(v, tile->v_stride, used, s, decay, o + d, stride, COLUMNS, lines);
        else
            accumulate_columns(v, tile->v_stride, used, s, decay, o + d, stride, COLUMNS, NULL);
    }
    for (; d < stride; d += ZP_VL) {
        const float *v[GROUPS];
        for (int i = 0; i < groups; i++) v[i] = tile->v[i] + d;
        accumulate_columns(v, tile->v_stride, used, s, decay, o + d, stride, 1, NULL);
    }
}

/* --- One chunk of slots for the rows of a work item --------------------------------------- */

/* Fills `to` with the partial softmax of an item's rows over one chunk. `dim` is a compile-time
 * constant in all callers but one; `packed` says that quarter tiles are contiguous in the cache and
 * rows are whole lines, so that tiles are read in place. `next` is the item this thread probably
 * runs afterwards, or NULL. */
ZP_INLINE void attend_chunk(const job_t *job, const item_t *item, int64_t chunk, state_t to,
                            const item_t *next, const int dim, const int packed) {
    const zp_attn_layer *layer = job->layer;
    const zp_attn_step *step = job->step;
    const int stride = (dim + ZP_VL - 1) / ZP_VL * ZP_VL;
    const int group = (int)(layer->heads / layer->kv_heads);
    const int32_t *table = step->block_tables + item->sequence * step->max_blocks;
    const int64_t start = step->query_start[item->sequence];
    const int64_t fresh = step->query_start[item->sequence + 1] - start;
    const int64_t before = step->cache_lens[item->sequence] - fresh;
    const uint32_t block = (uint32_t)layer->block_size;
    const int64_t head_floats = block * dim, values = layer->kv_heads * head_floats;

    float kt[(packed ? dim : MAX_DIM) * TILE] ZP_ALIGN;
    float gathered[packed ? 1 : 2 * TILE * MAX_DIM] ZP_ALIGN;
    float sums[ITEM_ROWS * ZP_VL] ZP_ALIGN, tops[ITEM_ROWS / ROWS * ZP_VL] ZP_ALIGN;
    const float *q[ITEM_ROWS];
    int64_t limit[ITEM_ROWS];

    const int all_rows = item->padded * item->kv_heads;
    for (int h = 0; h < item->kv_heads; h++) {
        const float *first = job->q + (start * layer->heads + (item->kv_head + h) * group) * dim;
        for (int r = 0; r < item->padded; r++) {
            const int row = item->row + (r < item->rows ? r : item->rows - 1);
            q[h * item->padded + r] = first + (row / group * layer->heads + row % group) * dim;
            limit[h * item->padded + r] = before + row / group + 1;
        }
    }
    for (int i = 0; i < all_rows / ROWS * ZP_VL; i++) tops[i] = MASKED;
    memset(to.o, 0, sizeof(float) * (size_t)(all_rows * stride));
    memset(sums, 0, sizeof(float) * (size_t)(all_rows * ZP_VL));
    if (!packed) memset(gathered, 0, sizeof gathered);

    const int64_t end = limit[item->padded - 1];
    const int64_t stop = end < (chunk + 1) * CHUNK ? end : (chunk + 1) * CHUNK;
    /* With more rows arithmetic outweighs the reading of the cache. */
    const int fetching = packed && item->padded <= 2 * ROWS;
    stream_t stream;
    if (fetching) open_stream(&stream, job, item, chunk * CHUNK + TILE);

    for (int64_t slot0 = chunk * CHUNK; slot0 < stop; slot0 += TILE)
        for (int h = 0; h < item->kv_heads; h++) {
            const float *kv = layer->kv + (item->kv_head + h) * head_floats;
            tile_t tile = {
                .kt = kt, .v_stride = packed ? dim : stride, .start = slot0,
                .slots = (int)(stop - slot0 < TILE ? stop - slot0 : TILE),
                .q = q + h * item->padded, .limit = limit + h * item->padded,
                .o = to.o + h * item->padded * stride,
                .tops = tops + h * item->padded / ROWS * ZP_VL,
                .sums = sums + h * item->padded * ZP_VL,
            };
            const float *ahead[8];
            for (int i = 0; fetching && i < 2 * ((tile.slots + QUARTER - 1) / QUARTER); i++) {
                ahead[i] = next_quarter(&stream);
                if (!ahead[i] && next) {
                    open_stream(&stream, job, next, (int64_t)next->first_chunk * CHUNK);
                    stream.end = stream.end < stream.tile + TILE ? stream.end : stream.tile + TILE;
                    next = NULL;
                    ahead[i] = next_quarter(&stream);
                }
                if (!ahead[i]) ahead[i] = q[0];
            }
            if (packed) {
                for (int t = 0; t < tile.slots; t += QUARTER) {
                    const uint32_t slot = (uint32_t)(slot0 + t);
                    const float *keys = kv + table[slot / block] * 2 * values
                                        + (int64_t)(slot % block) * dim;
                    for (int i = 0; i < QUARTER; i += ZP_VL)
                        tile.v[(t + i) / ZP_VL] = keys + values + i * dim;
                    const int left = tile.slots - t < QUARTER ? tile.slots - t : QUARTER;
                    const float *line = NULL;
                    if (fetching) line = ahead[t / QUARTER / 2] + t / QUARTER % 2 * dim / 2 * LINE;
                    if (fetching)
                        transpose_quarter(keys, dim, kt + t, dim, left, line);
                    else
                        transpose_quarter(keys, dim, kt + t, dim, left, NULL);
                }
            } else {
                float *keys = gathered, *copies = gathered + TILE * stride;
                for (int t = 0; t < tile.slots; t++) {
                    const uint32_t slot = (uint32_t)(slot0 + t);
                    const float *key = kv + table[slot / block] * 2 * values
                                       + (int64_t)(slot % block) * dim;
                    memcpy(keys + t * stride, key, sizeof(float) * (size_t)dim);
                    memcpy(copies + t * stride, key + values, sizeof(float) * (size_t)dim);
                }
                for (int t = 0; t < tile.slots; t += ZP_VL) tile.v[t / ZP_VL] = copies + t * stride;
                transpose_quarter(keys, stride, kt, stride, tile.slots, NULL);
            }
            for (int r0 = 0; r0 < item->padded; r0 += ROWS) {
                if (tile.limit[r0 + ROWS - 1] <= slot0) continue;
                if (fetching && r0 == 0 && tile.slots == TILE)
                    attend_tile(&tile, r0, dim, stride, ahead + 2);
                else
                    attend_tile(&tile, r0, dim, stride, NULL);
            }
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
static void merge(const job_t *job, const item_t *item, int64_t chunk, state_t total, state_t part) {
    const int stride = ((int)job->layer->dim + ZP_VL - 1) / ZP_VL * ZP_VL;
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
    const int dim = (int)job->layer->dim, stride = (dim + ZP_VL - 1) / ZP_VL * ZP_VL;
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
    const int64_t stride = (job->layer->dim + ZP_VL - 1) / ZP_VL * ZP_VL;
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

/* How the work of a step is cut into items. */
typedef struct {
    int64_t together; /* most KV heads of one item */
    int by_chunk;     /* whether the chunks of a row are separate items */
} cut_t;

static int64_t heads_together(int64_t rows, int64_t heads, cut_t cut) {
    const int64_t room = ITEM_ROWS / (ceil_div(rows, ROWS) * ROWS);
    int64_t together = cut.together < room ? cut.together : room;
    if (rows > 2 * ROWS) together = 1;
    while (heads % together) together--;
    return together;
}

/* Lists the items of a step into `plan` and returns their number; only counts without a list. */
static int64_t list_items(const zp_attn_layer *layer, const zp_attn_step *step, cut_t cut,
                          plan_t *plan) {
    const int64_t group = layer->heads / layer->kv_heads;
    int64_t n = 0;
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t rows = (step->query_start[s + 1] - step->query_start[s]) * group;
        for (int64_t row = 0; row < rows; row += ITEM_ROWS) {
            const int64_t here = row + ITEM_ROWS < rows ? ITEM_ROWS : rows - row;
            const int64_t together = heads_together(here, layer->kv_heads, cut);
            const int64_t slots = item_slots(step, s, row + here - 1, group);
            const int64_t chunks = ceil_div(slots, CHUNK);
            const int64_t parts = cut.by_chunk ? chunks : 1;
            if (!plan) {
                n += layer->kv_heads / together * parts;
                continue;
            }
            plan->kv_bytes += layer->kv_heads * slots * layer->dim * 8;
            for (int64_t h = 0; h < layer->kv_heads; h += together)
                for (int64_t c = 0; c < parts; c++) {
                    item_t *item = &plan->items[n++];
                    *item = (item_t){
                        .sequence = (int32_t)s, .kv_head = (int32_t)h,
                        .kv_heads = (int32_t)together, .row = (int32_t)row, .rows = (int32_t)here,
                        .padded = (int32_t)(ceil_div(here, ROWS) * ROWS),
                        .first_chunk = (int32_t)c, .chunks = (int32_t)chunks, .partial = -1,
                    };
                    if (parts > 1) {
                        item->partial = plan->partial_rows;
                        plan->partial_rows += item->padded * together;
                    }
                }
        }
    }
    return n;
}

static int64_t item_cost(const zp_attn_layer *layer, const zp_attn_step *step, const item_t *item) {
    int64_t slots = item_slots(step, item->sequence, item->row + item->rows - 1,
                               layer->heads / layer->kv_heads);
    if (item->partial >= 0) {
        slots -= (int64_t)item->first_chunk * CHUNK;
        if (slots > CHUNK) slots = CHUNK;
    }
    return slots * item->kv_heads * (item->padded + 2 * ROWS);
}

/* Longest first, by a counting sort on rounded cost: keeps the threads' finishing times close. */
static void sort_items(const zp_attn_layer *layer, const zp_attn_step *step, plan_t *plan) {
    enum { BUCKETS = 64 };
    int32_t start[BUCKETS + 1] = {0};
    int64_t most = 1;
    for (int64_t i = 0; i < plan->count; i++) {
        const int64_t cost = item_cost(layer, step, &plan->items[i]);
        if (cost > most) most = cost;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < plan->count; i++) {
            const int64_t cost = item_cost(layer, step, &plan->items[i]);
            const int64_t bucket = (most - cost) * (BUCKETS - 1) / most;
            if (pass == 0)
                start[bucket + 1]++;
            else
                plan->order[start[bucket]++] = (int32_t)i;
        }
        for (int b = 0; pass == 0 && b < BUCKETS; b++) start[b + 1] += start[b];
    }
}

static int make_plan(const zp_attn_layer *layer, const zp_attn_step *step, int threads,
                     plan_t *plan) {
    const int64_t enough = 8 * (int64_t)threads;
    cut_t cut = {.together = ITEM_BYTES / (TILE * layer->dim * 8)};
    if (cut.together < 1) cut.together = 1;
    plan->count = list_items(layer, step, cut, NULL);
    if (threads > 1 && plan->count < enough) {
        cut.together = 1;
        plan->count = list_items(layer, step, cut, NULL);
    }
    if (threads > 1 && plan->count < enough) {
        cut.by_chunk = 1;
        plan->count = list_items(layer, step, cut, NULL);
    }
    plan->partial_rows = plan->kv_bytes = 0;
    plan->items = malloc((size_t)(plan->count + 1) * (sizeof(item_t) + sizeof(int32_t)));
    if (!plan->items) return NO_MEMORY;
    plan->order = (int32_t *)(plan->items + plan->count);
    list_items(layer, step, cut, plan);
    sort_items(layer, step, plan);
    return DONE;
}

/* --- Entry ------------------------------------------------------------------------------------ */

/* What every thread of the team runs; alone, outside a parallel region, a thread does all of it. */
static void run_team(const job_t *job, const plan_t *plan, const float *qkv, float *q,
                     state_t partials, int team, int *status) {
    const attend_chunk_fn kernel = kernel_for(job->layer);
    const fp_mode_t mode = flush_denormals();
#pragma omp for schedule(static)
    for (int64_t row = 0; row < job->step->rows; row++) {
        const int bad = write_row(job->layer, job->step, row, qkv, q, job->out);
        if (bad) {
#pragma omp atomic write
            *status = bad;
        }
    }
    if (*status == DONE) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan->count; i++) {
            const int64_t then = i + team;
            run_item(job, &plan->items[plan->order[i]],
                     then < plan->count ? &plan->items[plan->order[then]] : NULL, kernel, partials);
        }
        if (plan->partial_rows) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < plan->count; i++)
                if (plan->items[i].partial >= 0 && plan->items[i].first_chunk == 0)
                    merge_item(job, &plan->items[i], partials);
        }
    }
    restore_fp_mode(mode);
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
    const int team = plan.kv_bytes < SMALL_WORK ? 1 : threads;
    if (team > 1) {
#pragma omp parallel num_threads(team)
        run_team(&job, &plan, qkv, q, partials, team, &status);
    } else {
        run_team(&job, &plan, qkv, q, partials, 1, &status);
    }
    free(workspace);
    free(plan.items);
    return status;
}
