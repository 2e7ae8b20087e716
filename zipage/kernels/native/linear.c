/* y = x W^T in fp32, with weights packed once for it.
 *
 * Every output is a sum of sums over DEPTH products in order, and of a bias or the old output. So a
 * row's bits depend neither on the other rows nor on the number of threads nor on how the work is
 * cut.
 */
#include "attention.h"

#include <stddef.h>

enum {
    VECS = 2,
    PANEL = VECS * ZP_VL, /* output columns of a packed panel */
    TALL = ZP_REGISTERS >= 32 ? 8 : 4, /* rows of one micro-kernel call */
    DEPTH = 64,       /* depth of one pass: short sums, added up, round less than one long one */
    AHEAD = 64,       /* how far in depth weights are asked for early */
    MOST_ROWS = 64,   /* rows of one work item, fewer where items are few */
    SMALL = 1 << 19,  /* products below which waking other threads costs more than it saves */
};

/* out[r][c] = start[r][c] + sum_k x[r][k] panel[k][c] for `rows` rows and all columns of a panel;
 * without a start from zero. */
ZP_INLINE void multiply(const float *x, int64_t x_stride, const float *panel, int64_t depth,
                        const float *start, int64_t start_stride, float *out, int64_t out_stride,
                        const int rows) {
    zp_vf acc[TALL][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++)
            acc[r][v] = zp_set1(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        for (int i = 0; i < PANEL; i += LINE)
            __builtin_prefetch(panel + (k + AHEAD) * PANEL + i, 0, 3);
        zp_vf w[VECS];
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            w[v] = zp_load(panel + k * PANEL + v * ZP_VL);
            ZP_PIN(w[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const zp_vf a = zp_set1(x[r * x_stride + k]);
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) acc[r][v] = zp_fma(a, w[v], acc[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            /* Added last: on top of a large residual every product would be rounded to its size. */
            if (start) acc[r][v] += zp_load(start + r * start_stride + v * ZP_VL);
            zp_store(out + r * out_stride + v * ZP_VL, acc[r][v]);
        }
}

static void multiply_rows(const float *x, int64_t x_stride, const float *panel, int64_t depth,
                          const float *start, int64_t start_stride, float *out, int64_t out_stride,
                          int64_t rows) {
    switch (rows) {
#define ROWS_CASE(n)                                                                             \
    case n: multiply(x, x_stride, panel, depth, start, start_stride, out, out_stride, n); break;
        ROWS_CASE(1)
        ROWS_CASE(2)
        ROWS_CASE(3)
        ROWS_CASE(4)
#if ZP_REGISTERS >= 32
        ROWS_CASE(5)
        ROWS_CASE(6)
        ROWS_CASE(7)
        ROWS_CASE(8)
#endif
#undef ROWS_CASE
    }
}

typedef struct {
    const float *x;      /* [rows, depth] */
    const float *packed; /* see zp_linear_pack */
    const float *bias;   /* [width] or NULL */
    float *y;            /* [rows, width] */
    int64_t depth, width;
} product_t;

/* Rows [first, last) of one panel's columns. */
static void multiply_panel(const product_t *p, int64_t panel, int64_t first, int64_t last) {
    const int64_t n = panel * PANEL, columns = p->width - n;
    const size_t bytes = sizeof(float) * (size_t)(columns < PANEL ? columns : PANEL);
    for (int64_t k = 0; k < p->depth; k += DEPTH) {
        const int64_t depth = p->depth - k < DEPTH ? p->depth - k : DEPTH;
        const float *weights = p->packed + n * p->depth + k * PANEL;
        for (int64_t row = first; row < last; row += TALL) {
            const int64_t rows = last - row < TALL ? last - row : TALL;
            const float *x = p->x + row * p->depth + k;
            float *y = p->y + row * p->width + n;
            const float *start = k ? y : p->bias ? p->bias + n : NULL;
            const int64_t start_stride = k ? p->width : 0;
            if (columns >= PANEL) {
                multiply_rows(x, p->depth, weights, depth, start, start_stride, y, p->width, rows);
                continue;
            }
            /* The last panel may be wider than the output. */
            float wide[TALL * PANEL] ZP_ALIGN = {0};
            for (int64_t r = 0; start && r < rows; r++)
                memcpy(wide + r * PANEL, start + r * start_stride, bytes);
            multiply_rows(x, p->depth, weights, depth, wide, PANEL, wide, PANEL, rows);
            for (int64_t r = 0; r < rows; r++) memcpy(y + r * p->width, wide + r * PANEL, bytes);
        }
    }
}

/* Floats of a packed weight of shape [width, depth]. */
int64_t zp_linear_packed_size(int64_t width, int64_t depth) {
    return ceil_div(width, PANEL) * PANEL * depth;
}

/* packed: [panels, depth, PANEL], the columns of the last panel padded with zeros. */
void zp_linear_pack(const float *weight, int64_t width, int64_t depth, float *packed) {
    for (int64_t n = 0; n < width; n += PANEL)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t c = 0; c < PANEL; c++)
                packed[n * depth + k * PANEL + c]
                    = n + c < width ? weight[(n + c) * depth + k] : 0.0f;
}

/* y := x W^T (+ bias).
 *
 * x: [rows, depth]; y: [rows, width]; both contiguous, not overlapping. */
void zp_linear(const float *x, int64_t rows, int64_t depth, const float *packed, int64_t width,
               const float *bias, float *y, int threads) {
    const product_t product = {x, packed, bias, y, depth, width};
    const int team = rows * depth * width < SMALL ? 1 : threads;
    const int64_t panels = ceil_div(width, PANEL);
    int64_t share = MOST_ROWS;
    while (share > TALL && panels * ceil_div(rows, share) < 4 * team) share /= 2;
    const int64_t items = panels * ceil_div(rows, share);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t item = 0; item < items; item++) {
        const int64_t first = item / panels * share;
        multiply_panel(&product, item % panels, first, first + share < rows ? first + share : rows);
    }
}
