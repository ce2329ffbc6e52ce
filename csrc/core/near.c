/* Edit distance between names, cut off as soon as it cannot matter. */
#include "near.h"

#include <stdlib.h>
#include <string.h>

enum { LONGEST = 255 }; /* longer names are skipped: a message could not show them anyway */

/* Insertions, deletions and replacements that turn `a` into `b`; `limit + 1` stands for anything above `limit`. */
static int edit_distance(const char *a, int n, const char *b, int m, int limit)
{
    int row[LONGEST + 1];

    if (abs(n - m) > limit)
        return limit + 1;
    for (int j = 0; j <= m; j++)
        row[j] = j;
    for (int i = 1; i <= n; i++) {
        int diagonal = row[0], least = i;
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            const int replaced = diagonal + (a[i - 1] != b[j - 1]);
            const int shifted = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replaced < shifted ? replaced : shifted;
            least = row[j] < least ? row[j] : least;
        }
        if (least > limit) /* rows never shrink below their least value */
            return limit + 1;
    }
    return row[m];
}

void qr_near_consider(qr_near *near, const char *asked, const char *name)
{
    const size_t n = strnlen(asked, LONGEST + 1), m = strnlen(name, LONGEST + 1);
    const int half = (int)(n > m ? n : m) / 2;
    const int worst = near->found == QR_NEAR ? near->distance[QR_NEAR - 1] - 1 : half;
    int at = near->found < QR_NEAR ? near->found : QR_NEAR - 1;

    if (n > LONGEST || m > LONGEST)
        return;
    const int limit = worst < half ? worst : half;
    const int distance = edit_distance(asked, (int)n, name, (int)m, limit);
    if (distance > limit)
        return;
    for (; at > 0 && near->distance[at - 1] > distance; at--) {
        near->name[at] = near->name[at - 1];
        near->distance[at] = near->distance[at - 1];
    }
    near->name[at] = name;
    near->distance[at] = distance;
    near->found += near->found < QR_NEAR;
}
