/* config.json as a typed, checked struct.  No Python.h, no kernels. */
#ifndef QR_CONFIG_H
#define QR_CONFIG_H

#include "../qr.h"
#include "config_keys.h"

/* ---- the rows of config_keys.h as C ----------------------------------------------------------------------------- */

typedef char qr_word[24];

#define QR_FIELD_SIZE int64_t
#define QR_FIELD_COUNT int64_t
#define QR_FIELD_REAL double
#define QR_FIELD_REAL0 double
#define QR_FIELD_BOOL bool
#define QR_FIELD_FIXED bool
#define QR_FIELD_NAME qr_word
#define QR_FIELD(type, name, value, values, report) QR_FIELD_##type name;

typedef enum qr_key_type {
    QR_KEY_SIZE,
    QR_KEY_COUNT,
    QR_KEY_REAL,
    QR_KEY_REAL0,
    QR_KEY_BOOL,
    QR_KEY_FIXED,
    QR_KEY_NAME
} qr_key_type;

typedef struct qr_key {
    const char *name;
    qr_key_type type;
    size_t offset;      /* of the field in the section's struct */
    double value;       /* default of a number or flag */
    const char *values; /* words of a NAME, separated by '|' */
    bool reported;
} qr_key;

/* Rows in the order of config_keys.h, ended by a row without a name. */
extern const qr_key qr_root_keys[], qr_text_keys[], qr_vision_keys[];

#define QR_ROOT_INDEX(type, name, value, values, report) QR_ROOT_##name,
#define QR_TEXT_INDEX(type, name, value, values, report) QR_TEXT_##name,
#define QR_VISION_INDEX(type, name, value, values, report) QR_VISION_##name,
enum { QR_ROOT_KEYS(QR_ROOT_INDEX) QR_ROOT_KEY_COUNT };
enum { QR_TEXT_KEYS(QR_TEXT_INDEX) QR_TEXT_KEY_COUNT };
enum { QR_VISION_KEYS(QR_VISION_INDEX) QR_VISION_KEY_COUNT };

/* ---- the config --------------------------------------------------------------------------------------------------- */

typedef struct qr_text_config {
    QR_TEXT_KEYS(QR_FIELD)
    bool *full_attention;            /* [num_hidden_layers]; false is Gated DeltaNet. Owned by the qr_config */
    int64_t full_attention_layers;   /* how many of them */
    int64_t full_attention_interval; /* 0 when only an explicit layer_types is there */
    double rope_theta, partial_rotary_factor;
    int64_t rotary_dim;         /* int(head_dim * partial_rotary_factor) */
    int64_t mrope_section[3];   /* frequencies of T, H, W; {rotary_dim / 2, 0, 0} is plain 1-D rotary */
    int64_t key_dim, value_dim; /* DeltaNet: heads x head width */
    int64_t conv_dim;           /* channels of the convolution: 2 * key_dim + value_dim */
} qr_text_config;

typedef struct qr_vision_config {
    QR_VISION_KEYS(QR_FIELD)
    double rope_theta;
    int64_t head_dim;  /* hidden_size / num_heads */
    int64_t grid_side; /* the position table is grid_side x grid_side */
} qr_vision_config;

typedef enum qr_flag { QR_FLAG_ABSENT, QR_FLAG_FALSE, QR_FLAG_TRUE } qr_flag;

typedef struct qr_names {
    char **item;
    size_t count, capacity;
} qr_names;

typedef struct qr_config {
    bool
        composite; /* qwen3_5: text_config and perhaps vision_config; else qwen3_5_text, whose root is the text section */
    bool has_vision;
    char architecture[40]; /* "" when the file names none */
    QR_ROOT_KEYS(QR_FIELD)
    qr_text_config text;
    qr_vision_config vision;
    /* Both places are kept: where they differ, only the presence of lm_head.weight can decide. */
    qr_flag tie_root, tie_text;
    bool tie_word_embeddings; /* root flag, else the text section's, else false */
    qr_names defaults;        /* dotted keys that took their class default */
    qr_names unknown;         /* dotted keys nobody knows: to be shown, never silently dropped */
} qr_config;

/* Read, check and fill *out. `text[length]` must be 0 (it is read). `source` names the file in messages.
 * On failure *out holds nothing. The caller owns *out and ends it with qr_config_clear. */
int qr_config_parse(const char *text, size_t length, const char *source, qr_config *out, qr_error *error);
void qr_config_clear(qr_config *config);

/* Whether root and text_config both say how the embedding is tied, and differently. */
static inline bool qr_config_tie_conflict(const qr_config *config)
{
    return config->tie_root != QR_FLAG_ABSENT && config->tie_text != QR_FLAG_ABSENT &&
           config->tie_root != config->tie_text;
}

/* Position axis (0 T, 1 H, 2 W) of rotary frequency f, 0 <= f < rotary_dim / 2. */
int qr_rope_axis(const int64_t section[3], int64_t f);

typedef enum qr_config_part { QR_PART_ROOT, QR_PART_TEXT, QR_PART_VISION } qr_config_part;

/* A summary of at most 12 lines, without a newline at the end. Returns `buffer`. */
char *qr_config_describe(const qr_config *config, qr_config_part part, const char *source, char *buffer, size_t size);

#endif
