/* Which pages of a checkpoint's maps this process has written, and giving them the file's contents again. */
#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __linux__

/* A row of /proc/self/pagemap. A written page of a private map is memory of the process's own: present or swapped, and
 * not a page of a file. */
#define PAGE_PRESENT (UINT64_C(1) << 63)
#define PAGE_SWAPPED (UINT64_C(1) << 62)
#define PAGE_OF_FILE (UINT64_C(1) << 61)

/* Put [begin, end) behind the ranges there are, joined with the last one where they meet. */
static int add_range(qr_span **ranges, int64_t *count, int64_t *room, int64_t begin, int64_t end)
{
    if (*count > 0 && (*ranges)[*count - 1].end == begin) {
        (*ranges)[*count - 1].end = end;
        return 0;
    }
    if (*count == *room) {
        const int64_t more = *room + *room / 2 + 16;
        qr_span *grown = realloc(*ranges, (size_t)more * sizeof **ranges);
        if (grown == NULL)
            return -1;
        *ranges = grown;
        *room = more;
    }
    (*ranges)[(*count)++] = (qr_span){begin, end};
    return 0;
}

int64_t qr_tensor_touched(const qr_checkpoint *checkpoint, const qr_tensor *tensor, qr_span **out)
{
    enum { ROWS = 2048 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)qr_tensor_data(checkpoint, tensor);
    const int64_t size = tensor->end - tensor->begin;
    const uintptr_t end = (begin + (uintptr_t)size + page - 1) / page;
    uint64_t row[ROWS];
    qr_span *ranges = NULL;
    int64_t count = 0, room = 0;
    int fd;

    *out = NULL;
    if (size == 0)
        return 0;
    fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    for (uintptr_t at = begin / page; at < end;) {
        const size_t wanted = end - at < ROWS ? (size_t)(end - at) : ROWS;
        const ssize_t got = pread(fd, row, wanted * sizeof *row, (off_t)(at * sizeof *row));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < (ssize_t)sizeof *row)
            goto unknown;
        const size_t rows = (size_t)got / sizeof *row;
        for (size_t i = 0; i < rows; i++) {
            if ((row[i] & (PAGE_PRESENT | PAGE_SWAPPED)) == 0 || (row[i] & PAGE_OF_FILE) != 0)
                continue;
            const int64_t from = (int64_t)((at + i) * page) - (int64_t)begin, to = from + (int64_t)page;
            if (add_range(&ranges, &count, &room, from > 0 ? from : 0, to < size ? to : size) < 0)
                goto unknown;
        }
        at += rows;
    }
    close(fd);
    *out = ranges;
    return count;
unknown:
    close(fd);
    free(ranges);
    return -1;
}

int64_t qr_tensor_revert(const qr_checkpoint *checkpoint, const qr_tensor *tensor)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)qr_tensor_data(checkpoint, tensor);
    const uintptr_t end = begin + (uintptr_t)(tensor->end - tensor->begin);
    const uintptr_t from = (begin + page - 1) / page * page, to = end / page * page;

    /* On a private map this drops the process's own pages, and what is read next comes from the file. */
    if (to <= from || madvise((void *)from, (size_t)(to - from), MADV_DONTNEED) < 0)
        return 0;
    return (int64_t)(to - from);
}

#else /* elsewhere nobody tells, and MADV_DONTNEED promises nothing about the contents */

int64_t qr_tensor_touched(const qr_checkpoint *checkpoint, const qr_tensor *tensor, qr_span **out)
{
    (void)checkpoint;
    (void)tensor;
    *out = NULL;
    return -1;
}

int64_t qr_tensor_revert(const qr_checkpoint *checkpoint, const qr_tensor *tensor)
{
    (void)checkpoint;
    (void)tensor;
    return 0;
}

#endif
