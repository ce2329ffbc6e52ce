/* Near names for messages: what a misspelled name probably meant.  No Python.h. */
#ifndef QR_NEAR_H
#define QR_NEAR_H

#include "../qr.h"

enum { QR_NEAR = 3 };

/* Best matches so far, nearest first. Start from {0}; `name` is borrowed. */
typedef struct qr_near {
    const char *name[QR_NEAR];
    int distance[QR_NEAR];
    int found;
} qr_near;

/* Consider `name` as what `asked` meant. Names too far off to help are never kept. */
void qr_near_consider(qr_near *near, const char *asked, const char *name);

#endif
