/* A config in a few lines, for people. */
#include "config.h"

#include <string.h>

typedef struct page {
    char *text;
    size_t used, size;
} page;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
put(page *p, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(p->text + p->used, p->size - p->used, format, args);
    va_end(args);
    p->used += (size_t)(n > 0 ? n : 0);
    if (p->used >= p->size)
        p->used = p->size - 1;
}

/* Names that take more room than they tell are counted instead. */
static void put_names(page *p, const char *title, const qr_names *names)
{
    const size_t shown = names->count <= 4 ? names->count : 3;
    if (names->count == 0)
        return;
    put(p, "\n  %-9s %zu: ", title, names->count);
    for (size_t i = 0; i < shown; i++)
        put(p, "%s%.60s", i > 0 ? ", " : "", names->item[i]);
    if (shown < names->count)
        put(p, ", ... %zu more: config.%s", names->count - shown, title);
}

static void put_text(page *p, const qr_text_config *text)
{
    put(p, "\n  text      vocabulary %lld, hidden %lld, inner %lld, %lld layers", (long long)text->vocab_size,
        (long long)text->hidden_size, (long long)text->intermediate_size, (long long)text->num_hidden_layers);
    put(p, "\n  layers    %lld linear_attention + %lld full_attention",
        (long long)(text->num_hidden_layers - text->full_attention_layers), (long long)text->full_attention_layers);
    put(p, "\n  attention %lld query / %lld kv heads x %lld%s", (long long)text->num_attention_heads,
        (long long)text->num_key_value_heads, (long long)text->head_dim, text->attention_bias ? ", with biases" : "");
    put(p, "\n  delta     %lld key heads x %lld, %lld value heads x %lld, convolution over %lld",
        (long long)text->linear_num_key_heads, (long long)text->linear_key_head_dim,
        (long long)text->linear_num_value_heads, (long long)text->linear_value_head_dim,
        (long long)text->linear_conv_kernel_dim);
    put(p, "\n  rotary    %lld of %lld, theta %.9g, sections %lld/%lld/%lld", (long long)text->rotary_dim,
        (long long)text->head_dim, text->rope_theta, (long long)text->mrope_section[0],
        (long long)text->mrope_section[1], (long long)text->mrope_section[2]);
}

static void put_vision(page *p, const qr_vision_config *vision)
{
    put(p, "\n  vision    %lld blocks, width %lld, %lld heads, patch %lld, merge %lld, out %lld",
        (long long)vision->depth, (long long)vision->hidden_size, (long long)vision->num_heads,
        (long long)vision->patch_size, (long long)vision->spatial_merge_size, (long long)vision->out_hidden_size);
}

static void put_root(page *p, const qr_config *config)
{
    if (config->has_vision)
        put(p, "\n  tokens    image %lld, video %lld, vision start %lld, end %lld", (long long)config->image_token_id,
            (long long)config->video_token_id, (long long)config->vision_start_token_id,
            (long long)config->vision_end_token_id);
    put(p, "\n  embedding %s", config->tie_word_embeddings ? "tied to lm_head" : "separate from lm_head");
    if (qr_config_tie_conflict(config))
        put(p, " by the root, the other way by text_config");
    put_names(p, "defaults", &config->defaults);
    put_names(p, "unknown", &config->unknown);
}

char *qr_config_describe(const qr_config *config, qr_config_part part, const char *source, char *buffer, size_t size)
{
    static const char *const titles[] = {"Config", "TextConfig", "VisionConfig"};
    page p = {buffer, 0, size};

    put(&p, "%s of %.200s: %s%s%s", titles[part], source, config->composite ? "qwen3_5" : "qwen3_5_text",
        config->architecture[0] != '\0' ? ", " : "", config->architecture);
    if (part != QR_PART_VISION)
        put_text(&p, &config->text);
    if (part != QR_PART_TEXT && config->has_vision)
        put_vision(&p, &config->vision);
    if (part == QR_PART_ROOT)
        put_root(&p, config);
    return buffer;
}
