/* Checks between keys of config.json: what must divide what, what must be equal, what must fit 63 bits. */
#include "config_reader.h"

#include <math.h>

/* Bytes of the largest arrays, at 8 bytes an element, must be counted in int64. */
static void check_product(const qr_place *place, const char *what, int64_t a, int64_t b, int64_t c)
{
    int64_t product = 8;
    if (__builtin_mul_overflow(product, a, &product) || __builtin_mul_overflow(product, b, &product) ||
        __builtin_mul_overflow(product, c, &product))
        qr_fault_text(place, what, "found a product beyond 63 bits, expected sizes of a model");
}

static void check_divides(const qr_place *place, const char *key, int64_t value, const char *by, int64_t divisor)
{
    if (value % divisor != 0)
        qr_fault_text(place, key, "found %lld, expected a multiple of %s = %lld", (long long)value, by,
                      (long long)divisor);
}

void qr_check_text(const qr_place *place, qr_text_config *text)
{
    check_divides(place, "num_attention_heads", text->num_attention_heads, "num_key_value_heads",
                  text->num_key_value_heads);
    check_divides(place, "linear_num_value_heads", text->linear_num_value_heads, "linear_num_key_heads",
                  text->linear_num_key_heads);
    check_product(place, "vocab_size * hidden_size", text->vocab_size, text->hidden_size, 1);
    check_product(place, "hidden_size * intermediate_size", text->hidden_size, text->intermediate_size, 1);
    check_product(place, "2 * num_attention_heads * head_dim", 2, text->num_attention_heads, text->head_dim);
    check_product(place, "linear_num_key_heads * linear_key_head_dim", 4, text->linear_num_key_heads,
                  text->linear_key_head_dim);
    check_product(place, "linear_num_value_heads * linear_value_head_dim", 4, text->linear_num_value_heads,
                  text->linear_value_head_dim);
    check_product(place, "linear_num_value_heads * linear_key_head_dim * linear_value_head_dim",
                  text->linear_num_value_heads, text->linear_key_head_dim, text->linear_value_head_dim);
    if (place->reader->faults > 0)
        return;
    text->key_dim = text->linear_num_key_heads * text->linear_key_head_dim;
    text->value_dim = text->linear_num_value_heads * text->linear_value_head_dim;
    text->conv_dim = 2 * text->key_dim + text->value_dim;
    check_product(place, "heads * head_dim * hidden_size", 2 * text->num_attention_heads, text->head_dim,
                  text->hidden_size);
    check_product(place, "(2 * keys + values) * hidden_size", text->conv_dim, text->hidden_size, 1);
    check_product(place, "(2 * keys + values) * linear_conv_kernel_dim", text->conv_dim, text->linear_conv_kernel_dim,
                  1);
}

void qr_check_vision(const qr_place *place, qr_config *out)
{
    qr_vision_config *vision = &out->vision;
    const int64_t merge = vision->spatial_merge_size;

    check_divides(place, "hidden_size", vision->hidden_size, "num_heads", vision->num_heads);
    vision->head_dim = vision->hidden_size / vision->num_heads;
    if (vision->head_dim % 4 != 0) /* two axes, each with pairs */
        qr_fault_text(place, "hidden_size", "found head width %lld, expected a multiple of 4",
                      (long long)vision->head_dim);
    vision->grid_side =
        (int64_t)sqrt((double)vision->num_position_embeddings); /* exact: integers here are below 2^53 */
    if (vision->grid_side * vision->grid_side != vision->num_position_embeddings)
        qr_fault_text(place, "num_position_embeddings", "found %lld, expected a square",
                      (long long)vision->num_position_embeddings);
    if (vision->out_hidden_size != out->text.hidden_size)
        qr_fault_text(place, "out_hidden_size", "found %lld, expected text_config.hidden_size = %lld",
                      (long long)vision->out_hidden_size, (long long)out->text.hidden_size);
    check_product(place, "3 * hidden_size * hidden_size", 3, vision->hidden_size, vision->hidden_size);
    check_product(place, "hidden_size * intermediate_size", vision->hidden_size, vision->intermediate_size, 1);
    check_product(place, "num_position_embeddings * hidden_size", vision->num_position_embeddings, vision->hidden_size,
                  1);
    if (merge > 1024 || vision->patch_size > 65536 || vision->temporal_patch_size > 65536 ||
        vision->in_channels > 65536)
        qr_fault_text(place, "patch_size", "found sizes of no picture, expected patches below 65,536 pixels a side");
    else if (vision->depth > QR_MAX_LAYERS)
        qr_fault_text(place, "depth", "found %lld, expected at most %d", (long long)vision->depth, QR_MAX_LAYERS);
}

void qr_check_placeholders(const qr_place *root, const qr_config *out)
{
    const int64_t ids[] = {out->image_token_id, out->video_token_id, out->vision_start_token_id,
                           out->vision_end_token_id};
    static const char *const names[] = {"image_token_id", "video_token_id", "vision_start_token_id",
                                        "vision_end_token_id"};
    for (size_t i = 0; i < 4; i++) {
        if (ids[i] >= out->text.vocab_size)
            qr_fault_text(root, names[i], "found %lld, expected an id below vocab_size = %lld", (long long)ids[i],
                          (long long)out->text.vocab_size);
    }
    if (out->image_token_id == out->video_token_id)
        qr_fault_text(root, "video_token_id", "found %lld, expected another id than image_token_id",
                      (long long)out->video_token_id);
}
