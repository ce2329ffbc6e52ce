/* Typed reading of JSON values: exact integers, finite numbers, words from a list, and faults that name the key. */
#include "config_reader.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Integers are exact in a double up to here; beyond, the file's digits are already lost. */
static const double EXACT = 9007199254740992.0;

const cJSON *qr_get(const qr_place *place, const char *key)
{
    return place->object != NULL ? cJSON_GetObjectItemCaseSensitive(place->object, key) : NULL;
}

const cJSON *qr_get_set(const qr_place *place, const char *key)
{
    const cJSON *item = qr_get(place, key);
    return item != NULL && cJSON_IsNull(item) ? NULL : item;
}

/* ---- faults --------------------------------------------------------------------------------------------------- */

static void describe_number(double value, char *out, size_t size)
{
    if (!isfinite(value))
        (void)snprintf(out, size, "a number beyond float64");
    else if (value == floor(value) && fabs(value) < EXACT)
        (void)snprintf(out, size, "%.0f", value);
    else {
        (void)snprintf(out, size, "%.15g", value);
        if (strtod(out, NULL) != value)
            (void)snprintf(out, size, "%.17g", value);
    }
}

static void describe(const cJSON *item, char *out, size_t size)
{
    char word[48];
    if (cJSON_IsNumber(item)) {
        describe_number(item->valuedouble, out, size);
    } else if (cJSON_IsString(item)) {
        (void)snprintf(out, size, "\"%s\"", qr_shown(item->valuestring, word, sizeof word));
    } else if (cJSON_IsArray(item)) {
        const cJSON *child;
        size_t n = (size_t)snprintf(out, size, "[");
        cJSON_ArrayForEach(child, item)
        {
            if (!cJSON_IsNumber(child) || n + 40 > size) {
                (void)snprintf(out, size, "a list of %d", cJSON_GetArraySize(item));
                return;
            }
            describe_number(child->valuedouble, word, sizeof word);
            n += (size_t)snprintf(out + n, size - n, "%s%s", child == item->child ? "" : ", ", word);
        }
        (void)snprintf(out + n, size - n, "]");
    } else {
        (void)snprintf(out, size, "%s",
                       cJSON_IsObject(item)  ? "an object"
                       : cJSON_IsTrue(item)  ? "true"
                       : cJSON_IsFalse(item) ? "false"
                       : cJSON_IsNull(item)  ? "null"
                                             : "nothing");
    }
}

/* Room for the next fault, with "path.key: " in it; NULL when enough are shown. Advances the count. */
static char *next_fault(const qr_place *place, const char *key, size_t *used)
{
    qr_reader *reader = place->reader;
    char *text = NULL;
    char name[64];

    if (reader->faults < QR_FAULTS_SHOWN) {
        text = reader->fault[reader->faults];
        *used = (size_t)snprintf(text, QR_FAULT_SIZE, "%s%s: ", place->path, qr_shown(key, name, sizeof name));
    }
    reader->faults++;
    return text;
}

void qr_config_fault(const qr_place *place, const char *key, const cJSON *found, const char *format, ...)
{
    size_t used = 0;
    char value[96];
    char *text = next_fault(place, key, &used);
    va_list args;

    if (text == NULL)
        return;
    if (found != NULL)
        describe(found, value, sizeof value);
    else
        (void)snprintf(value, sizeof value, "nothing");
    used += (size_t)snprintf(text + used, QR_FAULT_SIZE - used, "found %s, expected ", value);
    va_start(args, format);
    (void)vsnprintf(text + used, QR_FAULT_SIZE - used, format, args);
    va_end(args);
}

void qr_fault_text(const qr_place *place, const char *key, const char *format, ...)
{
    size_t used = 0;
    char *text = next_fault(place, key, &used);
    va_list args;

    if (text == NULL)
        return;
    va_start(args, format);
    (void)vsnprintf(text + used, QR_FAULT_SIZE - used, format, args);
    va_end(args);
}

/* ---- lists of names --------------------------------------------------------------------------------------------- */

static void note(const qr_place *place, qr_names *names, const char *key)
{
    const size_t size = strlen(place->path) + strlen(key) + 1;
    char *text = NULL;

    if (names->count == names->capacity) {
        const size_t capacity = names->capacity == 0 ? 16 : 2 * names->capacity;
        char **grown = realloc(names->item, capacity * sizeof *grown);
        if (grown == NULL)
            goto done;
        names->item = grown;
        names->capacity = capacity;
    }
    text = malloc(size);
    if (text == NULL)
        goto done;
    (void)snprintf(text, size, "%s%s", place->path, key);
    names->item[names->count++] = text;
done:
    if (text == NULL)
        place->reader->out_of_memory = true;
}

