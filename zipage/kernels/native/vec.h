/* Fixed-width float vectors on GCC and Clang vector extensions, for any architecture.
 *
 * ZP_VL is the number of floats of one hardware register. Wider vectors would compile too, but
 * compilers split two-operand shuffles of unsupported widths into scalar code.
 */
#ifndef ZIPAGE_VEC_H
#define ZIPAGE_VEC_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define ZP_VL 16
#elif defined(__AVX2__)
#define ZP_VL 8
#else
#define ZP_VL 4
#endif

/* Vector registers of the machine. */
#if ZP_VL == 16 || defined(__aarch64__)
#define ZP_REGISTERS 32
#else
#define ZP_REGISTERS 16
#endif

#define ZP_INLINE static inline __attribute__((always_inline, unused))
#define ZP_ALIGN __attribute__((aligned(64)))

typedef float zp_vf __attribute__((vector_size(4 * ZP_VL)));
typedef int32_t zp_vi __attribute__((vector_size(4 * ZP_VL)));
typedef float zp_vf_any __attribute__((vector_size(4 * ZP_VL), aligned(4), may_alias));

ZP_INLINE zp_vf zp_load(const float *p) { return *(const zp_vf_any *)p; }
ZP_INLINE void zp_store(float *p, zp_vf v) { *(zp_vf_any *)p = v; }

/* Written out because compilers turn a loop over lanes into inserts rather than a broadcast. */
#if ZP_VL == 16
#define ZP_LANES(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#define ZP_IOTA {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif ZP_VL == 8
#define ZP_LANES(x) {x, x, x, x, x, x, x, x}
#define ZP_IOTA {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define ZP_LANES(x) {x, x, x, x}
#define ZP_IOTA {0, 1, 2, 3}
#endif

/* Keeps a loaded vector in a register: GCC otherwise loads it again for each use, and the loads
 * then limit the loop. */
#if defined(__AVX512F__)
#define ZP_PIN(v) __asm__("" : "+v"(v))
#elif defined(__SSE2__)
#define ZP_PIN(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define ZP_PIN(v) __asm__("" : "+w"(v))
#else
#define ZP_PIN(v) (void)0
#endif

ZP_INLINE zp_vf zp_set1(float x) { return (zp_vf)ZP_LANES(x); }
ZP_INLINE zp_vi zp_set1_int(int32_t x) { return (zp_vi)ZP_LANES(x); }
ZP_INLINE zp_vi zp_iota(void) { return (zp_vi)ZP_IOTA; }

/* a where the mask (0 or -1 per lane) is set, else b. */
ZP_INLINE zp_vf zp_select(zp_vi mask, zp_vf a, zp_vf b) {
    return (zp_vf)(((zp_vi)a & mask) | ((zp_vi)b & ~mask));
}

/* The greater of each lane, b's where either is NaN. One instruction on x86, which compilers do not
 * find by themselves. */
ZP_INLINE zp_vf zp_max(zp_vf a, zp_vf b) {
#if ZP_VL == 16
    return _mm512_max_ps(a, b);
#elif ZP_VL == 8
    return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
    return _mm_max_ps(a, b);
#else
    return zp_select(a > b, a, b);
#endif
}

/* a * b + c, rounded once wherever the machine can. Explicit, so that which of several products is
 * fused is not the compiler's choice. */
