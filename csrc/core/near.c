/* Distance between dotted names: letters within a part, whole parts between them. */
#include "near.h"

#include <stdlib.h>
#include <string.h>

/* A part too many or too few ("model.layers" for "model.language_model.layers") is a small mistake however long the
 * part is; replacing one never costs more than leaving it out and putting the other in. */
enum { LONGEST = 64, PARTS = 24, PART_COST = 2, REPLACE_COST = 2 * PART_COST };

typedef struct part {
    const char *text;
    int length;
} part;

/* Insertions, deletions and replacements that turn `a` into `b`, at most REPLACE_COST. */
static int part_distance(part a, part b)
{
    int row[LONGEST + 1];

    if (a.length == b.length && memcmp(a.text, b.text, (size_t)a.length) == 0)
        return 0;
    if (abs(a.length - b.length) >= REPLACE_COST || a.length > LONGEST || b.length > LONGEST)
        return REPLACE_COST;
    for (int j = 0; j <= b.length; j++)
        row[j] = j;
    for (int i = 1; i <= a.length; i++) {
        int diagonal = i - 1, least = i;
        row[0] = i;
        for (int j = 1; j <= b.length; j++) {
            const int replaced = diagonal + (a.text[i - 1] != b.text[j - 1]);
            const int shifted = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replaced < shifted ? replaced : shifted;
            least = row[j] < least ? row[j] : least;
        }
        if (least >= REPLACE_COST) /* the least value of a row never falls */
            return REPLACE_COST;
    }
    return row[b.length] < REPLACE_COST ? row[b.length] : REPLACE_COST;
}

/* The parts of a dotted name, or -1 if it has too many to be a name. */
static int split(const char *name, part parts[PARTS])
{
    for (int n = 0; n < PARTS; n++) {
        parts[n] = (part){name, (int)strnlen(name, LONGEST + 1)};
        const char *dot = memchr(name, '.', (size_t)parts[n].length);
        if (dot == NULL)
            return parts[n].length <= LONGEST ? n + 1 : -1;
        parts[n].length = (int)(dot - name);
        name = dot + 1;
    }
    return -1;
}

void qr_near_consider(qr_near *near, const char *asked, const char *name)
{
    part a[PARTS], b[PARTS];
    int row[PARTS + 1];
    const int n = split(asked, a), m = split(name, b);
    int letters = 0, at = near->found < QR_NEAR ? near->found : QR_NEAR - 1;

    if (n < 0 || m < 0)
        return;
    for (int j = 0; j <= m; j++)
        row[j] = j * PART_COST;
    for (int i = 1; i <= n; i++) {
        int diagonal = (i - 1) * PART_COST;
        letters += a[i - 1].length;
        row[0] = i * PART_COST;
        for (int j = 1; j <= m; j++) {
            const int replaced = diagonal + part_distance(a[i - 1], b[j - 1]);
            const int shifted = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + PART_COST;
            diagonal = row[j];
            row[j] = replaced < shifted ? replaced : shifted;
        }
    }
    /* Beyond a third of what was asked a name is another name, not a misspelling. */
    if (row[m] > letters / 3 + 1 || (near->found == QR_NEAR && row[m] >= near->distance[QR_NEAR - 1]))
        return;
    for (; at > 0 && near->distance[at - 1] > row[m]; at--) {
        near->name[at] = near->name[at - 1];
        near->distance[at] = near->distance[at - 1];
    }
    near->name[at] = name;
    near->distance[at] = row[m];
    near->found += near->found < QR_NEAR;
}
