/* One safetensors file: mapped privately and writable, its header read by cJSON in one pass and checked against it. */
#include "safetensors.h"

#include "json_text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the format is little-endian and its data is used in place"
#endif
_Static_assert(sizeof(size_t) >= 8, "files are mapped whole: a 64-bit address space is needed");

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

enum { LENGTH_BYTES = 8, MAX_HEADER = 100000000 };
static const double MAX_EXACT = 9007199254740992.0; /* 2^53: cJSON holds numbers as double */

#define BAD(...) qr_fail(error, QR_BAD_CHECKPOINT, __VA_ARGS__)

/* Files people have instead of weights, by how they begin; read as a length, each is over the limit. */
static const char *disguise(const char *start, size_t bytes)
{
    static const struct {
        const char *magic, *what;
    } known[] = {
        {"version https://git-lfs", "a Git LFS pointer, not the weights\n    do       run: git lfs pull"},
        {"GGUF", "a GGUF file\n    do       use the original safetensors checkpoint"},
        {"PK\x03\x04", "a zip archive (PyTorch .bin or .pt)\n    do       convert it to safetensors"},
        {"<!DOCTYPE", "a web page\n    do       download the file itself"},
        {"<html", "a web page\n    do       download the file itself"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (bytes >= strlen(known[i].magic) && memcmp(start, known[i].magic, strlen(known[i].magic)) == 0)
            return known[i].what;
    return NULL;
}

static int read_fully(int fd, char *out, size_t bytes, int64_t offset, const char *label, qr_error *error)
{
    while (bytes > 0) {
        const ssize_t n = pread(fd, out, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return BAD("%s: cannot be read: %s", label, strerror(errno));
        if (n == 0)
            return BAD("%s: became shorter while it was read", label);
        out += n;
        offset += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* The length of the header, by the first 8 bytes; what is no safetensors file is recognised here. */
static int read_length(int fd, size_t size, const char *label, size_t *length, qr_error *error)
{
    char start[32] = {0};
    const size_t probe = size < sizeof start ? size : sizeof start;
    uint64_t n = 0;

    if (read_fully(fd, start, probe, 0, label, error) < 0)
        return -1;
    if (size < LENGTH_BYTES)
        return BAD("%s: too short for a safetensors file\n    found    %zu bytes\n    expected 8 bytes of header "
                   "length, the header, the data\n    do       download the file again",
                   label, size);
    for (int i = 0; i < LENGTH_BYTES; i++)
        n |= (uint64_t)(unsigned char)start[i] << (8 * i);
    const char *other = n > MAX_HEADER ? disguise(start, probe) : NULL;
    if (other != NULL)
        return BAD("%s: is not a safetensors file\n    found    %s", label, other);
    if (n > MAX_HEADER)
        return BAD("%s: header length %llu is over the limit\n    expected at most %d bytes\n"
                   "    do       check that this is a safetensors file",
                   label, (unsigned long long)n, MAX_HEADER);
    if (n > size - LENGTH_BYTES)
        return BAD("%s: header length %llu goes beyond the file\n    found    a file of %zu bytes\n"
                   "    do       download the file again",
                   label, (unsigned long long)n, size);
    *length = (size_t)n;
    return 0;
}

/* Size, header and map of a file. The header is read rather than mapped, so the map stays untouched. */
static int map_file(const char *path, const char *label, qr_shard *out, char **header, size_t *length, qr_error *error)
{
    int rc = -1, fd = -1;
    struct stat st;
    void *map;

    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang */
    if (fd < 0 || fstat(fd, &st) < 0) {
        BAD("%s: cannot be opened: %s", label, strerror(errno));
        goto done;
    }
    if (!S_ISREG(st.st_mode)) {
        BAD(S_ISDIR(st.st_mode) ? "%s: is a folder, expected a file" : "%s: is not a regular file", label);
        goto done;
    }
    const size_t size = (size_t)st.st_size;
    QR_TRY(read_length(fd, size, label, length, error));
    *header = malloc(*length + 1);
    if (*header == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory for a header of %zu bytes", label, *length);
        goto done;
    }
    QR_TRY(read_fully(fd, *header, *length, LENGTH_BYTES, label, error));
    (*header)[*length] = '\0';

    /* Without NORESERVE, strict accounting charges every byte that could be edited and refuses files larger than RAM. */
    map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED) {
        BAD("%s: cannot be mapped (%zu bytes): %s", label, size, strerror(errno));
        goto done;
    }
    out->map = map;
    out->size = size;
    rc = 0;
done:
    if (fd >= 0)
        close(fd);
    return rc;
}

/* A whole number from 0 to 2^53 - 1, the range a double holds exactly. */
static bool exact_size(const cJSON *item, int64_t *out)
{
    const double value = cJSON_IsNumber(item) ? item->valuedouble : -1.0;
    if (!(value >= 0.0 && value < MAX_EXACT) || value != (double)(int64_t)value)
        return false;
    *out = (int64_t)value;
    return true;
}

/* Copy a string into the shard's storage, which the header's length bounds: a string is never longer than its JSON. */
static const char *keep(char **storage, const char *text)
{
    const size_t bytes = strlen(text) + 1;
    const char *kept = memcpy(*storage, text, bytes);
    *storage += bytes;
    return kept;
}

/* Where a tensor lies: its offsets must hold what its shape takes, and be in the file. */
static int place(qr_tensor *out, long long begin, long long end, const qr_shard *shard, int64_t start, qr_error *error)
{
    char shown[QR_SHOWN_SIZE], text[256];
    const char *label = shard->label, *name = qr_shown(out->name, shown, sizeof shown);
    const int64_t bytes = qr_tensor_bytes(out->dtype, out->ndim, out->shape);
    if (begin > end)
        return BAD("%s: %s: offsets %lld..%lld run backwards\n    expected the begin before the end", label, name,
                   begin, end);
    (void)qr_shape_text(out->ndim, out->shape, text, sizeof text);
    if (bytes < 0)
        return BAD("%s: %s: shape %s of %s is not a possible size\n    expected a whole number of bytes below 2^53",
                   label, name, text, qr_file_dtype_name(out->dtype));
    if (bytes != end - begin)
        return BAD(
            "%s: %s: offsets hold %lld bytes, shape takes %lld\n    found    offsets %lld..%lld\n    expected %lld "
            "bytes for shape %s of %s",
            label, name, end - begin, (long long)bytes, begin, end, (long long)bytes, text,
            qr_file_dtype_name(out->dtype));
    if (end > (int64_t)shard->size - start)
        return BAD(
            "%s: %s: offsets %lld..%lld go beyond the file\n    found    %lld bytes of data (file of %zu)\n    do  "
            "     the file is cut short or its header is wrong: download it again",
            label, name, begin, end, (long long)shard->size - (long long)start, shard->size);
    out->begin = start + begin;
    out->end = start + end;
    return 0;
}

/* One row of the header: {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}. */
static int read_tensor(const cJSON *row, const qr_shard *shard, int64_t start, qr_tensor *out, qr_error *error)
{
    const cJSON *dtype = NULL, *shape = NULL, *offsets = NULL, *item = NULL;
    char shown[QR_SHOWN_SIZE], text[256];
    const char *label = shard->label, *name = qr_shown(out->name, shown, sizeof shown);
    int64_t range[2] = {0, 0};
    int ends = 0;

    if (!cJSON_IsObject(row))
        return BAD("%s: %s: is not described by an object\n    expected {\"dtype\", \"shape\", \"data_offsets\"}",
                   label, name);
    cJSON_ArrayForEach(item, row)
    {
        const cJSON **field = strcmp(item->string, "dtype") == 0          ? &dtype
                              : strcmp(item->string, "shape") == 0        ? &shape
                              : strcmp(item->string, "data_offsets") == 0 ? &offsets
                                                                          : NULL;
        if (field == NULL)
            return BAD("%s: %s: unknown field \"%s\"\n    expected dtype, shape and data_offsets", label, name,
                       qr_shown(item->string, text, sizeof text));
        *field = item;
    }
    if (dtype == NULL || shape == NULL || offsets == NULL)
        return BAD("%s: %s: has no %s\n    expected dtype, shape and data_offsets", label, name,
                   dtype == NULL   ? "dtype"
                   : shape == NULL ? "shape"
                                   : "data_offsets");
    if (!cJSON_IsString(dtype))
        return BAD("%s: %s: dtype is not a string", label, name);
    for (int i = 0; i < QR_FILE_DTYPES; i++)
        if (strcmp(dtype->valuestring, qr_file_dtype_name((qr_file_dtype)i)) == 0)
            out->dtype = (qr_file_dtype)i;
    if (out->dtype == QR_FILE_DTYPES)
        return BAD("%s: %s: dtype \"%s\" is not one of the format", label, name,
                   qr_shown(dtype->valuestring, text, sizeof text));
    if (!cJSON_IsArray(shape))
        return BAD("%s: %s: shape is not a list", label, name);
    cJSON_ArrayForEach(item, shape)
    {
        if (out->ndim == QR_MAX_DIMS)
            return BAD("%s: %s: shape has more than %d dimensions", label, name, QR_MAX_DIMS);
        if (!exact_size(item, &out->shape[out->ndim]))
            return BAD("%s: %s: shape[%d] is not a size\n    expected a whole number from 0 to 2^53 - 1", label, name,
                       out->ndim);
        out->ndim++;
    }
    cJSON_ArrayForEach(item, offsets)
    {
        if (ends == 2 || !exact_size(item, &range[ends]))
            break;
        ends++;
    }
    if (!cJSON_IsArray(offsets) || ends != 2 || item != NULL)
        return BAD("%s: %s: data_offsets is not a pair of positions\n    expected two whole numbers from 0 to 2^53 - 1",
                   label, name);

    return place(out, range[0], range[1], shard, start, error);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const qr_pair *)a)->key, ((const qr_pair *)b)->key);
}

static int read_metadata(const cJSON *row, qr_shard *shard, char **storage, qr_error *error)
{
    const cJSON *item = NULL;
    char shown[QR_SHOWN_SIZE];

    if (!cJSON_IsObject(row))
        return BAD("%s: __metadata__ is not an object of strings", shard->label);
    shard->metadata = calloc((size_t)cJSON_GetArraySize(row) + 1, sizeof *shard->metadata);
    if (shard->metadata == NULL)
        return qr_fail(error, QR_NO_MEMORY, "%s: no memory for the metadata", shard->label);
    cJSON_ArrayForEach(item, row)
    {
        if (!cJSON_IsString(item))
            return BAD("%s: __metadata__[\"%s\"] is not a string", shard->label,
                       qr_shown(item->string, shown, sizeof shown));
        qr_pair *pair = &shard->metadata[shard->pairs++];
        pair->key = keep(storage, item->string);
        pair->value = keep(storage, item->valuestring);
    }
    qsort(shard->metadata, (size_t)shard->pairs, sizeof *shard->metadata, by_key);
    return 0;
}

static int by_position(const void *a, const void *b)
{
    const qr_tensor *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) /* an empty tensor comes before the one that begins where it lies */
        return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Every byte of the data in exactly one tensor. Leaves the tensors in file order. */
static int check_layout(qr_shard *shard, int64_t start, qr_error *error)
{
    qr_tensor *t = shard->tensor;
    char one[QR_SHOWN_SIZE], two[QR_SHOWN_SIZE];
    int64_t covered = start;

    qsort(t, (size_t)shard->tensors, sizeof *t, by_position);
    for (int64_t i = 0; i < shard->tensors; i++) {
        if (t[i].begin < covered)
            return BAD(
                "%s: %s: overlaps %s\n    found    offsets %lld..%lld and %lld..%lld\n    expected every byte in "
                "one tensor",
                shard->label, qr_shown(t[i].name, one, sizeof one), qr_shown(t[i - 1].name, two, sizeof two),
                (long long)(t[i].begin - start), (long long)(t[i].end - start), (long long)(t[i - 1].begin - start),
                (long long)(t[i - 1].end - start));
        if (t[i].begin > covered)
            return BAD(
                "%s: %s: offsets %lld..%lld of the data before it belong to no tensor\n    expected data without "
                "holes",
                shard->label, qr_shown(t[i].name, one, sizeof one), (long long)(covered - start),
                (long long)(t[i].begin - start));
        covered = t[i].end;
    }
    if (covered != (int64_t)shard->size)
        return BAD("%s: %lld bytes follow the last tensor\n    found    a file of %zu bytes\n    expected %lld, by the "
                   "header",
                   shard->label, (long long)shard->size - (long long)covered, shard->size, (long long)covered);
    return 0;
}

static int read_header(const char *header, size_t length, qr_shard *out, qr_error *error)
{
    const int64_t start = LENGTH_BYTES + (int64_t)length;
    int rc = -1;
    cJSON *root = NULL;
    const cJSON *row = NULL;
    char *storage = NULL, where[QR_SHOWN_SIZE + 16], shown[QR_SHOWN_SIZE];
    const qr_json_rules rules = {
        .source = where, .kind = QR_BAD_CHECKPOINT, .bytes = MAX_HEADER, .depth = 3, .items = 64};

    (void)snprintf(where, sizeof where, "%s: header", qr_shown(out->label, shown, sizeof shown));
    if (length == 0 || *header != '{') { /* the format allows blanks after the object, not before it */
        BAD("%s is not a JSON object", where);
        goto done;
    }
    QR_TRY(qr_json_parse(header, length, &rules, &root, error));
    const size_t rows = (size_t)cJSON_GetArraySize(root);
    out->tensor = calloc(rows + 1, sizeof *out->tensor);
    out->names = storage = malloc(length + 1);
    if (out->tensor == NULL || out->names == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory for %zu names", where, rows);
        goto done;
    }
    cJSON_ArrayForEach(row, root)
    {
        if (strcmp(row->string, "__metadata__") == 0) {
            QR_TRY(read_metadata(row, out, &storage, error));
            continue;
        }
        qr_tensor *tensor = &out->tensor[out->tensors++];
        tensor->name = keep(&storage, row->string);
        tensor->dtype = QR_FILE_DTYPES;
        QR_TRY(read_tensor(row, out, start, tensor, error));
    }
    QR_TRY(check_layout(out, start, error));
    rc = 0;
done:
    cJSON_Delete(root);
    return rc;
}

int qr_shard_open(const char *path, const char *label, qr_shard *out, qr_error *error)
{
    int rc = -1;
    char *header = NULL;
    size_t length = 0;

    *out = (qr_shard){0};
    out->label = strdup(label);
    if (out->label == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory", label);
        goto done;
    }
    QR_TRY(map_file(path, label, out, &header, &length, error));
    QR_TRY(read_header(header, length, out, error));
    rc = 0;
done:
    free(header);
    if (rc < 0)
        qr_shard_close(out);
    return rc;
}

void qr_shard_close(qr_shard *shard)
{
    if (shard->map != NULL)
        munmap(shard->map, shard->size);
    free(shard->tensor);
    free(shard->metadata);
    free(shard->names);
    free(shard->label);
    *shard = (qr_shard){0};
}
