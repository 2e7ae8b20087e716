/* Attention of ROWS rows to one tile of TILE slots: scores, softmax update, weighted values. */
#ifndef ZIPAGE_ATTENTION_TILE_H
#define ZIPAGE_ATTENTION_TILE_H

#include "attention.h"

/* A decode step reads blocks scattered over more memory than the caches hold, and hardware
 * prefetchers stop at each jump and each page. So the arithmetic on one half of a tile, keys or
 * values, asks for the half that comes next, evenly: asked for in bursts, lines wait for each
 * other. */
ZP_INLINE void fetch(const float *line) { __builtin_prefetch(line, 0, 3); }

/* Key of a slot of a sequence with block table `table`. */
ZP_INLINE const float *key_at(const zp_attn_layer *layer, const int32_t *table, int64_t kv_head,
                              int64_t slot) {
    const uint32_t block = (uint32_t)layer->block_size;
    const int64_t head = table[(uint32_t)slot / block] * 2 * layer->kv_heads + kv_head;
    return layer->kv + (head * block + (uint32_t)slot % block) * layer->dim;
}

/* Transposes the keys of a quarter tile, or of its first `slots` slots: kt[d][t] = keys[t][d]. Asks
 * for half of the quarter tile `ahead`. */
ZP_INLINE void transpose_quarter(const float *keys, int64_t stride, float *kt, int dim, int slots,
                                 const float *ahead) {
    for (int t = 0; t < slots && t < QUARTER; t += ZP_VL)
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
            const zp_vf x = zp_load(s + r * TILE + g * ZP_VL);
            const zp_vf p = zp_exp2_neg(x - shift);
            /* The exponential of NaN is 0, but a score that is NaN must be seen in the result. */
            total += p + (x - x);
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

#endif
