/* Rotary keys of config.json: three places they are written in, one result, and the checks on the M-RoPE sections. */
#include "config_reader.h"

#include <string.h>

static const char *const rope_keys[] = {"rope_parameters",       "rope_scaling",  "rope_theta",
                                        "partial_rotary_factor", "mrope_section", "mrope_interleaved"};
/* What a rope object may hold: all of these for text, the first three for vision. */
static const char *const parameter_keys[] = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"};
enum { VISION_PARAMETERS = 3, TEXT_PARAMETERS = 6 };

static bool listed(const char *key, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(key, names[i]) == 0)
            return true;
    }
    return false;
}

bool qr_is_rope_key(const char *key)
{
    return listed(key, rope_keys, sizeof rope_keys / sizeof *rope_keys);
}

int qr_rope_axis(const int64_t section[3], int64_t f)
{
    const int axis = (int)(f % 3);
    return axis != 0 && f < 3 * section[axis] ? axis : 0;
}

/* An object under `key`; NULL when it is absent or null. */
static const cJSON *get_object(const qr_place *place, const char *key)
{
    const cJSON *item = qr_get_set(place, key);
    if (item != NULL && !cJSON_IsObject(item)) {
        qr_config_fault(place, key, item, "an object");
        return NULL;
    }
    return item;
}

/* Both spellings count: a file that carries two must mean something we run by both. */
static void check_type(const qr_place *rope, const char *const *words)
{
    static const char *const spellings[] = {"rope_type", "type"};
    for (size_t i = 0; i < 2; i++) {
        const cJSON *item = qr_get(rope, spellings[i]);
        const char *const *word = words;
        if (item == NULL)
            continue;
        while (*word != NULL && !(cJSON_IsString(item) && strcmp(item->valuestring, *word) == 0))
            word++;
        if (*word == NULL)
            qr_config_fault(rope, spellings[i], item, "%s or %s", words[0], words[1]);
    }
}

static void note_unknown_parameters(const qr_place *rope, size_t known)
{
    const cJSON *child;
    cJSON_ArrayForEach(child, rope->object)
    {
        if (cJSON_IsObject(child))
            qr_config_fault(rope, child->string, child, "one set of rope parameters for all layers");
        else if (!listed(child->string, parameter_keys, known))
            qr_note_unknown(rope, child->string);
    }
}

/* A number of the rope object, else of the section around it, else the default. */
static void read_either(const qr_place *rope, const qr_place *section, const char *key, double fallback, double *out)
{
    const cJSON *inner = qr_get(rope, key), *outer = qr_get(section, key);

    *out = fallback;
    if (outer != NULL)
        (void)qr_read_number(section, key, outer, false, out);
    if (inner != NULL)
        (void)qr_read_number(rope, key, inner, false, out);
    if (inner == NULL && outer == NULL)
        qr_note_default(rope, key);
}

/* These keys mean something inside the rope object only; beside it they may stand as a copy. */
static void check_misplaced(const qr_place *rope, const qr_place *section, const char *key)
{
    const cJSON *outer = qr_get(section, key), *inner = qr_get(rope, key);
    if (outer != NULL && (inner == NULL || !cJSON_Compare(outer, inner, true)))
        qr_config_fault(section, key, outer, "it inside rope_parameters");
}

static bool read_section(const qr_place *rope, const cJSON *item, int64_t section[3])
{
    const cJSON *child;
    int n = 0;

    if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) != 3) {
        qr_config_fault(rope, "mrope_section", item, "a list of 3 counts");
        return false;
    }
    cJSON_ArrayForEach(child, item)
    {
        if (!qr_read_integer(rope, "mrope_section", child, 0, &section[n++]))
            return false;
    }
    return true;
}

