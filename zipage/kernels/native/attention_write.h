/* What happens to the projected rows of a step before attention: norms, RoPE, cache write. */
#ifndef ZIPAGE_ATTENTION_WRITE_H
#define ZIPAGE_ATTENTION_WRITE_H

#include "attention.h"

#include <math.h>

/* y = x / rms(x) * weight. */
static void normalise(const float *x, const float *weight, float eps, int dim, float *y) {
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
        zp_store(y + i, zp_load(x + i) * zp_set1(inverse) * zp_load(weight + i));
    for (; i < dim; i++) y[i] = x[i] * inverse * weight[i];
}

static void rotate(float *y, const float *cos, const float *sin, int half) {
    int i = 0;
    for (; i + ZP_VL <= half; i += ZP_VL) {
        const zp_vf a = zp_load(y + i), b = zp_load(y + half + i);
        const zp_vf c = zp_load(cos + i), s = zp_load(sin + i);
        zp_store(y + i, zp_fma(a, c, -(b * s)));
        zp_store(y + half + i, zp_fma(b, c, a * s));
    }
    for (; i < half; i++) {
        const float a = y[i], b = y[half + i];
        y[i] = a * cos[i] - b * sin[i];
        y[half + i] = b * cos[i] + a * sin[i];
    }
}

/* One head of a query or key: norm, if there is a weight, and RoPE. */
static void transform(const float *x, const float *weight, float eps, const float *cos,
                      const float *sin, int dim, int half, float *y) {
    if (weight)
        normalise(x, weight, eps, dim, y);
    else
        memcpy(y, x, sizeof(float) * (size_t)dim);
    rotate(y, cos, sin, half);
}

/* Writes keys and values of a row to the cache and its queries to `q` and the query store, for KV
 * heads [first, first + count) and their query heads. */
static void write_row(const job_t *job, int64_t row, int64_t first, int64_t count) {
    const zp_attn_layer *layer = job->layer;
    const int dim = (int)layer->dim, half = (int)layer->half;
    const int64_t heads = layer->heads, kv_heads = layer->kv_heads, block = layer->block_size;
    const int64_t group = heads / kv_heads;
    const int64_t slot = job->step->slot_mapping[row], capture = job->step->capture[row];
    const float *cos = layer->cos + job->step->positions[row] * half;
    const float *sin = layer->sin + job->step->positions[row] * half;
    const float *queries = job->qkv + row * (heads + 2 * kv_heads) * dim;
    const float *keys = queries + heads * dim, *values = keys + kv_heads * dim;
    const float factor = layer->scale * 1.44269504088896341f;
    const size_t bytes = sizeof(float) * (size_t)dim;
    float y[MAX_DIM] ZP_ALIGN;
    for (int64_t h = first * group; h < (first + count) * group; h++) {
        transform(queries + h * dim, layer->q_norm, layer->norm_eps, cos, sin, dim, half, y);
        if (capture >= 0) memcpy(layer->queries + (capture * heads + h) * dim, y, bytes);
        float *to = job->q + ((row - job->q_row) * heads + h) * dim;
        for (int i = 0; i < dim; i++) to[i] = y[i] * factor;
    }
    if (slot < 0) return;
    float *to = layer->kv + (slot / block * 2 * kv_heads * block + slot % block) * dim;
    for (int64_t h = first; h < first + count; h++) {
        transform(keys + h * dim, layer->k_norm, layer->norm_eps, cos, sin, dim, half, y);
        memcpy(to + h * block * dim, y, bytes);
        memcpy(to + (kv_heads + h) * block * dim, values + h * dim, bytes);
    }
}

#endif
