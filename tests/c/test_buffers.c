/* The list of large buffers: what is given comes back, within the limit, from any thread, and across a fork. */
#include "../../csrc/core/buffers.h"

#include "check.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

TEST(a_buffer_given_back_is_the_next_one_taken)
{
    qr_buffers *list = qr_buffers_new(64 * MIB);
    char *first = qr_buffers_take(list, 9 * MIB);
    CHECK((uintptr_t)first % 64 == 0);
    CHECK(qr_buffer_room(first) >= 9 * MIB);
    memset(first, 1, 9 * MIB);
    qr_buffers_give(list, first);
    CHECK(qr_buffers_kept(list) >= 9 * MIB);
    CHECK((char *)qr_buffers_take(list, 8 * MIB) == first);
    CHECK(qr_buffers_kept(list) == 0);
    qr_buffers_give(list, first);
    qr_buffers_free(list);
}

TEST(a_buffer_of_whole_huge_pages_takes_no_more_of_them)
{
    qr_buffers *list = qr_buffers_new(64 * MIB);
    char *buffer = qr_buffers_take(list, 12 * MIB);
    CHECK_INT((int64_t)qr_buffer_room(buffer), 12 * MIB);
    CHECK((uintptr_t)buffer % (2 * MIB) == 0);
    memset(buffer, 1, 12 * MIB);
    qr_buffers_give(list, buffer);
    CHECK_INT(qr_buffers_kept(list), 12 * MIB);
    qr_buffers_free(list);
}

TEST(a_small_wish_does_not_take_a_buffer_twice_its_size)
{
    qr_buffers *list = qr_buffers_new(64 * MIB);
    void *large = qr_buffers_take(list, 40 * MIB), *small = qr_buffers_take(list, 12 * MIB);
    qr_buffers_give(list, large);
    qr_buffers_give(list, small);
    void *other = qr_buffers_take(list, 10 * MIB);
    CHECK(other == small); /* the closest, though both are kept */
    void *third = qr_buffers_take(list, 10 * MIB);
    CHECK(third != large);
    qr_buffers_give(list, other);
    qr_buffers_give(list, third);
    qr_buffers_free(list);
}

TEST(the_oldest_go_when_the_limit_is_reached)
{
    qr_buffers *list = qr_buffers_new(32 * MIB);
    void *buffer[5];
    for (int i = 0; i < 5; i++)
        buffer[i] = qr_buffers_take(list, 9 * MIB);
    for (int i = 0; i < 5; i++)
        qr_buffers_give(list, buffer[i]);
    CHECK(qr_buffers_kept(list) <= 32 * MIB);
    CHECK(qr_buffers_kept(list) >= 18 * MIB);
    CHECK(qr_buffers_take(list, 9 * MIB) == buffer[4]);
    qr_buffers_give(list, buffer[4]);
    void *huge = qr_buffers_take(list, 40 * MIB);
    qr_buffers_give(list, huge); /* never kept: it alone is over the limit */
    CHECK(qr_buffers_kept(list) <= 32 * MIB);
    qr_buffers_drop(list);
    CHECK(qr_buffers_kept(list) == 0);
    qr_buffers_free(list);
}

TEST(no_more_buffers_are_kept_than_there_is_room_to_name)
{
    qr_buffers *list = qr_buffers_new(INT64_C(1) << 40);
    void *buffer[70];
    for (int i = 0; i < 70; i++)
        buffer[i] = qr_buffers_take(list, 1);
    for (int i = 0; i < 70; i++)
        qr_buffers_give(list, buffer[i]);
    CHECK(qr_buffers_kept(list) == 64 * (int64_t)(2 * MIB));
    qr_buffers_free(list);
}

TEST(a_size_no_machine_has_is_refused)
{
    qr_buffers *list = qr_buffers_new(32 * MIB);
    CHECK(qr_buffers_take(list, SIZE_MAX) == NULL);
    CHECK(qr_buffers_take(list, SIZE_MAX / 2) == NULL);
    qr_buffers_give(list, NULL);
    qr_buffers_free(list);
}

static void *take_and_give(void *list)
{
    size_t wrong = 0;
    for (int i = 0; i < 200; i++) {
        char *buffer = qr_buffers_take(list, (size_t)(1 + i % 3) * 4 * MIB);
        if (buffer == NULL) {
            wrong++;
            continue;
        }
        const char mark = (char)i;
        buffer[0] = mark;
        buffer[4 * MIB - 1] = mark;
        wrong += buffer[0] != mark || buffer[4 * MIB - 1] != mark;
        qr_buffers_give(list, buffer);
    }
    return (void *)wrong;
}

TEST(threads_never_hold_the_same_buffer)
{
    qr_buffers *list = qr_buffers_new(64 * MIB);
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&thread[i], NULL, take_and_give, list) == 0);
    for (int i = 0; i < 4; i++) {
        void *wrong = NULL;
        pthread_join(thread[i], &wrong);
        CHECK(wrong == NULL);
    }
    CHECK(qr_buffers_kept(list) <= 64 * MIB);
    qr_buffers_free(list);
}

TEST(a_forked_child_takes_and_gives)
{
    qr_buffers *list = qr_buffers_new(64 * MIB);
    void *buffer = qr_buffers_take(list, 8 * MIB);
    int status = -1;
    qr_buffers_give(list, buffer);
    const pid_t child = fork();
    if (child == 0)
        _exit(take_and_give(list) == NULL ? 0 : 1);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    qr_buffers_free(list);
}

RUN_TESTS()
