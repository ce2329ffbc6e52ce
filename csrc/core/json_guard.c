/* One pass over a JSON text for what cJSON accepts or hides: NUL, bad UTF-8, control characters, depth, long arrays. */
#include "json_guard.h"

#include <string.h>

#define BAD(...) qr_fail(error, QR_BAD_CHECKPOINT, __VA_ARGS__)

/* Bytes of the well-formed UTF-8 sequence at `s` (Unicode, table 3-7), or 0. */
static size_t utf8_length(const unsigned char *s, size_t left)
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
    if (n == 0 || n > left)
        return 0;
    if (s[0] == 0xE0)
        low = 0xA0; /* shorter forms exist */
    else if (s[0] == 0xED)
        high = 0x9F; /* surrogates */
    else if (s[0] == 0xF0)
        low = 0x90;
    else if (s[0] == 0xF4)
        high = 0x8F; /* beyond U+10FFFF */
    if (s[1] < low || s[1] > high)
        return 0;
    for (size_t i = 2; i < n; i++)
        if (s[i] < 0x80 || s[i] > 0xBF)
            return 0;
    return n;
}

int qr_json_guard(const char *text, size_t length, qr_json_limits limits, const char *where, qr_error *error)
{
    const unsigned char *s = (const unsigned char *)text;
    bool in_string = false;
    int64_t items[QR_GUARD_DEPTH + 1] = {0}; /* of each open array; unused by objects */
    bool array[QR_GUARD_DEPTH + 1] = {false};
    int depth = 0;
    size_t first = 0;

    while (first < length && (s[first] == ' ' || s[first] == '\t' || s[first] == '\n' || s[first] == '\r'))
        first++;
    if (first == length || s[first] != '{')
        return BAD("%s is not a JSON object", where);

    for (size_t i = first, step; i < length; i += step) {
        const unsigned char c = s[i];
        step = utf8_length(s + i, length - i);
        if (step == 0)
            return BAD("%s is not UTF-8 (byte %zu)", where, i);
        if (c == 0)
            return BAD("%s holds a NUL character (byte %zu)", where, i);
        if (in_string) {
            if (c < 0x20)
                return BAD("%s is not JSON: raw control character in a string (byte %zu)", where, i);
            if (c == '\\') {
                if (length - i >= 6 && memcmp(s + i, "\\u0000", 6) == 0)
                    return BAD("%s holds a NUL character (byte %zu)", where, i);
                /* Step over an escaped quote or backslash; nothing else an escape holds can end the string. */
                if (i + 1 < length && (s[i + 1] == '"' || s[i + 1] == '\\'))
                    step = 2;
            } else if (c == '"') {
                in_string = false;
            }
            continue;
        }
        if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            if (++depth > limits.depth || depth > QR_GUARD_DEPTH)
                return BAD("%s is nested deeper than %d levels (byte %zu)", where, limits.depth, i);
            items[depth] = 1;
            array[depth] = c == '[';
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--; /* whether brackets match is the parser's business */
        } else if (c == ',' && array[depth] && ++items[depth] > limits.items && limits.items > 0) {
            return BAD("%s holds a list of more than %lld items (byte %zu)", where, (long long)limits.items, i);
        }
    }
    return 0;
}

const char *qr_shown(const char *name, char buffer[QR_SHOWN_SIZE])
{
    const size_t room = QR_SHOWN_SIZE - 4; /* "..." and the end */
    size_t n = strlen(name);
    bool cut = false;

    if (n > room) {
        cut = true;
        n = room;
        while (n > 0 && ((unsigned char)name[n] & 0xC0) == 0x80)
            n--;
    }
    for (size_t i = 0; i < n; i++)
        buffer[i] = (unsigned char)name[i] < 0x20 || name[i] == 0x7F ? '?' : name[i];
    memcpy(buffer + n, cut ? "..." : "", cut ? 4 : 1);
    return buffer;
}
