/* The text of a JSON file: one strict pass over the bytes, cJSON for the structure, one pass for repeated keys.
 * cJSON alone accepts 01, control characters, a cut-off name with an escaped NUL, and the same key twice. */
#include "json_text.h"

#include <stdlib.h>
#include <string.h>

typedef struct scan {
    const char *text;
    size_t length, at;
    const qr_json_rules *rules;
    qr_error *error;
} scan;

/* Bytes of the well-formed UTF-8 sequence at `s` (Unicode, table 3-7), or 0. What stands behind it may be read: a 0. */
static size_t utf8_length(const unsigned char *s)
{
    unsigned char low = 0x80, high = 0xBF;
    size_t n = 0;

    if (s[0] < 0x80)
        return 1;
    if (s[0] >= 0xC2 && s[0] <= 0xDF)
        n = 2;
    else if (s[0] >= 0xE0 && s[0] <= 0xEF)
        n = 3;
    else if (s[0] >= 0xF0 && s[0] <= 0xF4)
        n = 4;
    if (s[0] == 0xE0)
        low = 0xA0; /* shorter forms exist */
    else if (s[0] == 0xED)
        high = 0x9F; /* surrogates */
    else if (s[0] == 0xF0)
        low = 0x90;
    else if (s[0] == 0xF4)
        high = 0x8F; /* beyond U+10FFFF */
    if (n == 0 || s[1] < low || s[1] > high)
        return 0;
    for (size_t i = 2; i < n; i++)
        if (s[i] < 0x80 || s[i] > 0xBF)
            return 0;
    return n;
}

const char *qr_shown(const char *text, char *buffer, size_t size)
{
    size_t n = strlen(text);
    const bool cut = n >= size;

    if (cut) {
        n = size - 4; /* "..." and the end */
        while (n > 0 && ((unsigned char)text[n] & 0xC0) == 0x80)
            n--;
    }
    for (size_t i = 0; i < n; i++)
        buffer[i] = (unsigned char)text[i] < ' ' || text[i] == 0x7F ? '?' : text[i];
    memcpy(buffer + n, cut ? "..." : "", cut ? 4 : 1);
    return buffer;
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

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
    return qr_fail(s->error, s->rules->kind, "%s: line %zu, column %zu: found %s, expected %s", s->rules->source, line,
                   column, found, expected);
}

/* ---- the strict pass ----------------------------------------------------------------------------------------------- */

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
    if (good && s->at - start > QR_JSON_NUMBER)
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
    while (s->at < s->length && s->text[s->at] != '"') {
        const unsigned char *c = (const unsigned char *)s->text + s->at;
        const size_t step = utf8_length(c);
        if (step == 0)
            return syntax(s, s->at, "UTF-8");
        if (*c < ' ')
            return syntax(s, s->at, "no control character inside a string");
        if (*c == '\\' && strncmp(s->text + s->at, "\\u0000", 6) == 0)
            return syntax(s, s->at, "no NUL inside a string");
        /* Step over an escaped quote or backslash; nothing else that an escape holds can end the string. */
        s->at += *c == '\\' && (c[1] == '"' || c[1] == '\\') ? 2 : step;
    }
    if (s->at >= s->length)
        return syntax(s, start, "a string that ends");
    s->at++;
    return 0;
}

static int scan_text(scan *s)
{
    int64_t items[QR_JSON_DEPTH + 1] = {0}; /* of each open array */
    bool array[QR_JSON_DEPTH + 1] = {false};
    int depth = 0;

    if (s->length > s->rules->bytes)
        return qr_fail(s->error, s->rules->kind, "%s: found %zu bytes, expected at most %zu", s->rules->source,
                       s->length, s->rules->bytes);
    if (strncmp(s->text, "\xEF\xBB\xBF", 3) == 0)
        return qr_fail(s->error, s->rules->kind, "%s: found a byte order mark, expected plain UTF-8", s->rules->source);
    while (s->at < s->length) {
        const char c = s->text[s->at];
        if (c == '"') {
            QR_TRY(scan_string(s));
        } else if (c == '-' || digit(s)) {
            QR_TRY(scan_number(s));
        } else if (c >= 'A' && c <= 'z' && c != '[' && c != ']') {
            QR_TRY(scan_word(s));
        } else if (c == '{' || c == '[') {
            if (++depth > s->rules->depth || depth > QR_JSON_DEPTH)
                QR_TRY(syntax(s, s->at, "less nesting"));
            array[depth] = c == '[';
            items[depth] = 1;
            s->at++;
        } else if (c == '}' || c == ']') {
            depth -= depth > 0; /* whether brackets match is the parser's business */
            s->at++;
        } else if (c != '\0' && strchr(":, \t\r\n", c) != NULL) {
            if (c == ',' && array[depth] && ++items[depth] > s->rules->items && s->rules->items > 0)
                QR_TRY(syntax(s, s->at, "a shorter list"));
            s->at++;
        } else {
            QR_TRY(syntax(s, s->at, "a JSON value"));
        }
    }
    return 0;
done:
    return -1;
}

/* ---- repeated keys ------------------------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Two values under one name: readers differ in which one they take, so neither is right. */
static int check_keys(const scan *s, const cJSON *object, const char *where)
{
    enum { FEW = 8 }; /* most objects of a long file are small */
    const char *few[FEW], **names = few;
    const cJSON *child;
    size_t count = 0, i = 0;
    char place[64], name[64];
    int rc = -1;

    cJSON_ArrayForEach(child, object) count++;
    if (count > FEW)
        names = malloc(count * sizeof *names);
    if (names == NULL)
        return qr_fail(s->error, QR_NO_MEMORY, "%s: out of memory", s->rules->source);
    cJSON_ArrayForEach(child, object) names[i++] = child->string;
    qsort(names, count, sizeof *names, by_name);
    for (i = 1; i < count; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            QR_TRY(qr_fail(s->error, s->rules->kind, "%s: %s: found the key \"%s\" twice, expected it once",
                           s->rules->source, qr_shown(where, place, sizeof place),
                           qr_shown(names[i], name, sizeof name)));
    rc = 0;
done:
    if (names != few)
        free(names);
    return rc;
}

static int check_repeats(const scan *s, const cJSON *node, const char *where)
{
    const cJSON *child;

    if (cJSON_IsObject(node) && check_keys(s, node, where) < 0)
        return -1;
    cJSON_ArrayForEach(child, node)
    {
        if ((cJSON_IsObject(child) || cJSON_IsArray(child)) &&
            check_repeats(s, child, child->string != NULL ? child->string : where) < 0)
            return -1;
    }
    return 0;
}

int qr_json_parse(const char *text, size_t length, const qr_json_rules *rules, cJSON **out, qr_error *error)
{
    scan s = {.text = text, .length = length, .rules = rules, .error = error};
    const char *end = text;
    cJSON *root = NULL;

    *out = NULL;
    QR_TRY(scan_text(&s));
    root = cJSON_ParseWithLengthOpts(text, length + 1, &end, true);
    if (root == NULL)
        QR_TRY(syntax(&s, (size_t)(end - text), "well-formed JSON"));
    if (!cJSON_IsObject(root))
        QR_TRY(
            qr_fail(error, rules->kind, "%s: found JSON that is no object, expected an object of keys", rules->source));
    QR_TRY(check_repeats(&s, root, "top level"));
    *out = root;
    return 0;
done:
    cJSON_Delete(root);
    return -1;
}
