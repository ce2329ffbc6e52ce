/* Opens a checkpoint folder or file, checks index against shards, finds tensors by name, talks to the pager. */
#include "checkpoint.h"

#include "checkpoint_index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BAD(...) qr_fail(error, QR_BAD_CHECKPOINT, __VA_ARGS__)

static int by_name(const void *a, const void *b)
{
    const qr_tensor *x = *(const qr_tensor *const *)a, *y = *(const qr_tensor *const *)b;
    const int order = strcmp(x->name, y->name);
    return order != 0 ? order : x->shard - y->shard;
}

/* One list of all tensors, sorted; the same name in two shards is a fault. */
static int merge(qr_checkpoint *checkpoint, const char *label, qr_error *error)
{
    qr_faults faults = {0};
    char one[QR_SHOWN_SIZE];
    size_t n = 0;

    for (int s = 0; s < checkpoint->shards; s++)
        n += (size_t)checkpoint->shard[s].tensors;
    checkpoint->tensor = calloc(n + 1, sizeof *checkpoint->tensor);
    if (checkpoint->tensor == NULL)
        return qr_fail(error, QR_NO_MEMORY, "%s: no memory for %zu tensors", label, n);
    for (int s = 0; s < checkpoint->shards; s++)
        for (int64_t i = 0; i < checkpoint->shard[s].tensors; i++) {
            checkpoint->shard[s].tensor[i].shard = s;
            checkpoint->tensor[checkpoint->tensors++] = &checkpoint->shard[s].tensor[i];
        }
    qsort(checkpoint->tensor, n, sizeof *checkpoint->tensor, by_name);
    for (size_t i = 1; i < n; i++) {
        const qr_tensor *x = checkpoint->tensor[i - 1], *y = checkpoint->tensor[i];
        if (strcmp(x->name, y->name) == 0)
            qr_fault(&faults, "%s in %s and %s", qr_shown(y->name, one, sizeof one), checkpoint->shard[x->shard].label,
                     checkpoint->shard[y->shard].label);
    }
    return qr_faults_raise(&faults, label, "%lld tensor%s stored in two shards", "expected each name once", error);
}

/* Both directions: every row of the index is in the shard it names, every tensor of a shard has a row. */
static int check_index(const qr_checkpoint *checkpoint, const qr_index *index, const char *label, qr_error *error)
{
    qr_faults absent = {0}, unnamed = {0};
    char one[QR_SHOWN_SIZE];
    int64_t i = 0, j = 0;

    for (;;) {
        const qr_index_row *row = i < index->rows ? &index->row[i] : NULL;
        const qr_tensor *t = j < checkpoint->tensors ? checkpoint->tensor[j] : NULL;
        if (row == NULL && t == NULL)
            break;
        const int order = row == NULL ? 1 : t == NULL ? -1 : strcmp(row->name, t->name);
        if (order < 0)
            qr_fault(&absent, "%s, said to be in %s", qr_shown(row->name, one, sizeof one), index->file[row->file]);
        else if (order > 0)
            qr_fault(&unnamed, "%s in %s", qr_shown(t->name, one, sizeof one), checkpoint->shard[t->shard].label);
        else if (row->file != t->shard)
            qr_fault(&absent, "%s, said to be in %s, is in %s", qr_shown(row->name, one, sizeof one),
                     index->file[row->file], checkpoint->shard[t->shard].label);
        i += order <= 0;
        j += order >= 0;
    }
    QR_TRY(qr_faults_raise(&absent, label, "%lld name%s in the index but not in the shard it gives",
                           "do       download the shards and the index again, from one revision", error));
    QR_TRY(qr_faults_raise(&unnamed, label, "%lld tensor%s in a shard but not in the index",
                           "do       download the shards and the index again, from one revision", error));
    return 0;
done:
    return -1;
}

static int open_single(qr_checkpoint *checkpoint, const char *path, qr_error *error)
{
    const char *slash = strrchr(path, '/');

    checkpoint->shard = calloc(1, sizeof *checkpoint->shard);
    if (checkpoint->shard == NULL)
        return qr_fail(error, QR_NO_MEMORY, "%s: no memory", path);
    if (qr_shard_open(path, slash != NULL ? slash + 1 : path, checkpoint->shard, error) < 0)
        return -1;
    checkpoint->shards = 1;
    return merge(checkpoint, checkpoint->shard->label, error);
}

static int open_indexed(qr_checkpoint *checkpoint, const char *path, qr_error *error)
{
    const char *slash = strrchr(path, '/'), *label = slash != NULL ? slash + 1 : path;
    const int folder = slash != NULL ? (int)(slash - path) + 1 : 0;
    int rc = -1;
    char *file = NULL;
    size_t size;
    qr_index index = {0};

    QR_TRY(qr_index_read(path, label, &index, error));
    checkpoint->shard = calloc((size_t)index.files + 1, sizeof *checkpoint->shard);
    size = (size_t)folder + index.longest_file + 1;
    file = malloc(size);
    if (checkpoint->shard == NULL || file == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory for %d shards", label, index.files);
        goto done;
    }
    qr_faults missing = {0};
    for (int i = 0; i < index.files; i++) {
        struct stat st;
        (void)snprintf(file, size, "%.*s%s", folder, path, index.file[i]);
        if (stat(file, &st) < 0 && (errno == ENOENT || errno == ENOTDIR))
            qr_fault(&missing, "%s", index.file[i]);
    }
    QR_TRY(qr_faults_raise(&missing, label, "%lld shard%s missing on disk", "do       download them beside the index",
                           error));
    for (int i = 0; i < index.files; i++) {
        (void)snprintf(file, size, "%.*s%s", folder, path, index.file[i]);
        QR_TRY(qr_shard_open(file, index.file[i], &checkpoint->shard[i], error));
        checkpoint->shards = i + 1;
    }
    QR_TRY(merge(checkpoint, label, error));
    QR_TRY(check_index(checkpoint, &index, label, error));
    rc = 0;
done:
    free(file);
    qr_index_free(&index);
    return rc;
}

static bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0; /* a link into nowhere is there, and opening it says what is wrong */
}

static int open_folder(qr_checkpoint *checkpoint, const char *path, qr_error *error)
{
    static const char indexed[] = "model.safetensors.index.json", single[] = "model.safetensors";
    const size_t size = strlen(path) + sizeof indexed + 1;
    const char *slash = path[strlen(path) - 1] == '/' ? "" : "/";
    char *index = malloc(size), *file = malloc(size);
    int rc = -1;

    if (index == NULL || file == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory", path);
        goto done;
    }
    (void)snprintf(index, size, "%s%s%s", path, slash, indexed);
    (void)snprintf(file, size, "%s%s%s", path, slash, single);
    if (!exists(index) && !exists(file)) {
        BAD("%s: holds no checkpoint\n    expected %s, or %s with its shards\n    do       give the folder that holds "
            "them, or the path of one .safetensors file",
            path, single, indexed);
        goto done;
    }
    if (!exists(index)) {
        rc = open_single(checkpoint, file, error);
        goto done;
    }
    QR_TRY(open_indexed(checkpoint, index, error));
    /* Two complete sets of weights: taking either silently could be the wrong one. */
    if (exists(file)) {
        bool used = false;
        for (int i = 0; i < checkpoint->shards; i++)
            used = used || strcmp(checkpoint->shard[i].label, single) == 0;
        if (!used) {
            BAD("%s: holds two checkpoints\n    found    %s, and %s which does not use it\n    do       give the path "
                "of "
                "the one you mean, or remove the other",
                path, single, indexed);
            goto done;
        }
    }
    rc = 0;
done:
    free(index);
    free(file);
    return rc;
}

int qr_checkpoint_open(const char *path, qr_checkpoint **out, qr_error *error)
{
    static const char suffix[] = ".json";
    const size_t length = strlen(path);
    int rc = -1;
    struct stat st;
    qr_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);

    *out = NULL;
    if (checkpoint == NULL)
        return qr_fail(error, QR_NO_MEMORY, "%s: no memory", path);
    if (stat(path, &st) < 0) {
        BAD("%s: cannot be opened: %s", path, strerror(errno));
        goto done;
    }
    if (S_ISDIR(st.st_mode))
        rc = open_folder(checkpoint, path, error);
    else if (length >= sizeof suffix && strcmp(path + length - (sizeof suffix - 1), suffix) == 0)
        rc = open_indexed(checkpoint, path, error);
    else
        rc = open_single(checkpoint, path, error);
done:
    if (rc < 0)
        qr_checkpoint_close(checkpoint);
    else
        *out = checkpoint;
    return rc;
}

void qr_checkpoint_close(qr_checkpoint *checkpoint)
{
    if (checkpoint == NULL)
        return;
    for (int i = 0; i < checkpoint->shards; i++)
        qr_shard_close(&checkpoint->shard[i]);
    free(checkpoint->shard);
    free(checkpoint->tensor);
    free(checkpoint);
}

const qr_tensor *qr_checkpoint_find(const qr_checkpoint *checkpoint, const char *name)
{
    int64_t low = 0, high = checkpoint->tensors;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int order = strcmp(name, checkpoint->tensor[middle]->name);
        if (order == 0)
            return checkpoint->tensor[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

unsigned char *qr_tensor_data(const qr_checkpoint *checkpoint, const qr_tensor *tensor)
{
    return checkpoint->shard[tensor->shard].map + tensor->begin;
}

int64_t qr_checkpoint_resident(const qr_checkpoint *checkpoint, qr_error *error)
{
    enum { PAGES = 16384 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char present[PAGES];
    int64_t total = 0;

    for (int s = 0; s < checkpoint->shards; s++) {
        const qr_shard *shard = &checkpoint->shard[s];
        for (size_t at = 0; at < shard->size; at += PAGES * page) {
            const size_t left = shard->size - at, bytes = left < PAGES * page ? left : PAGES * page;
            if (mincore(shard->map + at, bytes, (void *)present) < 0)
                return qr_fail(error, QR_NOT_CAPABLE, "%s: cannot tell what is in memory: %s", shard->label,
                               strerror(errno));
            for (size_t i = 0, rest = bytes; rest > 0; i++) {
                const size_t step = rest < page ? rest : page; /* the last page of a file is rarely full */
                total += present[i] & 1 ? (int64_t)step : 0;
                rest -= step;
            }
        }
    }
    return total;
}

int qr_tensor_advise(const qr_checkpoint *checkpoint, const qr_tensor *tensor, qr_advice advice, qr_error *error)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)qr_tensor_data(checkpoint, tensor);
    const uintptr_t end = begin + (uintptr_t)(tensor->end - tensor->begin);
    uintptr_t from = begin / page * page, to = end;
    int how = MADV_WILLNEED;

    if (advice == QR_DONT_NEED) {
        from = (begin + page - 1) / page * page;
        to = end / page * page;
#ifdef MADV_PAGEOUT /* MADV_DONTNEED would throw edits away */
        how = MADV_PAGEOUT;
#else
        return 0;
#endif
    }
    if (to <= from)
        return 0;
    if (madvise((void *)from, (size_t)(to - from), how) < 0 && errno != EINVAL) /* EINVAL: a kernel without it */
        return qr_fail(error, QR_NOT_CAPABLE, "%s: the system refused advice: %s",
                       checkpoint->shard[tensor->shard].label, strerror(errno));
    return 0;
}
