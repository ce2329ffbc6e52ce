/* Reads model.safetensors.index.json: one file per tensor name, every file inside the folder. */
#include "checkpoint_index.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BAD(...) qr_fail(error, QR_BAD_CHECKPOINT, __VA_ARGS__)

enum { MAX_INDEX = 100000000, SHOWN_FAULTS = 5 };

void qr_fault(qr_faults *faults, const char *format, ...)
{
    if (faults->count++ >= SHOWN_FAULTS)
        return;
    char line[512];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(line, sizeof line, format, args);
    va_end(args);
    const int n = snprintf(faults->text + faults->used, sizeof faults->text - faults->used, "\n    %-8s %s",
                           faults->used == 0 ? "found" : "", line);
    if (n > 0)
        faults->used += (size_t)n < sizeof faults->text - faults->used ? (size_t)n : 0;
}

int qr_faults_raise(const qr_faults *faults, const char *where, const char *summary, const char *last, qr_error *error)
{
    char more[64] = "", first[256];

    if (faults->count == 0)
        return 0;
    if (faults->count > SHOWN_FAULTS)
        (void)snprintf(more, sizeof more, "\n             and %lld more", (long long)faults->count - SHOWN_FAULTS);
    (void)snprintf(first, sizeof first, summary, (long long)faults->count, faults->count == 1 ? " is" : "s are");
    return BAD("%s: %s%s%s\n    %s", where, first, faults->text, more, last);
}

static int read_text(const char *path, const char *label, char **text, size_t *length, qr_error *error)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    int rc = -1;
    size_t used = 0;

    if (fd < 0 || fstat(fd, &st) < 0) {
        BAD("%s: cannot be opened: %s", label, strerror(errno));
        goto done;
    }
    if (!S_ISREG(st.st_mode)) {
        BAD("%s: is not a regular file", label);
        goto done;
    }
    if (st.st_size > MAX_INDEX) {
        BAD("%s: too large for an index\n    found    %lld bytes\n    expected at most %d", label,
            (long long)st.st_size, MAX_INDEX);
        goto done;
    }
    *text = malloc((size_t)st.st_size + 1);
    if (*text == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory", label);
        goto done;
    }
    while (used < (size_t)st.st_size) {
        const ssize_t n = read(fd, *text + used, (size_t)st.st_size - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            BAD("%s: cannot be read: %s", label, strerror(errno));
            goto done;
        }
        if (n == 0)
            break;
        used += (size_t)n;
    }
    (*text)[used] = '\0';
    *length = used;
    rc = 0;
done:
    if (fd >= 0)
        close(fd);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const qr_index_row *)a)->name, ((const qr_index_row *)b)->name);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Relative, and no part of it ".." or empty: the path cannot lead out of the folder (links may, as caches use them). */
static bool inside_folder(const char *path)
{
    if (*path == '\0' || *path == '/' || strchr(path, '\\') != NULL)
        return false;
    for (const char *part = path; part != NULL; part = strchr(part, '/')) {
        part += *part == '/';
        const size_t n = strcspn(part, "/");
        if (n == 0 || (n == 1 && part[0] == '.') || (n == 2 && part[0] == '.' && part[1] == '.'))
            return false;
    }
    return true;
}

/* Rows sorted by name, then the distinct files; each row gets the number of its file. */
static int sort_rows(qr_index *index, const char *label, qr_error *error)
{
    char shown[QR_SHOWN_SIZE];
    qr_faults outside = {0};

    qsort(index->row, (size_t)index->rows, sizeof *index->row, by_name);
    for (int64_t i = 0; i < index->rows; i++)
        index->file[i] = index->row[i].path;
    qsort(index->file, (size_t)index->rows, sizeof *index->file, by_text);
    for (int64_t i = 0; i < index->rows; i++)
        if (index->files == 0 || strcmp(index->file[index->files - 1], index->file[i]) != 0)
            index->file[index->files++] = index->file[i];
    for (int i = 0; i < index->files; i++) {
        const size_t n = strlen(index->file[i]);
        index->longest_file = n > index->longest_file ? n : index->longest_file;
        if (!inside_folder(index->file[i]))
            qr_fault(&outside, "\"%s\"", qr_shown(index->file[i], shown, sizeof shown));
    }
    QR_TRY(qr_faults_raise(&outside, label, "%lld shard path%s outside the folder",
                           "expected paths relative to the index, without \"..\"", error));
    for (int64_t i = 0; i < index->rows; i++) {
        const char **at = bsearch(&index->row[i].path, index->file, (size_t)index->files, sizeof *index->file, by_text);
        index->row[i].file = (int)(at - index->file);
    }
    return 0;
done:
    return -1;
}

int qr_index_read(const char *path, const char *label, qr_index *out, qr_error *error)
{
    const qr_json_rules rules = {
        .source = label, .kind = QR_BAD_CHECKPOINT, .bytes = MAX_INDEX, .depth = QR_JSON_DEPTH};
    int rc = -1;
    char *text = NULL, shown[QR_SHOWN_SIZE];
    size_t length = 0;
    const cJSON *map = NULL, *item = NULL;
    cJSON *root = NULL;

    *out = (qr_index){0};
    QR_TRY(read_text(path, label, &text, &length, error));
    QR_TRY(qr_json_parse(text, length, &rules, &root, error));
    map = cJSON_GetObjectItemCaseSensitive(root, "weight_map");
    if (!cJSON_IsObject(map)) {
        BAD("%s: has no weight_map\n    expected an object: tensor name -> file", label);
        goto done;
    }
    const size_t rows = (size_t)cJSON_GetArraySize(map);
    out->row = calloc(rows + 1, sizeof *out->row);
    out->file = calloc(rows + 1, sizeof *out->file);
    if (out->row == NULL || out->file == NULL) {
        qr_fail(error, QR_NO_MEMORY, "%s: no memory for %zu names", label, rows);
        goto done;
    }
    cJSON_ArrayForEach(item, map)
    {
        if (!cJSON_IsString(item)) {
            BAD("%s: %s: its file is not a string", label, qr_shown(item->string, shown, sizeof shown));
            goto done;
        }
        out->row[out->rows++] = (qr_index_row){.name = item->string, .path = item->valuestring};
    }
    if (out->rows == 0) {
        BAD("%s: its weight_map is empty", label);
        goto done;
    }
    QR_TRY(sort_rows(out, label, error));
    out->tree = root;
    root = NULL;
    rc = 0;
done:
    free(text);
    cJSON_Delete(root);
    if (rc < 0)
        qr_index_free(out);
    return rc;
}

void qr_index_free(qr_index *index)
{
    free(index->row);
    free(index->file);
    cJSON_Delete(index->tree);
    *index = (qr_index){0};
}
