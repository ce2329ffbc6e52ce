/* A JSON text as a cJSON tree, refusing what cJSON lets through. */
#ifndef QR_JSON_TEXT_H
#define QR_JSON_TEXT_H

#include "../qr.h"

#include <cjson/cJSON.h>

enum {
    QR_JSON_MAX_DEPTH = 64,
    QR_JSON_MAX_BYTES = 16 << 20,
    QR_JSON_MAX_NUMBER = 512 /* characters: Python may refuse integers of 640 digits */
};

/* Parse `text`, of which text[length] must be 0: cJSON can read one byte past the length it is given.
 * Faults are of `kind` and name `source`, line and column. The caller owns *out (cJSON_Delete). */
int qr_json_parse(const char *text, size_t length, const char *source, qr_error_kind kind, cJSON **out,
                  qr_error *error);

/* `text` as one line of printable ASCII for a message; other bytes become '?'. Returns `buffer`. */
char *qr_printable(const char *text, char *buffer, size_t size);

#endif
