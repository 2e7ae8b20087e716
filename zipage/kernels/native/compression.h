/* What the compression kernels share: the cache, the job and where a token lies.
 *
 * Letters: L layers, N blocks of the pool, H KV heads, Q query heads, G = Q / H, b block size,
 * D head dim, M query slots, w window, T cached tokens.
 */
#ifndef ZIPAGE_COMPRESSION_H
#define ZIPAGE_COMPRESSION_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vec.h"

/* Field order and types are mirrored in zipage/compression/native.py. */
struct zp_comp_cache {
    float *kv;              /* [L, N, 2, H, b, D] */
    float *scores;          /* [L, N, H, b] */
    int32_t *positions;     /* [L, N, H, b] */
    const float *queries;   /* [L, M, w, Q, D] */
    int64_t layers, blocks, kv_heads, heads, block_size, dim, slots, window;
};

struct zp_comp_job {
    const int32_t *source;  /* blocks in slot order */
    int64_t num_source, length, query_slot, num_scored;
    int64_t first_position; /* text position of slot 0, were nothing evicted */
};

/* Keys (value = 0) or values (1) of one block and head: [b, D]. */
ZP_INLINE float *zp_tile(const struct zp_comp_cache *c, int64_t layer, int64_t block, int value,
                         int64_t head)
{
    int64_t row = ((layer * c->blocks + block) * 2 + value) * c->kv_heads + head;
    return c->kv + row * c->block_size * c->dim;
}

/* Index of a block's scores and positions: [b]. */
ZP_INLINE int64_t zp_state(const struct zp_comp_cache *c, int64_t layer, int64_t block,
                           int64_t head)
{
    return ((layer * c->blocks + block) * c->kv_heads + head) * c->block_size;
}

/* Text positions of the T cached tokens of one head. */
ZP_INLINE void zp_read_positions(const struct zp_comp_cache *c, const struct zp_comp_job *job,
                                 int64_t layer, int64_t head, int32_t *out)
{
    const int64_t b = c->block_size;
    for (int64_t t = 0; t < job->num_scored; t += b) {
        int64_t n = job->num_scored - t < b ? job->num_scored - t : b;
        int64_t from = zp_state(c, layer, job->source[t / b], head);
        memcpy(out + t, c->positions + from, (size_t)n * sizeof(int32_t));
    }
    for (int64_t t = job->num_scored; t < job->length; t++)
        out[t] = (int32_t)(job->first_position + t);
}

ZP_INLINE void *zp_scratch(size_t bytes)
{
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

#endif