ZP_INLINE zp_vf zp_fma(zp_vf a, zp_vf b, zp_vf c) {
#if ZP_VL == 16
    return _mm512_fmadd_ps(a, b, c);
#elif ZP_VL == 8 && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif ZP_VL == 4 && defined(__FMA__)
    return _mm_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (zp_vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Lanes 0, 1, .. of a, then of b: one index list per result lane. */
#if defined(__clang__) || __GNUC__ >= 12
#define ZP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (zp_vi){__VA_ARGS__})
#endif

#if ZP_VL == 16
#define ZP_HALF_8(v) ZP_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define ZP_HALF_4(v) ZP_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define ZP_HALF_2(v) ZP_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define ZP_HALF_1(v) ZP_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#elif ZP_VL == 8
#define ZP_HALF_4(v) ZP_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3)
#define ZP_HALF_2(v) ZP_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5)
#define ZP_HALF_1(v) ZP_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6)
#else
#define ZP_HALF_2(v) ZP_SHUFFLE(v, v, 2, 3, 0, 1)
#define ZP_HALF_1(v) ZP_SHUFFLE(v, v, 1, 0, 3, 2)
#endif

/* Horizontal sum: a fixed tree, so the result depends on the lanes alone. */
ZP_INLINE float zp_sum(zp_vf v) {
#if ZP_VL >= 16
    v = v + ZP_HALF_8(v);
#endif
#if ZP_VL >= 8
    v = v + ZP_HALF_4(v);
#endif
    v = v + ZP_HALF_2(v);
    v = v + ZP_HALF_1(v);
    return v[0];
}

/* 2^x for x <= 0 by a minimax polynomial, relative error < 2e-7; exactly 1 at 0, 0 below -126.5
 * and for NaN. */
ZP_INLINE zp_vf zp_exp2_neg(zp_vf x) {
    x = zp_max(x, zp_set1(-127.0f));
    /* Rounding to the nearest integer: truncation goes towards zero, and x is not positive. */
    const zp_vi n = __builtin_convertvector(x - zp_set1(0.5f), zp_vi);
    const zp_vf f = x - __builtin_convertvector(n, zp_vf);
    zp_vf p = zp_set1(0.000153533620f);
    p = zp_fma(p, f, zp_set1(0.00133988750f));
    p = zp_fma(p, f, zp_set1(0.00961843692f));
    p = zp_fma(p, f, zp_set1(0.0555033237f));
    p = zp_fma(p, f, zp_set1(0.240226477f));
    p = zp_fma(p, f, zp_set1(0.693147182f));
    p = zp_fma(p, f, zp_set1(1.0f));
    return p * (zp_vf)((n + 127) << 23); /* n = -127 gives the bits of 0 */
}

/* In-lane and cross-lane steps of a transpose; "lane" is a group of four floats here. */
#if ZP_VL == 16
#define ZP_ZIP_LO(a, b) \
    ZP_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define ZP_ZIP_HI(a, b) \
    ZP_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define ZP_PAIR_LO(a, b) \
    ZP_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define ZP_PAIR_HI(a, b) \
    ZP_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define ZP_EVEN_LANES(a, b) \
    ZP_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ZP_ODD_LANES(a, b) \
    ZP_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#elif ZP_VL == 8
#define ZP_ZIP_LO(a, b) ZP_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define ZP_ZIP_HI(a, b) ZP_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define ZP_PAIR_LO(a, b) ZP_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define ZP_PAIR_HI(a, b) ZP_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define ZP_EVEN_LANES(a, b) ZP_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ZP_ODD_LANES(a, b) ZP_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define ZP_ZIP_LO(a, b) ZP_SHUFFLE(a, b, 0, 4, 1, 5)
#define ZP_ZIP_HI(a, b) ZP_SHUFFLE(a, b, 2, 6, 3, 7)
#define ZP_PAIR_LO(a, b) ZP_SHUFFLE(a, b, 0, 1, 4, 5)
#define ZP_PAIR_HI(a, b) ZP_SHUFFLE(a, b, 2, 3, 6, 7)
#endif

/* The maximum of each of four vectors, in lanes 0 to 3 and again in every following four. */
ZP_INLINE zp_vf zp_max_of_four(zp_vf a, zp_vf b, zp_vf c, zp_vf d) {
    const zp_vf ab = zp_max(ZP_ZIP_LO(a, b), ZP_ZIP_HI(a, b));
    const zp_vf cd = zp_max(ZP_ZIP_LO(c, d), ZP_ZIP_HI(c, d));
    zp_vf v = zp_max(ZP_PAIR_LO(ab, cd), ZP_PAIR_HI(ab, cd));
#if ZP_VL >= 16
    v = zp_max(v, ZP_HALF_8(v));
#endif
#if ZP_VL >= 8
    v = zp_max(v, ZP_HALF_4(v));
#endif
    return v;
}

/* out[i * stride + t] = rows[t * row + i] for i, t < ZP_VL: a square transposed in registers. */
ZP_INLINE void zp_transpose(const float *rows, int64_t row, float *out, int64_t stride) {
    enum { LANES = ZP_VL / 4 };
    zp_vf x[LANES][4]; /* x[q][i], lane k: column 4 k + i of rows 4 q .. 4 q + 3 */
#pragma GCC unroll 4
    for (int q = 0; q < LANES; q++) {
        const zp_vf a = zp_load(rows + (4 * q + 0) * row), b = zp_load(rows + (4 * q + 1) * row);
        const zp_vf c = zp_load(rows + (4 * q + 2) * row), d = zp_load(rows + (4 * q + 3) * row);
        const zp_vf ab_lo = ZP_ZIP_LO(a, b), ab_hi = ZP_ZIP_HI(a, b);
        const zp_vf cd_lo = ZP_ZIP_LO(c, d), cd_hi = ZP_ZIP_HI(c, d);
        x[q][0] = ZP_PAIR_LO(ab_lo, cd_lo);
        x[q][1] = ZP_PAIR_HI(ab_lo, cd_lo);
        x[q][2] = ZP_PAIR_LO(ab_hi, cd_hi);
        x[q][3] = ZP_PAIR_HI(ab_hi, cd_hi);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#if ZP_VL == 16
        const zp_vf even_01 = ZP_EVEN_LANES(x[0][i], x[1][i]);
        const zp_vf even_23 = ZP_EVEN_LANES(x[2][i], x[3][i]);
        const zp_vf odd_01 = ZP_ODD_LANES(x[0][i], x[1][i]);
        const zp_vf odd_23 = ZP_ODD_LANES(x[2][i], x[3][i]);
        zp_store(out + (0 + i) * stride, ZP_EVEN_LANES(even_01, even_23));
        zp_store(out + (4 + i) * stride, ZP_EVEN_LANES(odd_01, odd_23));
        zp_store(out + (8 + i) * stride, ZP_ODD_LANES(even_01, even_23));
        zp_store(out + (12 + i) * stride, ZP_ODD_LANES(odd_01, odd_23));
#elif ZP_VL == 8
        zp_store(out + (0 + i) * stride, ZP_EVEN_LANES(x[0][i], x[1][i]));
        zp_store(out + (4 + i) * stride, ZP_ODD_LANES(x[0][i], x[1][i]));
#else
        zp_store(out + i * stride, x[0][i]);
#endif
    }
}

#endif
