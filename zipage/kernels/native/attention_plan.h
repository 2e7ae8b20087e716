/* How the attention of a step is cut into work items. Only speed depends on it. */
#ifndef ZIPAGE_ATTENTION_PLAN_H
#define ZIPAGE_ATTENTION_PLAN_H

#include <stdlib.h>

#include "attention.h"

typedef struct {
    item_t *items;
    int32_t *order; /* items, most expensive first */
    int64_t count, partial_rows, cost;
    int decoding; /* whether every item holds the only new token of its sequence */
} plan_t;

/* Slots the last row of an item sees. */
static int64_t item_slots(const zp_attn_step *step, int64_t seq, int64_t last_row, int64_t group) {
    const int64_t fresh = step->query_start[seq + 1] - step->query_start[seq];
    return step->cache_lens[seq] - fresh + last_row / group + 1;
}

/* How the work of a step is cut into items. */
typedef struct {
    int by_head;  /* whether every KV head is a separate item */
    int by_chunk; /* whether the chunks of a row are separate items */
} cut_t;

static int64_t heads_together(int64_t rows, int64_t heads, cut_t cut) {
    if (cut.by_head || rows > 2 * ROWS) return 1;
    int64_t together = ITEM_HEADS;
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

/* About a nanosecond per unit: reading a slot costs as much as arithmetic on 2 * ROWS rows. */
static int64_t item_cost(const zp_attn_layer *layer, const zp_attn_step *step, const item_t *item) {
    int64_t slots = item_slots(step, item->sequence, item->row + item->rows - 1,
                               layer->heads / layer->kv_heads);
    if (item->partial >= 0) {
        slots -= (int64_t)item->first_chunk * CHUNK;
        if (slots > CHUNK) slots = CHUNK;
    }
    return slots * item->kv_heads * (item->padded + 2 * ROWS) * layer->dim / 64;
}

/* Longest first, by a counting sort on rounded cost: keeps the threads' finishing times close. */
static void sort_items(const zp_attn_layer *layer, const zp_attn_step *step, plan_t *plan) {
    enum { BUCKETS = 64 };
    int32_t start[BUCKETS + 1] = {0};
    int64_t most = 1;
    for (int64_t i = 0; i < plan->count; i++) {
        const int64_t cost = item_cost(layer, step, &plan->items[i]);
        plan->cost += cost;
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
    cut_t cut = {0, 0};
    plan->count = list_items(layer, step, cut, NULL);
    if (threads > 1 && plan->count < enough) {
        cut.by_head = 1;
        plan->count = list_items(layer, step, cut, NULL);
    }
    if (threads > 1 && plan->count < enough) {
        cut.by_chunk = 1;
        plan->count = list_items(layer, step, cut, NULL);
    }
    plan->partial_rows = plan->cost = 0;
    plan->items = malloc((size_t)(plan->count + 1) * (sizeof(item_t) + sizeof(int32_t)));
    if (!plan->items) return NO_MEMORY;
    plan->order = (int32_t *)(plan->items + plan->count);
    list_items(layer, step, cut, plan);
    plan->decoding = !cut.by_chunk;
    for (int64_t s = 0; s < step->sequences; s++)
        plan->decoding &= step->query_start[s + 1] - step->query_start[s] <= 1;
    plan->decoding &= layer->heads * layer->dim <= OWN_QUERIES;
    sort_items(layer, step, plan);
    return DONE;
}

#endif
