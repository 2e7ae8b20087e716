/* What a decoder layer does between its matrix products, fused, fp32.
 *
 * Rows are computed whole by one thread and elements all by the same vector code, so a row's bits
 * depend on nothing but the row.
 */
#include "attention.h"

#include <math.h>
#include <stddef.h>

/* Elements below which waking other threads costs more than it saves. */
enum { SMALL = 1 << 16 };

ZP_INLINE zp_vf load_some(const float *p, int64_t count) {
    float lanes[ZP_VL] ZP_ALIGN = {0};
    memcpy(lanes, p, sizeof(float) * (size_t)count);
    return zp_load(lanes);
}

ZP_INLINE void store_some(float *p, zp_vf v, int64_t count) {
    float lanes[ZP_VL] ZP_ALIGN;
    zp_store(lanes, v);
    memcpy(p, lanes, sizeof(float) * (size_t)count);
}

static void add_rms_norm_row(float *x, const float *delta, const float *weight, float eps,
                             int64_t width, float *out) {
    zp_vf squares = zp_set1(0.0f);
    int64_t i = 0;
    for (; i + ZP_VL <= width; i += ZP_VL) {
        zp_vf v = zp_load(x + i);
        if (delta) {
            v += zp_load(delta + i);
            zp_store(x + i, v);
        }
        squares = zp_fma(v, v, squares);
    }
    const int64_t rest = width - i;
    if (rest) {
        zp_vf v = load_some(x + i, rest);
        if (delta) {
            v += load_some(delta + i, rest);
            store_some(x + i, v, rest);
        }
        squares = zp_fma(v, v, squares);
    }
    const zp_vf inverse = zp_set1(1.0f / sqrtf(zp_sum(squares) / (float)width + eps));
    for (i = 0; i + ZP_VL <= width; i += ZP_VL)
        zp_store(out + i, zp_load(x + i) * inverse * zp_load(weight + i));
    if (rest)
        store_some(out + i, load_some(x + i, rest) * inverse * load_some(weight + i, rest), rest);
}

/* x * sigmoid(x); the exponential is taken of -|x|, which cannot overflow. */
ZP_INLINE zp_vf silu(zp_vf x) {
    const zp_vi negative = x < zp_set1(0.0f);
    const zp_vf e = zp_exp2_neg(zp_select(negative, x, -x) * zp_set1(1.44269504088896341f));
    return x * zp_select(negative, e, zp_set1(1.0f)) / (zp_set1(1.0f) + e);
}

static void silu_mul_row(const float *gate, const float *up, int64_t width, float *out) {
    int64_t i = 0;
    for (; i + ZP_VL <= width; i += ZP_VL)
        zp_store(out + i, silu(zp_load(gate + i)) * zp_load(up + i));
    const int64_t rest = width - i;
    if (rest)
        store_some(out + i, silu(load_some(gate + i, rest)) * load_some(up + i, rest), rest);
}

/* x := x + delta; out := rms_norm(x) * weight.
 *
 * x, delta, out: [rows, width], contiguous, not overlapping; delta may be NULL; weight: [width]. */
void zp_add_rms_norm(float *x, const float *delta, const float *weight, float eps, int64_t rows,
                     int64_t width, float *out, int threads) {
    const int team = rows * width < SMALL ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t row = 0; row < rows; row++)
        add_rms_norm_row(x + row * width, delta ? delta + row * width : NULL, weight, eps, width,
                         out + row * width);
}

/* out := silu(gate) * up, where gate_up: [rows, 2 * width], gate first; out: [rows, width]. */
void zp_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *out, int threads) {
    const int team = rows * width < SMALL ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t row = 0; row < rows; row++)
        silu_mul_row(gate_up + 2 * row * width, gate_up + (2 * row + 1) * width, width,
                     out + row * width);
}
