/* Scores of one request's cached tokens, fp32: attention of the window, and redundancy.
 *
 * The torch reference is zipage/compression/scores.py. Every (layer, KV head) is one independent
 * task with scratch of its own, so results do not depend on the number of threads.
 *
 * The heavy operation is a product of row-major rows (keys as they lie in the cache) with a
 * panel: PANEL columns stored transposed, [D][PANEL]. The window's queries are such panels once
 * per head, so keys are never transposed to be scored.
 */
#include <math.h>

#include "compression.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define PANEL_VECS 4
#else
#define PANEL_VECS 2
#endif
#define PANEL (ZP_VL * PANEL_VECS)
#define MICRO_ROWS 6 /* MICRO_ROWS * PANEL_VECS accumulators, a row and a column fit the registers */

#define LOG2E 1.44269504088896341f
#define MASKED (-1e30f)
#define NORM_EPS 1e-12f

/* ---- products of rows with a panel ------------------------------------------------------- */

ZP_INLINE void micro(const float *a, int64_t lda, const float *panel, int64_t dim, float *out,
                     int64_t ldo, const int rows, const int vecs)
{
    zp_vf acc[MICRO_ROWS][PANEL_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            acc[r][v] = zp_set1(0);
    for (int64_t d = 0; d < dim; d++) {
        zp_vf column[PANEL_VECS];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            column[v] = zp_load(panel + d * PANEL + v * ZP_VL);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            zp_vf x = zp_set1(a[r * lda + d]);
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++)
                acc[r][v] += x * column[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++)
            zp_store(out + r * ldo + v * ZP_VL, acc[r][v]);
}

ZP_INLINE void panel_product_vecs(const float *a, int64_t lda, int64_t rows, const float *panel,
                                  int64_t dim, float *out, int64_t ldo, const int vecs)
{
    int64_t i = 0;
    for (; i + MICRO_ROWS <= rows; i += MICRO_ROWS)
        micro(a + i * lda, lda, panel, dim, out + i * ldo, ldo, MICRO_ROWS, vecs);
    if (rows - i >= 4) {
        micro(a + i * lda, lda, panel, dim, out + i * ldo, ldo, 4, vecs);
        i += 4;
    }
    for (; i < rows; i++)
        micro(a + i * lda, lda, panel, dim, out + i * ldo, ldo, 1, vecs);
}

/* out[i, c] = sum_d a[i, d] * panel[d, c] for `rows` rows and `vecs * ZP_VL` columns. */
static void panel_product(const float *a, int64_t lda, int64_t rows, const float *panel,
                          int64_t dim, float *out, int64_t ldo, int64_t vecs)
{
    switch (vecs) {
    case 1: panel_product_vecs(a, lda, rows, panel, dim, out, ldo, 1); break;
    case 2: panel_product_vecs(a, lda, rows, panel, dim, out, ldo, 2); break;
#if PANEL_VECS == 4
    case 3: panel_product_vecs(a, lda, rows, panel, dim, out, ldo, 3); break;
    default: panel_product_vecs(a, lda, rows, panel, dim, out, ldo, 4); break;
#endif
    }
}

/* Where column `i` begins in a row of panels. */
ZP_INLINE int64_t panel_column(int64_t i, int64_t dim)
{
    return i / PANEL * PANEL * dim + i % PANEL;
}

/* panel[d, c] = a[c, d] for c < rows, 0 for the other columns up to ZP_VL; rows <= ZP_VL. */
static void pack_columns(const float *a, int64_t lda, int64_t rows, int64_t dim, float *panel)
{
    int64_t d = 0;
    if (rows == ZP_VL)
        for (; d + ZP_VL <= dim; d += ZP_VL)
            zp_transpose(a + d, lda, panel + d * PANEL, PANEL);
    for (; d < dim; d++)
        for (int64_t c = 0; c < ZP_VL; c++)
            panel[d * PANEL + c] = c < rows ? a[c * lda + d] : 0.f;
}

/* ---- attention of the window queries ------------------------------------------------------ */

ZP_INLINE float lane_max(zp_vf v)
{
    float lanes[ZP_VL], best;
    zp_store(lanes, v);
    best = lanes[0];
    for (int i = 1; i < ZP_VL; i++)
        best = lanes[i] > best ? lanes[i] : best;
    return best;
}

struct attention_scratch {
    float *panels;      /* queries, scaled */
    float *peak, *norm; /* [lanes] maximum of the logits; then sum of weights, then its inverse */
    float *s;           /* [T][lanes] logits, then weights */
};

/* Lane g * wp + i holds window query i of query head g of the group (wp: w padded to whole
 * vectors): the group is reduced vertically and only the window across lanes. */
static void attention_head(const struct zp_comp_cache *c, const struct zp_comp_job *job,
                           int64_t layer, int64_t head, float scale, int group_max,
                           int window_max, struct attention_scratch m, float *out)
{
    const int64_t dim = c->dim, b = c->block_size, w = c->window, T = job->length;
    const int64_t group = c->heads / c->kv_heads, wp = (w + ZP_VL - 1) / ZP_VL * ZP_VL;
    const int64_t lanes = group * wp;

    const float *q = c->queries
        + ((layer * c->slots + job->query_slot) * w * c->heads + head * group) * dim;
    for (int64_t lane = 0; lane < lanes; lane += ZP_VL) {
        const int64_t g = lane / wp, i = lane % wp, rows = w - i < ZP_VL ? w - i : ZP_VL;
        float *panel = m.panels + panel_column(lane, dim);
        pack_columns(q + (i * c->heads + g) * dim, c->heads * dim, rows, dim, panel);
        for (int64_t d = 0; d < dim; d++)
            zp_store(panel + d * PANEL, zp_load(panel + d * PANEL) * zp_set1(scale * LOG2E));
    }
    for (int64_t lane = 0; lane < lanes; lane++) {
        m.peak[lane] = MASKED;
        m.norm[lane] = 0;
    }

    for (int64_t n = 0, t0 = 0; t0 < T; n++, t0 += b) {
        const float *keys = zp_tile(c, layer, job->source[n], 0, head);
        const int64_t rows = T - t0 < b ? T - t0 : b;
        float *tile = m.s + t0 * lanes;
        for (int64_t lane = 0; lane < lanes; lane += PANEL) {
            const int64_t vecs = lanes - lane < PANEL ? (lanes - lane) / ZP_VL : PANEL_VECS;
            panel_product(keys, dim, rows, m.panels + lane * dim, dim, tile + lane, lanes, vecs);
        }
        for (int64_t t = t0 > T - w ? t0 : T - w; t < t0 + rows; t++)
            for (int64_t g = 0; g < group; g++)
                for (int64_t i = 0; i < t - (T - w); i++)
                    m.s[t * lanes + g * wp + i] = MASKED;
        for (int64_t lane = 0; lane < lanes; lane += ZP_VL) {
            zp_vf peak = zp_load(m.peak + lane);
            for (int64_t r = 0; r < rows; r++)
                peak = zp_max(peak, zp_load(tile + r * lanes + lane));
            zp_store(m.peak + lane, peak);
        }
    }

    for (int64_t t0 = 0; t0 < T; t0 += b) {
        const int64_t end = T - t0 < b ? T : t0 + b;
        for (int64_t lane = 0; lane < lanes; lane += ZP_VL) {
            zp_vf peak = zp_load(m.peak + lane), sum = zp_set1(0);
            for (int64_t t = t0; t < end; t++) {
                zp_vf e = zp_exp2_neg(zp_load(m.s + t * lanes + lane) - peak);
                zp_store(m.s + t * lanes + lane, e);
                sum += e;
            }
            zp_store(m.norm + lane, zp_load(m.norm + lane) + sum);
        }
    }

    /* Both means are factors, and a maximum over positive values commutes with them. */
    const float mean = (group_max ? 1.f : 1.f / (float)group) * (window_max ? 1.f : 1.f / (float)w);
    for (int64_t lane = 0; lane < lanes; lane++)
        m.norm[lane] = lane % wp < w ? mean / m.norm[lane] : 0.f;
    for (int64_t t = 0; t < T; t++) {
        zp_vf reduced = zp_set1(0);
        for (int64_t i = 0; i < wp; i += ZP_VL) {
            zp_vf p = zp_load(m.s + t * lanes + i) * zp_load(m.norm + i);
            for (int64_t g = 1; g < group; g++) {
                const int64_t lane = g * wp + i;
                zp_vf other = zp_load(m.s + t * lanes + lane) * zp_load(m.norm + lane);
                p = group_max ? zp_max(p, other) : p + other;
            }
            reduced = window_max ? zp_max(reduced, p) : reduced + p;
        }
        out[t] = window_max ? lane_max(reduced) : zp_sum(reduced);
    }
}

/* Attention scores of a job's tokens: out[L, H, T]. `group_max` and `window_max` choose the
 * maximum instead of the mean over the query heads of a group and over the window.
 * Returns 0, or -1 if memory ran out. */
int zp_comp_attention(const struct zp_comp_cache *c, const struct zp_comp_job *job, float scale,
                      int group_max, int window_max, float *out, int threads)
{
    const int64_t wp = (c->window + ZP_VL - 1) / ZP_VL * ZP_VL, lanes = c->heads / c->kv_heads * wp;
    const int64_t panels = (lanes + PANEL - 1) / PANEL * PANEL * c->dim;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *memory = zp_scratch(sizeof(float) * (size_t)(panels + lanes * (job->length + 2)));
        failed = !memory;
        const struct attention_scratch m = {memory, memory + panels, memory + panels + lanes,
                                            memory + panels + 2 * lanes};
#pragma omp for schedule(static)
        for (int64_t task = 0; task < c->layers * c->kv_heads; task++)
            if (!failed)
                attention_head(c, job, task / c->kv_heads, task % c->kv_heads, scale, group_max,
                               window_max, m, out + task * job->length);
        free(memory);
    }
    return failed ? -1 : 0;
}

