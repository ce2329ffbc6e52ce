/* The text of a JSON file: one strict pass over the bytes, cJSON for the structure, one pass for repeated keys.
 * cJSON alone accepts 01, control characters, a cut-off name with an escaped NUL, and the same key twice. */
#include "json_text.h"

#include <stdlib.h>
#include <string.h>

typedef struct scan {
    const char *text, *source;
    size_t length, at;
    qr_error_kind kind;
    qr_error *error;
} scan;

char *qr_printable(const char *text, char *buffer, size_t size)
{
    size_t n = 0;
    for (; text[n] != '\0' && n + 1 < size; n++)
        buffer[n] = text[n] >= ' ' && text[n] < 127 ? text[n] : '?';
    buffer[n] = '\0';
    return buffer;
}

/* Copy what stands at `at` for a message: one line, printable, short. */
static void excerpt(const scan *s, size_t at, char *out, size_t size)
{
    size_t n = 0;
    if (at >= s->length) {
        (void)snprintf(out, size, "the end of the text");
        return;
    }
    for (; at < s->length && n + 1 < size; at++) {
        const unsigned char c = (unsigned char)s->text[at];
        if (n > 0 && (c == '\n' || c == '\r' || c == ' ' || c == ','))
            break;
        out[n++] = c >= ' ' && c < 127 ? (char)c : '?';
    }
    out[n] = '\0';
}

static int syntax(const scan *s, size_t at, const char *expected)
{
    char found[24];
    size_t line = 1, column = 1;

    for (size_t i = 0; i < at && i < s->length; i++) {
        if (s->text[i] == '\n') {
            line++;
            column = 1;
        } else if (((unsigned char)s->text[i] & 0xC0) != 0x80) { /* a UTF-8 continuation byte is no new column */
            column++;
        }
    }
    excerpt(s, at, found, sizeof found);
    return qr_fail(s->error, s->kind, "%s: line %zu, column %zu: found %s, expected %s", s->source, line, column, found,
                   expected);
}

static bool digit(const scan *s)
{
    return s->text[s->at] >= '0' && s->text[s->at] <= '9';
}

static bool digits(scan *s)
{
    const size_t start = s->at;
    while (digit(s))
        s->at++;
    return s->at > start;
}

/* The terminating 0 ends every loop below: none of them accepts it. */
static int scan_number(scan *s)
{
    const size_t start = s->at;
    bool good;

    if (s->text[s->at] == '-')
        s->at++;
    if (s->text[s->at] == '0') {
        s->at++;
        good = !digit(s);
    } else {
        good = digits(s);
    }
    if (good && s->text[s->at] == '.') {
        s->at++;
        good = digits(s);
    }
    if (good && (s->text[s->at] == 'e' || s->text[s->at] == 'E')) {
        s->at++;
        if (s->text[s->at] == '+' || s->text[s->at] == '-')
            s->at++;
        good = digits(s);
    }
    if (good && s->at - start > QR_JSON_MAX_NUMBER)
        return syntax(s, start, "a number of fewer digits");
    return good ? 0 : syntax(s, start, "a JSON number");
}

static int scan_word(scan *s)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        const size_t n = strlen(words[i]);
        const char after = s->length - s->at >= n ? s->text[s->at + n] : '\0';
        if (strncmp(s->text + s->at, words[i], n) == 0 && !(after >= 'a' && after <= 'z')) {
            s->at += n;
            return 0;
        }
    }
    return syntax(s, s->at, "a JSON value");
}

static int scan_string(scan *s)
{
    const size_t start = s->at++;
    for (; s->at < s->length && s->text[s->at] != '"'; s->at++) {
        if ((unsigned char)s->text[s->at] < ' ')
            return syntax(s, s->at, "no control character inside a string");
        if (s->text[s->at] != '\\')
            continue;
        if (strncmp(s->text + s->at, "\\u0000", 6) == 0)
            return syntax(s, s->at, "no NUL inside a string");
        if (s->at + 1 < s->length)
            s->at++;
    }
    if (s->at >= s->length)
        return syntax(s, start, "a string that ends");
    s->at++;
    return 0;
}

static int scan_text(scan *s)
{
    int depth = 0;

    if (s->length > QR_JSON_MAX_BYTES)
        return qr_fail(s->error, s->kind, "%s: found %zu bytes, expected at most %d", s->source, s->length,
                       QR_JSON_MAX_BYTES);
    if (strncmp(s->text, "\xEF\xBB\xBF", 3) == 0)
        return qr_fail(s->error, s->kind, "%s: found a byte order mark, expected plain UTF-8", s->source);
    while (s->at < s->length) {
        const char c = s->text[s->at];
        if (c == '"') {
            QR_TRY(scan_string(s));
        } else if (c == '-' || digit(s)) {
            QR_TRY(scan_number(s));
        } else if (c >= 'A' && c <= 'z' && c != '[' && c != ']') {
            QR_TRY(scan_word(s));
        } else if (c != '\0' && strchr("{}[]:, \t\r\n", c) != NULL) {
            depth += (c == '{' || c == '[') - (c == '}' || c == ']');
            if (depth > QR_JSON_MAX_DEPTH)
                return syntax(s, s->at, "less nesting");
            s->at++;
        } else {
            QR_TRY(syntax(s, s->at, "a JSON value"));
        }
    }
    return 0;
done:
    return -1;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Two values under one name: readers differ in which one they take, so neither is right. */
static int check_repeats(const scan *s, const cJSON *node, const char *where)
{
    const char **names = NULL;
    const cJSON *child;
    size_t count = 0, i = 0;
    char place[64], name[64];
    int rc = -1;

    cJSON_ArrayForEach(child, node) count++;
    if (cJSON_IsObject(node) && count > 1) {
        names = malloc(count * sizeof *names);
        if (names == NULL)
            QR_TRY(qr_fail(s->error, QR_NO_MEMORY, "%s: out of memory", s->source));
        cJSON_ArrayForEach(child, node) names[i++] = child->string;
        qsort(names, count, sizeof *names, by_name);
        for (i = 1; i < count; i++) {
            if (strcmp(names[i - 1], names[i]) == 0)
                QR_TRY(qr_fail(s->error, s->kind, "%s: %s: found the key \"%s\" twice, expected it once", s->source,
                               qr_printable(where, place, sizeof place), qr_printable(names[i], name, sizeof name)));
        }
    }
    cJSON_ArrayForEach(child, node) if (cJSON_IsObject(child) || cJSON_IsArray(child))
        QR_TRY(check_repeats(s, child, child->string != NULL ? child->string : where));
    rc = 0;
done:
    free(names);
    return rc;
}

int qr_json_parse(const char *text, size_t length, const char *source, qr_error_kind kind, cJSON **out, qr_error *error)
{
    scan s = {.text = text, .source = source, .length = length, .kind = kind, .error = error};
    const char *end = text;
    cJSON *root = NULL;

    *out = NULL;
    QR_TRY(scan_text(&s));
    root = cJSON_ParseWithLengthOpts(text, length + 1, &end, true);
    if (root == NULL)
        QR_TRY(syntax(&s, (size_t)(end - text), "well-formed JSON"));
    QR_TRY(check_repeats(&s, root, "top level"));
    *out = root;
    return 0;
done:
    cJSON_Delete(root);
    return -1;
}