/* The interleaving hands out frequencies in turn; only some sections come out as they are written. */
static void check_section(const qr_place *rope, const cJSON *item, const qr_text_config *text)
{
    const int64_t *section = text->mrope_section, frequencies = text->rotary_dim / 2;
    int64_t given[3];

    /* Each entry alone first, so that the sum of three cannot overflow. */
    for (int i = 0; i < 3; i++) {
        if (section[i] > frequencies) {
            qr_config_fault(rope, "mrope_section", item, "counts that add up to %lld", (long long)frequencies);
            return;
        }
    }
    if (section[0] + section[1] + section[2] != frequencies) {
        qr_config_fault(rope, "mrope_section", item, "counts that add up to %lld", (long long)frequencies);
        return;
    }
    /* Axis 1 may take f = 1, 4, 7, ... and axis 2 f = 2, 5, 8, ..., each its section's count of them at most. */
    given[1] = section[1] < (frequencies + 1) / 3 ? section[1] : (frequencies + 1) / 3;
    given[2] = section[2] < frequencies / 3 ? section[2] : frequencies / 3;
    given[0] = frequencies - given[1] - given[2];
    if (memcmp(given, section, sizeof given) != 0)
        qr_config_fault(rope, "mrope_section", item, "counts the interleaving can give: it gives [%lld, %lld, %lld]",
                        (long long)given[0], (long long)given[1], (long long)given[2]);
}

static void read_width(const qr_place *rope, qr_text_config *text)
{
    const double width = (double)text->head_dim * text->partial_rotary_factor;

    text->rotary_dim = width <= (double)text->head_dim ? (int64_t)width : text->head_dim + 1;
    if (text->rotary_dim < 2 || text->rotary_dim % 2 != 0 || text->rotary_dim > text->head_dim)
        qr_fault_text(rope, "partial_rotary_factor",
                      "found %.15g, expected head_dim %lld times it to be an even width from 2 to head_dim",
                      text->partial_rotary_factor, (long long)text->head_dim);
}

void qr_read_rope(const qr_place *place, qr_text_config *text)
{
    static const char *const types[] = {"default", "mrope", NULL};
    const cJSON *parameters = get_object(place, "rope_parameters"), *scaling = get_object(place, "rope_scaling");
    const bool scaled = scaling != NULL && scaling->child != NULL; /* an empty one replaces nothing */
    const cJSON *item;
    bool interleaved = true;
    char path[64];

    (void)snprintf(path, sizeof path, "%s%s.", place->path, scaled ? "rope_scaling" : "rope_parameters");
    const qr_place rope = {place->reader, scaled ? scaling : parameters, path};

    check_type(&rope, types);
    note_unknown_parameters(&rope, TEXT_PARAMETERS);
    read_either(&rope, place, "rope_theta", 10000.0, &text->rope_theta);
    read_either(&rope, place, "partial_rotary_factor", 0.25, &text->partial_rotary_factor);
    check_misplaced(&rope, place, "mrope_section");
    check_misplaced(&rope, place, "mrope_interleaved");
    item = qr_get(&rope, "mrope_interleaved");
    if (item != NULL && qr_read_flag(&rope, "mrope_interleaved", item, &interleaved) && !interleaved)
        qr_config_fault(&rope, "mrope_interleaved", item, "true: sections in blocks are not supported");
    item = qr_get_set(&rope, "mrope_section");
    if (item != NULL && !read_section(&rope, item, text->mrope_section))
        return;
    if (place->reader->faults > 0) /* the checks below need sound numbers */
        return;

    read_width(&rope, text);
    if (place->reader->faults > 0)
        return;
    if (item != NULL) {
        check_section(&rope, item, text);
        return;
    }
    const bool usual = text->rotary_dim == 64;
    text->mrope_section[0] = usual ? 11 : text->rotary_dim / 2;
    text->mrope_section[1] = usual ? 11 : 0;
    text->mrope_section[2] = usual ? 10 : 0;
    qr_note_default(&rope, "mrope_section");
}

void qr_read_vision_rope(const qr_place *place, qr_vision_config *vision)
{
    static const char *const types[] = {"axial", "default", NULL};
    char path[64];

    (void)snprintf(path, sizeof path, "%srope_parameters.", place->path);
    const qr_place rope = {place->reader, get_object(place, "rope_parameters"), path};

    check_type(&rope, types);
    note_unknown_parameters(&rope, VISION_PARAMETERS);
    read_either(&rope, place, "rope_theta", 10000.0, &vision->rope_theta);
}