/* ---- redundancy ---------------------------------------------------------------------------- */

/* Arrays over n keys, padded to whole vectors. The products p of a column's key with the other
 * rows' normalised keys are the column of S but for the column's own norm. */
struct similarity {
    float *inverse, *limit; /* 1 / norm, and the value of p at which S reaches the threshold */
    float *sum, *value;     /* of p: all rows, and the newest row above the limit */
    int32_t *newest, *row;  /* that row's text position and index, or -1 */
    float *panels;          /* the keys as columns */
};
#define SIMILARITY_ARRAYS 6

/* Take ZP_VL rows of ZP_VL columns of unnormalised products into account. */
ZP_INLINE void accumulate(const float *tile, int64_t stride, int64_t row0, int64_t column0,
                          const int32_t *position, int64_t rows, const struct similarity *m)
{
    zp_vf sum = zp_load(m->sum + column0), value = zp_load(m->value + column0);
    const zp_vf limit = zp_load(m->limit + column0);
    zp_vi newest, row;
    memcpy(&newest, m->newest + column0, sizeof newest);
    memcpy(&row, m->row + column0, sizeof row);
    for (int64_t r = 0; r < rows; r++) {
        const zp_vf p = zp_load(tile + r * stride) * zp_set1(m->inverse[row0 + r]);
        const zp_vi here = zp_set1_int(position[row0 + r]);
        const zp_vi index = zp_set1_int((int32_t)(row0 + r));
        sum += p;
#if defined(__AVX512F__)
        __mmask16 newer = _mm512_cmp_ps_mask((__m512)p, (__m512)limit, _CMP_GT_OQ);
        newer = _mm512_mask_cmpgt_epi32_mask(newer, (__m512i)here, (__m512i)newest);
        newest = (zp_vi)_mm512_mask_mov_epi32((__m512i)newest, newer, (__m512i)here);
        row = (zp_vi)_mm512_mask_mov_epi32((__m512i)row, newer, (__m512i)index);
        value = (zp_vf)_mm512_mask_mov_ps((__m512)value, newer, (__m512)p);
#else
        const zp_vi newer = (p > limit) & (here > newest);
        newest = (newer & here) | (~newer & newest);
        row = (newer & index) | (~newer & row);
        value = zp_select(newer, p, value);
#endif
    }
    zp_store(m->sum + column0, sum);
    zp_store(m->value + column0, value);
    memcpy(m->newest + column0, &newest, sizeof newest);
    memcpy(m->row + column0, &row, sizeof row);
}