void qr_note_default(const qr_place *place, const char *key)
{
    note(place, &place->reader->config->defaults, key);
}

void qr_note_unknown(const qr_place *place, const char *key)
{
    note(place, &place->reader->config->unknown, key);
}

/* ---- values ------------------------------------------------------------------------------------------------------- */

bool qr_read_integer(const qr_place *place, const char *key, const cJSON *item, int64_t least, int64_t *out)
{
    const double value = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (!(value >= (double)least && value < EXACT && value == floor(value))) {
        qr_config_fault(place, key, item, least > 0 ? "a positive integer" : "an integer of 0 or more");
        return false;
    }
    *out = (int64_t)value;
    return true;
}

bool qr_read_number(const qr_place *place, const char *key, const cJSON *item, bool zero, double *out)
{
    const double value = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (!isfinite(value) || value < 0 || (value == 0 && !zero)) {
        qr_config_fault(place, key, item, zero ? "a finite number of 0 or more" : "a positive finite number");
        return false;
    }
    *out = value;
    return true;
}

bool qr_read_flag(const qr_place *place, const char *key, const cJSON *item, bool *out)
{
    if (!cJSON_IsBool(item)) {
        qr_config_fault(place, key, item, "true or false");
        return false;
    }
    *out = cJSON_IsTrue(item);
    return true;
}

/* Copy the word of "a|b|c" that `text` is (or, for NULL, the first). */
static bool choose(const char *values, const char *text, qr_word out)
{
    for (const char *word = values; *word != '\0';) {
        const size_t n = strcspn(word, "|");
        if (text == NULL || (strlen(text) == n && strncmp(word, text, n) == 0)) {
            (void)snprintf(out, sizeof(qr_word), "%.*s", (int)n, word);
            return true;
        }
        word += n + (word[n] == '|');
    }
    return false;
}

static void read_word(const qr_place *place, const qr_key *key, const cJSON *item, qr_word out)
{
    if (cJSON_IsString(item) && choose(key->values, item->valuestring, out))
        return;
    const char *bar = strchr(key->values, '|');
    if (bar != NULL)
        qr_config_fault(place, key->name, item, "%.*s or %s", (int)(bar - key->values), key->values, bar + 1);
    else
        qr_config_fault(place, key->name, item, "%s", key->values);
}

static void read_fixed(const qr_place *place, const qr_key *key, const cJSON *item, bool *out)
{
    bool value = *out;
    if (qr_read_flag(place, key->name, item, &value) && value != *out)
        qr_config_fault(place, key->name, item, "%s: the other form is not supported", *out ? "true" : "false");
}

static void take_default(const qr_key *key, void *field)
{
    switch (key->type) {
    case QR_KEY_SIZE:
    case QR_KEY_COUNT:
        *(int64_t *)field = (int64_t)key->value;
        break;
    case QR_KEY_REAL:
    case QR_KEY_REAL0:
        *(double *)field = key->value;
        break;
    case QR_KEY_BOOL:
    case QR_KEY_FIXED:
        *(bool *)field = key->value != 0;
        break;
    case QR_KEY_NAME:
        (void)choose(key->values, NULL, field);
        break;
    }
}

void qr_read_keys(const qr_place *place, const qr_key *keys, void *base)
{
    for (const qr_key *key = keys; key->name != NULL; key++) {
        void *field = (char *)base + key->offset;
        const cJSON *item = qr_get(place, key->name);

        take_default(key, field);
        if (item == NULL) {
            if (key->reported)
                qr_note_default(place, key->name);
            continue;
        }
        switch (key->type) {
        case QR_KEY_SIZE:
            (void)qr_read_integer(place, key->name, item, 1, field);
            break;
        case QR_KEY_COUNT:
            (void)qr_read_integer(place, key->name, item, 0, field);
            break;
        case QR_KEY_REAL:
            (void)qr_read_number(place, key->name, item, false, field);
            break;
        case QR_KEY_REAL0:
            (void)qr_read_number(place, key->name, item, true, field);
            break;
        case QR_KEY_BOOL:
            (void)qr_read_flag(place, key->name, item, field);
            break;
        case QR_KEY_FIXED:
            read_fixed(place, key, item, field);
            break;
        case QR_KEY_NAME:
            read_word(place, key, item, field);
            break;
        }
    }
}
