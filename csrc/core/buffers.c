/* The list of large buffers. Its lock is only ever tried: whoever finds it taken maps or unmaps memory instead, so a fork
 * in the middle of a call leaves a child that is slower, not one that hangs. */
#include "buffers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SLOTS = 64, FRONT = 1 << 16, HUGE_PAGE = 2 << 20 }; /* FRONT: a multiple of every size of page */

struct qr_buffers {
    pthread_mutex_t mutex;
    int64_t limit, kept;
    int count;
    void *buffer[SLOTS]; /* the oldest first */
};

/* Stands before every buffer, on a small page of its own: in the buffer's first line it
 * would push the end of one of whole huge pages onto another. */
typedef struct head {
    size_t mapped; /* bytes from the buffer on */
} head;

static head *head_of(const void *buffer)
{
    return (head *)((uintptr_t)buffer - sizeof(head));
}

static void *map(size_t size)
{
    if (size > (SIZE_MAX >> 1))
        return NULL;
    const size_t mapped = size == 0 ? HUGE_PAGE : (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char *block = mmap(NULL, FRONT + mapped + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (block == MAP_FAILED)
        return NULL;
    char *begin = (char *)(((uintptr_t)block + FRONT + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (begin - FRONT > block)
        munmap(block, (size_t)(begin - FRONT - block));
    if (begin < block + FRONT + HUGE_PAGE)
        munmap(begin + mapped, (size_t)(block + FRONT + HUGE_PAGE - begin));
#ifdef MADV_HUGEPAGE
    (void)madvise(begin, mapped, MADV_HUGEPAGE); /* a hint: without it everything works, with more faults */
#endif
    head_of(begin)->mapped = mapped;
    return begin;
}

static void unmap(void *buffer)
{
    munmap((char *)buffer - FRONT, FRONT + head_of(buffer)->mapped);
}

qr_buffers *qr_buffers_new(int64_t limit)
{
    qr_buffers *list = calloc(1, sizeof *list);

    if (list == NULL)
        return NULL;
    list->limit = limit;
    pthread_mutex_init(&list->mutex, NULL);
    return list;
}

/* The oldest buffers go until at most `limit` bytes are kept. With the lock held. */
static void shrink(qr_buffers *list, int64_t limit)
{
    int gone = 0;
    while (list->kept > limit) {
        list->kept -= (int64_t)head_of(list->buffer[gone])->mapped;
        unmap(list->buffer[gone++]);
    }
    list->count -= gone;
    memmove(list->buffer, list->buffer + gone, (size_t)list->count * sizeof *list->buffer);
}

void qr_buffers_free(qr_buffers *list)
{
    if (list == NULL)
        return;
    shrink(list, 0);
    pthread_mutex_destroy(&list->mutex);
    free(list);
}

size_t qr_buffer_room(const void *buffer)
{
    return head_of(buffer)->mapped;
}

void *qr_buffers_take(qr_buffers *list, size_t size)
{
    void *found = NULL;

    if (pthread_mutex_trylock(&list->mutex) != 0)
        return map(size);
    int best = -1;
    for (int i = list->count - 1; i >= 0; i--) { /* the smallest that fits, the latest of its size: perhaps in cache */
        const size_t room = qr_buffer_room(list->buffer[i]);
        if (room >= size && room / 2 <= size && (best < 0 || room < qr_buffer_room(list->buffer[best])))
            best = i;
    }
    if (best >= 0) {
        found = list->buffer[best];
        list->kept -= (int64_t)head_of(found)->mapped;
        list->count--;
        memmove(list->buffer + best, list->buffer + best + 1, (size_t)(list->count - best) * sizeof *list->buffer);
    }
    pthread_mutex_unlock(&list->mutex);
    return found != NULL ? found : map(size);
}

void qr_buffers_give(qr_buffers *list, void *buffer)
{
    if (buffer == NULL)
        return;
    const int64_t mapped = (int64_t)head_of(buffer)->mapped;
    if (mapped > list->limit || pthread_mutex_trylock(&list->mutex) != 0) {
        unmap(buffer);
        return;
    }
    shrink(list, list->limit - mapped);
    if (list->count == SLOTS) {
        list->kept -= (int64_t)head_of(list->buffer[0])->mapped;
        unmap(list->buffer[0]);
        list->count--;
        memmove(list->buffer, list->buffer + 1, (size_t)list->count * sizeof *list->buffer);
    }
    list->buffer[list->count++] = buffer;
    list->kept += mapped;
    pthread_mutex_unlock(&list->mutex);
}

int64_t qr_buffers_kept(qr_buffers *list)
{
    if (pthread_mutex_trylock(&list->mutex) != 0)
        return 0;
    const int64_t kept = list->kept;
    pthread_mutex_unlock(&list->mutex);
    return kept;
}

void qr_buffers_drop(qr_buffers *list)
{
    if (pthread_mutex_trylock(&list->mutex) != 0)
        return;
    shrink(list, 0);
    pthread_mutex_unlock(&list->mutex);
}