/* Row sums of S over n keys [n, D], its diagonal and in each column the newest row above the
 * threshold left out, in m->sum. S is symmetric: row sums are column sums, and squares of
 * ZP_VL x ZP_VL below the diagonal are mirrored instead of computed. */
static void similarity_sums(const float *keys, int64_t n, int64_t dim, const int32_t *position,
                            float threshold, const struct similarity *m)
{
    ZP_ALIGN float strip[ZP_VL * PANEL], mirrored[ZP_VL * ZP_VL];
    for (int64_t i = 0; i < n; i += ZP_VL) {
        const int64_t rows = n - i < ZP_VL ? n - i : ZP_VL;
        float *panel = m->panels + panel_column(i, dim);
        pack_columns(keys + i * dim, dim, rows, dim, panel);
        zp_vf square = zp_set1(0);
        for (int64_t d = 0; d < dim; d++) {
            const zp_vf x = zp_load(panel + d * PANEL);
            square += x * x;
        }
        for (int64_t k = 0; k < ZP_VL; k++) {
            const float norm = sqrtf(square[k]) > NORM_EPS ? sqrtf(square[k]) : NORM_EPS;
            m->inverse[i + k] = 1.f / norm;
            m->limit[i + k] = threshold * norm;
            m->sum[i + k] = m->value[i + k] = 0;
            m->newest[i + k] = m->row[i + k] = -1;
        }
    }
    for (int64_t j = 0; j < n; j += PANEL) {
        const int64_t vecs = n - j < PANEL ? (n - j + ZP_VL - 1) / ZP_VL : PANEL_VECS;
        for (int64_t i = 0; i < n && i < j + PANEL; i += ZP_VL) {
            const int64_t rows = n - i < ZP_VL ? n - i : ZP_VL;
            const int64_t first = i > j ? (i - j) / ZP_VL : 0;
            panel_product(keys + i * dim, dim, rows, m->panels + panel_column(j, dim) + first * ZP_VL,
                          dim, strip + first * ZP_VL, PANEL, vecs - first);
            for (int64_t v = first; v < vecs; v++) {
                const int64_t column = j + v * ZP_VL;
                float *square = strip + v * ZP_VL;
                if (column == i)
                    for (int64_t r = 0; r < rows; r++)
                        square[r * PANEL + r] = 0;
                accumulate(square, PANEL, i, column, position, rows, m);
                if (column == i)
                    continue;
                /* Rows before the diagonal are whole vectors. */
                zp_transpose(square, PANEL, mirrored, ZP_VL);
                accumulate(mirrored, ZP_VL, column, i, position,
                           n - column < ZP_VL ? n - column : ZP_VL, m);
            }
        }
    }
    for (int64_t i = 0; i < n; i++) {
        m->sum[i] *= m->inverse[i];
        m->value[i] *= m->inverse[i];
    }
    for (int64_t i = 0; i < n; i++)
        if (m->row[i] >= 0)
            m->sum[m->row[i]] -= m->value[i];
}

