/* One number for all that an op put out in a test program, so that two machines can compare their bits: where the
 * environment names a file, a line per op is added to it at the end. */
#ifndef DIGEST_H
#define DIGEST_H

#include "../../csrc/qr.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGESTS = 128 };

static struct digest_entry {
    const char *op;
    uint64_t sum;
    size_t elements;
} digests[DIGESTS];

static void write_digests(void)
{
    const char *const path = getenv("TEST_DIGESTS");
    FILE *const file = path != NULL ? fopen(path, "a") : NULL;

    if (file == NULL)
        return;
    for (const struct digest_entry *d = digests; d < digests + DIGESTS && d->op != NULL; d++)
        fprintf(file, "%s of %zu elements: %016llx\n", d->op, d->elements, (unsigned long long)d->sum);
    fclose(file);
}

/* `op` is a string that stays. One NaN is as good as another. */
static void digest(const char *op, const void *data, size_t bytes, qr_dtype dtype)
{
    const size_t size = dtype == QR_F32 ? 4 : 8;
    struct digest_entry *d = digests;

    while (d->op != NULL && strcmp(d->op, op) != 0)
        if (++d == digests + DIGESTS)
            abort();
    if (digests->op == NULL)
        atexit(write_digests);
    d->op = op;
    for (size_t i = 0; i < bytes / size; i++) {
        uint64_t bits = 0;
        float f;
        double g;
        memcpy(&bits, (const char *)data + i * size, size);
        memcpy(&f, &bits, sizeof f);
        memcpy(&g, &bits, sizeof g);
        if ((dtype == QR_F32 && isnan(f)) || (dtype == QR_F64 && isnan(g)))
            bits = UINT64_MAX;
        d->sum = (d->sum ^ bits) * 0x100000001b3u; /* order matters, and no bit gets lost */
        d->sum ^= d->sum >> 29;
        d->elements++;
    }
}

#endif
