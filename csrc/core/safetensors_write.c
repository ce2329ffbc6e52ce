/* Writes one safetensors file so that it appears complete or not at all. */
#include "safetensors.h"

#include "json_text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BAD(...) qr_fail(error, QR_BAD_CHECKPOINT, __VA_ARGS__)

/* One write() takes at most 2 GiB less a page on Linux and fails beyond INT_MAX on macOS. */
enum { MAX_WRITE = 1 << 30, MAX_HEADER = 100000000, TRIES = 1000 };

struct qr_writer {
    char *path, *temporary;
    int fd;
    int64_t left; /* bytes of data still to come */
};

static int write_fully(qr_writer *writer, const void *data, int64_t bytes, qr_error *error)
{
    const char *next = data;
    while (bytes > 0) {
        const ssize_t n = write(writer->fd, next, bytes < MAX_WRITE ? (size_t)bytes : (size_t)MAX_WRITE);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return BAD("%s: cannot be written: %s (errno %d)\n    found    %lld bytes left to write", writer->path,
                       strerror(errno), errno, (long long)bytes);
        next += n;
        bytes -= n;
    }
    return 0;
}

/* A new file beside the target, so that the rename stays within one file system. The process id keeps names apart; the
 * exclusive open decides. Mode and umask are those of an ordinary new file. */
static int open_temporary(qr_writer *writer, qr_error *error)
{
    const size_t size = strlen(writer->path) + 48;

    writer->temporary = malloc(size);
    if (writer->temporary == NULL)
        return qr_fail(error, QR_NO_MEMORY, "%s: no memory", writer->path);
    for (int i = 0; i < TRIES && writer->fd < 0; i++) {
        (void)snprintf(writer->temporary, size, "%s.%ld.%d.tmp", writer->path, (long)getpid(), i);
        writer->fd = open(writer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (writer->fd < 0 && errno != EEXIST)
            break;
    }
    if (writer->fd >= 0)
        return 0;
    const int code = errno;
    free(writer->temporary); /* not ours to remove */
    writer->temporary = NULL;
    return BAD("%s: cannot be written: %s (errno %d)", writer->path, strerror(code), code);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const qr_tensor *)a)->name, ((const qr_tensor *)b)->name);
}

static int in_file_order(const void *a, const void *b)
{
    const qr_tensor *x = a, *y = b;
    if (x->dtype != y->dtype)
        return x->dtype > y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* begin and end of each tensor, counted from the start of the data; names must be distinct. */
static int lay_out(qr_writer *writer, qr_tensor *tensor, int64_t tensors, qr_error *error)
{
    char shown[QR_SHOWN_SIZE], text[256];
    int64_t position = 0;

    qsort(tensor, (size_t)tensors, sizeof *tensor, by_name);
    for (int64_t i = 1; i < tensors; i++)
        if (by_name(&tensor[i - 1], &tensor[i]) == 0)
            return BAD("%s: %s: given twice", writer->path, qr_shown(tensor[i].name, shown, sizeof shown));
    qsort(tensor, (size_t)tensors, sizeof *tensor, in_file_order);
    for (int64_t i = 0; i < tensors; i++) {
        const int64_t bytes = qr_tensor_bytes(tensor[i].dtype, tensor[i].ndim, tensor[i].shape);
        (void)qr_shown(tensor[i].name, shown, sizeof shown);
        if (strcmp(tensor[i].name, "__metadata__") == 0)
            return BAD("%s: __metadata__ cannot name a tensor: the format keeps it for text", writer->path);
        if (bytes < 0 || position > ((int64_t)1 << 53) - bytes)
            return BAD("%s: %s: shape %s of %s is beyond the format", writer->path, shown,
                       qr_shape_text(tensor[i].ndim, tensor[i].shape, text, sizeof text),
                       qr_file_dtype_name(tensor[i].dtype));
        tensor[i].begin = position;
        tensor[i].end = position += bytes;
    }
    writer->left = position;
    return 0;
}

static cJSON *sizes(const int64_t *value, int n)
{
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; list != NULL && i < n; i++) {
        cJSON *item = NULL;
        char digits[24];
        (void)snprintf(digits, sizeof digits, "%lld", (long long)value[i]);
        item = cJSON_CreateRaw(digits); /* a number would print as 1e+15 from some size on */
        if (!cJSON_AddItemToArray(list, item)) {
            cJSON_Delete(item);
            cJSON_Delete(list);
            return NULL;
        }
    }
    return list;
}

/* Add `child` to `parent` under `name`, or free it. Owns `child` either way. */
static bool attach(cJSON *parent, const char *name, cJSON *child)
{
    if (cJSON_AddItemToObject(parent, name, child))
        return true;
    cJSON_Delete(child);
    return false;
}

