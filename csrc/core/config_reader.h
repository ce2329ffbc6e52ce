/* Typed reading of JSON values with collected faults; shared by the config files of core/ only. */
#ifndef QR_CONFIG_READER_H
#define QR_CONFIG_READER_H

#include "config.h"
#include "json_text.h"

enum { QR_FAULTS_SHOWN = 5, QR_FAULT_SIZE = 320, QR_MAX_LAYERS = 1 << 16 };

/* Faults are gathered, not raised at once, so that one run shows them all. */
typedef struct qr_reader {
    const char *source;
    qr_config *config;
    int faults;
    bool out_of_memory;
    char fault[QR_FAULTS_SHOWN][QR_FAULT_SIZE];
} qr_reader;

/* One JSON object and its dotted name: "" or something that ends in a dot. */
typedef struct qr_place {
    qr_reader *reader;
    const cJSON *object; /* NULL reads as an empty object */
    const char *path;
} qr_place;

#if defined(__GNUC__)
#define QR_FORMAT(text, first) __attribute__((format(printf, text, first)))
#else
#define QR_FORMAT(text, first)
#endif

/* The value of a key; NULL when it is absent. */
const cJSON *qr_get(const qr_place *place, const char *key);
/* The same, JSON null counting as absent. */
const cJSON *qr_get_set(const qr_place *place, const char *key);

/* "path.key: found 3.5, expected <format>". */
void qr_config_fault(const qr_place *place, const char *key, const cJSON *found, const char *format, ...)
    QR_FORMAT(4, 5);
/* "path.key: <format>". */
void qr_fault_text(const qr_place *place, const char *key, const char *format, ...) QR_FORMAT(3, 4);

/* Each stores a value of the right type, or reports a fault and leaves *out alone. */
bool qr_read_integer(const qr_place *place, const char *key, const cJSON *item, int64_t least, int64_t *out);
bool qr_read_number(const qr_place *place, const char *key, const cJSON *item, bool zero, double *out);
bool qr_read_flag(const qr_place *place, const char *key, const cJSON *item, bool *out);

/* Read every row of `keys` into `base`; absent keys take their default. */
void qr_read_keys(const qr_place *place, const qr_key *keys, void *base);

/* Add to the list of defaults taken, or of unknown keys. */
void qr_note_default(const qr_place *place, const char *key);
void qr_note_unknown(const qr_place *place, const char *key);

/* config_check.c: what one key alone cannot say; each is called when no fault has been found so far. */
void qr_check_text(const qr_place *place, qr_text_config *text);
void qr_check_vision(const qr_place *place, qr_config *config);
void qr_check_placeholders(const qr_place *root, const qr_config *config);

/* rope_config.c: rope keys of the text section (once its other keys are read), and of the vision section. */
void qr_read_rope(const qr_place *place, qr_text_config *text);
void qr_read_vision_rope(const qr_place *place, qr_vision_config *vision);
/* Whether the key is one those two look at. */
bool qr_is_rope_key(const char *key);

#endif
