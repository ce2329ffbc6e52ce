/* A JSON text as a cJSON tree, refusing what cJSON lets through.  No Python.h. */
#ifndef QR_JSON_TEXT_H
#define QR_JSON_TEXT_H

#include "../qr.h"

#include <cjson/cJSON.h>

enum {
    QR_JSON_DEPTH = 64,   /* more than any file needs */
    QR_JSON_NUMBER = 512, /* characters: Python may refuse integers of 640 digits */
    QR_SHOWN_SIZE = 132   /* of a name in a message */
};

typedef struct qr_json_rules {
    const char *source; /* begins every message */
    qr_error_kind kind; /* of every fault but want of memory */
    size_t bytes;       /* at most */
    int depth;          /* of nested arrays and objects, at most QR_JSON_DEPTH: bounds all recursion */
    int64_t items;      /* of one array: bounds memory, a 2-byte "0," becoming a node of 64 bytes. 0: no limit */
} qr_json_rules;

/* Parse one object of `length` bytes; text[length] must be 0. Beyond what the parser asks for, the text is UTF-8 without
 * NUL (written or escaped: C strings would end there), every number is one by the grammar, and no key comes twice in an
 * object. Faults name line and column. Returns 0 or -1; the caller owns *out (cJSON_Delete). */
int qr_json_parse(const char *text, size_t length, const qr_json_rules *rules, cJSON **out, qr_error *error);

/* Text from a file made fit for a message: one line, bounded, cut between characters. Returns `buffer`. */
const char *qr_shown(const char *text, char *buffer, size_t size);

#endif
