/* Types, constants and floating-point rules of the attention kernels.
 *
 * To be included before anything else: the compiler may neither reorder sums nor choose which
 * products to fuse with them, since it would choose differently in differently specialised copies
 * of a loop, and a row's bits must not depend on which copy computed it (see attention.c). Sums
 * are written in order and fused with zp_fma.
 */
#ifndef ZIPAGE_ATTENTION_H
#define ZIPAGE_ATTENTION_H

#if defined(__clang__)
#pragma clang fp reassociate(off) contract(off)
#else
#pragma GCC optimize("no-associative-math", "no-reciprocal-math", "fp-contract=off")
#endif

#include "vec.h"

enum {
    ROWS = 4,       /* rows of one micro-kernel call */
    TILE = 64,      /* slots of one softmax update */
    CHUNK = 512,    /* slots of one independent partial softmax */
    ITEM_ROWS = 64, /* most rows of one work item; rows of a KV head share its transposed keys */
    ITEM_HEADS = 4, /* most KV heads of one work item: they are neighbours in memory */
    MAX_DIM = 256,
    OWN_QUERIES = ITEM_ROWS * MAX_DIM, /* floats of queries an item can keep to itself */
    QUARTER = TILE / 4, /* slots that must be contiguous for tiles to be read in place */
    LINE = 16,          /* floats of a cache line */
    GROUPS = TILE / ZP_VL,
    COLUMNS = ZP_VL == 8 ? 2 : 4, /* vectors per row held in registers; whole lines */
    SMALL_WORK = 20000, /* cost of a step (see item_cost) not worth waking other threads for */
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
    const float *qkv; /* [rows, heads + 2 kv_heads, dim] */
    float *q;         /* [rows from q_row on, heads, dim], scaled by softmax scale * log2(e) */
    int64_t q_row;
    float *out;       /* [rows, heads, dim] */
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

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Floats of a row of a state: whole vectors. */
ZP_INLINE int row_stride(int dim) { return (dim + ZP_VL - 1) / ZP_VL * ZP_VL; }

#endif
