/* What large machine-written JSON (headers, indexes) must be before cJSON may see it: bounded, UTF-8, without NUL.
 * No Python.h. */
#ifndef QR_JSON_GUARD_H
#define QR_JSON_GUARD_H

#include "../qr.h"

enum {
    QR_GUARD_DEPTH = 64, /* more than any such file needs */
    QR_SHOWN_SIZE = 132, /* of a name in a message */
};

typedef struct qr_json_limits {
    int depth;     /* of nested arrays and objects, at most QR_GUARD_DEPTH; bounds the parser's recursion */
    int64_t items; /* of one array; bounds its memory, a 2-byte "0," becoming a node of 64 bytes. 0: no limit */
} qr_json_limits;

/* The text is one object of valid UTF-8 within the limits, without NUL (written or escaped: C strings would end there)
 * and without raw control characters in its strings. `where` begins the message. Returns 0 or -1. */
int qr_json_guard(const char *text, size_t length, qr_json_limits limits, const char *where, qr_error *error);

/* A name from a file made fit for a message: one line, bounded, cut between characters. Returns `buffer`. */
const char *qr_shown(const char *name, char buffer[QR_SHOWN_SIZE]);

#endif