static char *header_text(const qr_tensor *tensor, int64_t tensors, const qr_pair *metadata, int64_t pairs)
{
    cJSON *root = cJSON_CreateObject(), *strings = pairs > 0 ? cJSON_CreateObject() : NULL;
    bool ok = root != NULL;
    char *text = NULL;

    for (int64_t i = 0; ok && i < pairs; i++)
        ok = cJSON_AddStringToObject(strings, metadata[i].key, metadata[i].value) != NULL;
    if (strings != NULL)
        ok = attach(root, "__metadata__", strings) && ok;
    for (int64_t i = 0; ok && i < tensors; i++) {
        const qr_tensor *t = &tensor[i];
        cJSON *row = cJSON_CreateObject();
        ok = cJSON_AddStringToObject(row, "dtype", qr_file_dtype_name(t->dtype)) != NULL;
        ok = attach(row, "shape", sizes(t->shape, t->ndim)) && ok;
        ok = attach(row, "data_offsets", sizes((const int64_t[]){t->begin, t->end}, 2)) && ok;
        ok = attach(root, t->name, row) && ok;
    }
    if (ok)
        text = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    return text;
}

int qr_writer_open(const char *path, qr_tensor *tensor, int64_t tensors, const qr_pair *metadata, int64_t pairs,
                   qr_writer **out, qr_error *error)
{
    static const char blanks[] = "        ";
    int rc = -1;
    char *text = NULL;
    unsigned char length[8];
    qr_writer *writer = calloc(1, sizeof *writer);

    *out = NULL;
    if (writer == NULL)
        return qr_fail(error, QR_NO_MEMORY, "%s: no memory", path);
    writer->fd = -1;
    writer->path = strdup(path);
    if (writer->path == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory", path);
        goto done;
    }
    QR_TRY(lay_out(writer, tensor, tensors, error));
    text = header_text(tensor, tensors, metadata, pairs);
    if (text == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory for the header", path);
        goto done;
    }
    const size_t bytes = strlen(text), padding = (8 - bytes % 8) % 8; /* the data begins at a multiple of 8 */
    if (bytes + padding > MAX_HEADER) {
        BAD("%s: a header of %zu bytes is over the format's limit\n    expected at most %d bytes", path, bytes,
            MAX_HEADER);
        goto done;
    }
    for (int i = 0; i < 8; i++)
        length[i] = (unsigned char)((bytes + padding) >> (8 * i));
    QR_TRY(open_temporary(writer, error));
    QR_TRY(write_fully(writer, length, sizeof length, error));
    QR_TRY(write_fully(writer, text, (int64_t)bytes, error));
    QR_TRY(write_fully(writer, blanks, (int64_t)padding, error));
    *out = writer;
    rc = 0;
done:
    cJSON_free(text);
    if (rc < 0)
        qr_writer_abort(writer);
    return rc;
}

int qr_writer_data(qr_writer *writer, const void *data, int64_t bytes, qr_error *error)
{
    if (bytes > writer->left)
        return qr_fail(error, QR_INTERNAL, "%s: more data than the header describes", writer->path);
    writer->left -= bytes;
    return write_fully(writer, data, bytes, error);
}

/* Make the new directory entry durable. File systems that cannot sync a folder do so on their own. */
static void sync_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash == NULL ? strdup(".") : strndup(path, slash == path ? 1 : (size_t)(slash - path));
    const int fd = folder != NULL ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
    free(folder);
}

int qr_writer_finish(qr_writer *writer, qr_error *error)
{
    int rc = -1, failed;

    if (writer->left != 0) {
        qr_fail(error, QR_INTERNAL, "%s: %lld bytes of data are missing", writer->path, (long long)writer->left);
        goto done;
    }
    failed = fsync(writer->fd) < 0 ? errno : 0;
    if (close(writer->fd) < 0 && failed == 0) /* some file systems report a full disk only here */
        failed = errno;
    writer->fd = -1;
    if (failed == 0 && rename(writer->temporary, writer->path) < 0)
        failed = errno;
    if (failed != 0) {
        BAD("%s: cannot be written: %s (errno %d)", writer->path, strerror(failed), failed);
        goto done;
    }
    free(writer->temporary); /* now the file itself */
    writer->temporary = NULL;
    sync_folder(writer->path);
    rc = 0;
done:
    qr_writer_abort(writer);
    return rc;
}

void qr_writer_abort(qr_writer *writer)
{
    if (writer == NULL)
        return;
    if (writer->fd >= 0)
        close(writer->fd);
    if (writer->temporary != NULL)
        unlink(writer->temporary);
    free(writer->temporary);
    free(writer->path);
    free(writer);
}