/* In place: softmax(x / tau). */
static void softmax(float *x, int64_t n, float tau)
{
    float peak = x[0], total = 0;
    for (int64_t i = 1; i < n; i++)
        peak = x[i] > peak ? x[i] : peak;
    for (int64_t i = 0; i < n; i += ZP_VL) {
        const size_t bytes = sizeof(float) * (size_t)(n - i < ZP_VL ? n - i : ZP_VL);
        zp_vf v = zp_set1(MASKED);
        memcpy(&v, x + i, bytes);
        v = zp_exp2_neg((v - zp_set1(peak)) * zp_set1(LOG2E / tau));
        memcpy(x + i, &v, bytes);
        total += zp_sum(v);
    }
    for (int64_t i = 0; i < n; i++)
        x[i] /= total;
}

static void redundancy_head(const struct zp_comp_cache *c, const struct zp_comp_job *job,
                            int64_t layer, int64_t head, int local, float tau, float threshold,
                            const struct similarity *m, int32_t *position, float *gathered,
                            float *out)
{
    const int64_t dim = c->dim, b = c->block_size, T = job->length;
    zp_read_positions(c, job, layer, head, position);
    for (int64_t n = 0, t0 = 0; t0 < T; n++, t0 += b) {
        const float *keys = zp_tile(c, layer, job->source[n], 0, head);
        const int64_t rows = T - t0 < b ? T - t0 : b;
        if (!local) {
            memcpy(gathered + t0 * dim, keys, sizeof(float) * (size_t)(rows * dim));
            continue;
        }
        similarity_sums(keys, rows, dim, position + t0, threshold, m);
        for (int64_t r = 0; r < rows; r++)
            out[t0 + r] = m->sum[r] / (float)rows;
    }
    if (!local) {
        similarity_sums(gathered, T, dim, position, threshold, m);
        for (int64_t t = 0; t < T; t++)
            out[t] = m->sum[t] / (float)T;
    }
    softmax(out, T, tau);
}

/* R-KV redundancy of a job's tokens: out[L, H, T]; `local` compares keys inside each block only.
 * Returns 0, or -1 if memory ran out. */
int zp_comp_redundancy(const struct zp_comp_cache *c, const struct zp_comp_job *job, int local,
                       float tau, float threshold, float *out, int threads)
{
    const int64_t n = local ? c->block_size : job->length;
    const int64_t width = (n + PANEL - 1) / PANEL * PANEL;
    const int64_t gathered = local ? 0 : n * c->dim;
    const int64_t floats = width * (SIMILARITY_ARRAYS + c->dim) + gathered + job->length;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *memory = zp_scratch(sizeof(float) * (size_t)floats);
        failed = !memory;
        const struct similarity m = {
            memory, memory + width, memory + 2 * width, memory + 3 * width,
            (int32_t *)(memory + 4 * width), (int32_t *)(memory + 5 * width),
            memory + SIMILARITY_ARRAYS * width};
        float *keys = m.panels + width * c->dim;
        int32_t *position = (int32_t *)(keys + gathered);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < c->layers * c->kv_heads; task++)
            if (!failed)
                redundancy_head(c, job, task / c->kv_heads, task % c->kv_heads, local, tau,
                                threshold, &m, position, keys, out + task * job->length);
        free(memory);
    }
    return failed ? -1 : 0;
}

/* Norms of the values of a job's tokens: out[L, H, T]. Always 0, as the others when they succeed. */
int zp_comp_value_norms(const struct zp_comp_cache *c, const struct zp_comp_job *job, float *out,
                        int threads)
{
    const int64_t dim = c->dim, b = c->block_size, T = job->length;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < c->layers * c->kv_heads; task++)
        for (int64_t t = 0; t < T; t++) {
            const float *value = zp_tile(c, task / c->kv_heads, job->source[t / b], 1,
                                         task % c->kv_heads) + t % b * dim;
            zp_vf squares = zp_set1(0);
            float rest = 0;
            int64_t d = 0;
            for (; d + ZP_VL <= dim; d += ZP_VL)
                squares += zp_load(value + d) * zp_load(value + d);
            for (; d < dim; d++)
                rest += value[d] * value[d];
            out[task * T + t] = sqrtf(zp_sum(squares) + rest);
        }
    return 0;
}
