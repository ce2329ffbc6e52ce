/* config.json -> qr_config: which keys each section has, and which values of them can be run. */
#include "config.h"

#include "config_reader.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_CONFIG = 16 << 20 }; /* bytes: a thousand times the longest one */

#define ROW(section, type, name, value, values, report)                                                                \
    {#name, QR_KEY_##type, offsetof(section, name), value, values, ROW_##report},
#define ROW_REPORTED true
#define ROW_SILENT false
#define ROOT_ROW(type, name, value, values, report) ROW(qr_config, type, name, value, values, report)
#define TEXT_ROW(type, name, value, values, report) ROW(qr_text_config, type, name, value, values, report)
#define VISION_ROW(type, name, value, values, report) ROW(qr_vision_config, type, name, value, values, report)
#define END_ROW                                                                                                        \
    {                                                                                                                  \
        NULL, QR_KEY_SIZE, 0, 0, NULL, false                                                                           \
    }

const qr_key qr_root_keys[] = {QR_ROOT_KEYS(ROOT_ROW) END_ROW};
const qr_key qr_text_keys[] = {QR_TEXT_KEYS(TEXT_ROW) END_ROW};
const qr_key qr_vision_keys[] = {QR_VISION_KEYS(VISION_ROW) END_ROW};

static const char *const neutral_keys[] = {QR_NEUTRAL_KEYS, NULL};

/* Read by name below, beside the rows of the tables. */
static const char *const composite_keys[] = {"model_type",          "architectures",       "text_config",
                                             "vision_config",       "tie_word_embeddings", "eos_token_id",
                                             "quantization_config", "compression_config",  NULL};
static const char *const text_keys[] = {"model_type",          "architectures",
                                        "tie_word_embeddings", "eos_token_id",
                                        "layer_types",         "full_attention_interval",
                                        "mlp_only_layers",     "quantization_config",
                                        "compression_config",  NULL};
static const char *const vision_keys[] = {"model_type",
                                          "architectures",
                                          "deepstack_visual_indexes",
                                          "rope_parameters",
                                          "quantization_config",
                                          "compression_config",
                                          NULL};

static bool among(const char *key, const char *const *names)
{
    for (; *names != NULL; names++) {
        if (strcmp(key, *names) == 0)
            return true;
    }
    return false;
}

static bool has_row(const char *key, const qr_key *keys)
{
    for (; keys->name != NULL; keys++) {
        if (strcmp(key, keys->name) == 0)
            return true;
    }
    return false;
}

static bool is_text_key(const char *key)
{
    return has_row(key, qr_text_keys) || qr_is_rope_key(key) || strcmp(key, "layer_types") == 0 ||
           strcmp(key, "full_attention_interval") == 0;
}

/* ---- what kind of file this is ------------------------------------------------------------------------------------ */

static int check_quantised(const qr_place *place, qr_error *error)
{
    static const char *const keys[] = {"quantization_config", "compression_config"};
    for (size_t i = 0; i < 2; i++) {
        const cJSON *item = qr_get_set(place, keys[i]);
        const cJSON *method = cJSON_GetObjectItemCaseSensitive(item, "quant_method"); /* accepts NULL */
        char word[48];
        if (item != NULL)
            return qr_fail(error, QR_NOT_CAPABLE,
                           "%s: %s%s: found quant_method \"%s\", expected an unquantised checkpoint\n"
                           "    do       open the bfloat16, float16 or float32 checkpoint this one was made from",
                           place->reader->source, place->path, keys[i],
                           cJSON_IsString(method) ? qr_shown(method->valuestring, word, sizeof word) : "unnamed");
    }
    return 0;
}

static int unknown_model(const qr_place *root, const char *key, const cJSON *item, const char *expected,
                         qr_error *error)
{
    char word[64] = "nothing";
    if (cJSON_IsString(item)) {
        char name[48];
        (void)snprintf(word, sizeof word, "\"%s\"", qr_shown(item->valuestring, name, sizeof name));
    } else if (item != NULL) {
        (void)snprintf(word, sizeof word, "no string");
    }
    return qr_fail(error, QR_BAD_CONFIG,
                   "%s: %s: found %s, expected %s\n"
                   "    do       open a dense Qwen3.5 family checkpoint; mixtures of experts (qwen3_5_moe) and\n"
                   "             qwen3_next are not supported",
                   root->reader->source, key, word, expected);
}

/* model_type and architectures: anything but our two is another architecture, and the rest would be noise. */
static int read_kind(const qr_place *root, qr_config *out, qr_error *error)
{
    static const char *const both = "Qwen3_5ForConditionalGeneration", *const text = "Qwen3_5ForCausalLM";
    const cJSON *type = qr_get(root, "model_type"), *list = qr_get_set(root, "architectures"), *item;
    const char *name = cJSON_IsString(type) ? type->valuestring : "";

    out->composite = strcmp(name, "qwen3_5") == 0;
    if (!out->composite && strcmp(name, "qwen3_5_text") != 0)
        return unknown_model(root, "model_type", type, "qwen3_5 or qwen3_5_text", error);
    if (list != NULL && !cJSON_IsArray(list)) {
        qr_config_fault(root, "architectures", list, "a list of class names");
        return 0;
    }
    cJSON_ArrayForEach(item, list)
    {
        const char *found = cJSON_IsString(item) ? item->valuestring : "";
        if (strcmp(found, text) != 0 && strcmp(found, both) != 0)
            return unknown_model(root, "architectures", item, "Qwen3_5ForConditionalGeneration or Qwen3_5ForCausalLM",
                                 error);
        if (!out->composite && strcmp(found, both) == 0)
            qr_config_fault(root, "architectures", item, "%s for model_type qwen3_5_text", text);
        if (out->architecture[0] == '\0')
            (void)snprintf(out->architecture, sizeof out->architecture, "%s", found);
    }
    return 0;
}

static void check_section_type(const qr_place *place, const char *wanted, const char *older)
{
    const cJSON *type = qr_get_set(place, "model_type");
    if (type != NULL &&
        !(cJSON_IsString(type) && (strcmp(type->valuestring, wanted) == 0 || strcmp(type->valuestring, older) == 0)))
        qr_config_fault(place, "model_type", type, "%s", wanted);
}

static void note_unknown(const qr_place *place, const qr_key *keys, const char *const *names, bool rope)
{
    const cJSON *child;
    cJSON_ArrayForEach(child, place->object)
    {
        const char *key = child->string;
        if (!has_row(key, keys) && !among(key, names) && !among(key, neutral_keys) && !(rope && qr_is_rope_key(key)))
            qr_note_unknown(place, key);
    }
}

/* ---- text section ------------------------------------------------------------------------------------------------- */

static void check_empty(const qr_place *place, const char *key)
{
    const cJSON *item = qr_get_set(place, key);
    if (item != NULL && !(cJSON_IsArray(item) && item->child == NULL))
        qr_config_fault(place, key, item, "an empty list: such layers are not supported");
}

/* Stop ids: none, one, or a list. They stay in the file's form; only their kind is checked here. */
static void check_eos(const qr_place *place)
{
    const cJSON *item = qr_get_set(place, "eos_token_id"), *child;
    int64_t id;
    if (cJSON_IsArray(item)) {
        cJSON_ArrayForEach(child, item)(void) qr_read_integer(place, "eos_token_id", child, 0, &id);
    } else if (item != NULL) {
        (void)qr_read_integer(place, "eos_token_id", item, 0, &id);
    }
}

static void read_tie(const qr_place *place, qr_flag *out)
{
    const cJSON *item = qr_get(place, "tie_word_embeddings");
    bool value = false;
    if (item != NULL && qr_read_flag(place, "tie_word_embeddings", item, &value))
        *out = value ? QR_FLAG_TRUE : QR_FLAG_FALSE;
}

/* An explicit list always wins over the interval, and need not repeat. */
static void read_layer_types(const qr_place *place, qr_text_config *text)
{
    const cJSON *list = qr_get_set(place, "layer_types"), *interval = qr_get(place, "full_attention_interval");
    const cJSON *count = qr_get(place, "num_hidden_layers"), *item;
    int64_t every = list != NULL ? 0 : 4, i = 0;

    if (interval != NULL)
        (void)qr_read_integer(place, "full_attention_interval", interval, 1, &every);
    else if (list == NULL)
        qr_note_default(place, "full_attention_interval");
    text->full_attention_interval = every;
    /* A count that was refused above still holds its default: no list can be measured by it. */
    if (count != NULL && !(cJSON_IsNumber(count) && count->valuedouble == (double)text->num_hidden_layers))
        return;
    if (text->num_hidden_layers > QR_MAX_LAYERS) {
        qr_config_fault(place, "num_hidden_layers", qr_get(place, "num_hidden_layers"), "at most %d", QR_MAX_LAYERS);
        return;
    }
    if (list != NULL && (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != text->num_hidden_layers)) {
        qr_config_fault(place, "layer_types", list, "a list of num_hidden_layers = %lld",
                        (long long)text->num_hidden_layers);
        return;
    }
    text->full_attention = calloc((size_t)text->num_hidden_layers, sizeof *text->full_attention);
    if (text->full_attention == NULL) {
        place->reader->out_of_memory = true;
        return;
    }
    if (list == NULL) {
        for (i = 0; i < text->num_hidden_layers; i++)
            text->full_attention[i] = (i + 1) % every == 0;
    }
    cJSON_ArrayForEach(item, list)
    {
        const char *word = cJSON_IsString(item) ? item->valuestring : "";
        char key[40];
        (void)snprintf(key, sizeof key, "layer_types[%lld]", (long long)i);
        text->full_attention[i] = strcmp(word, "full_attention") == 0;
        if (!text->full_attention[i] && strcmp(word, "linear_attention") != 0)
            qr_config_fault(place, key, item, "linear_attention or full_attention");
        i++;
    }
    for (i = 0; i < text->num_hidden_layers; i++)
        text->full_attention_layers += text->full_attention[i];
}

static void read_text(const qr_place *place, qr_config *out)
{
    qr_read_keys(place, qr_text_keys, &out->text);
    read_layer_types(place, &out->text);
    read_tie(place, &out->tie_text);
    check_eos(place);
    check_empty(place, "mlp_only_layers");
    qr_read_rope(place, &out->text);
    note_unknown(place, qr_text_keys, text_keys, true);
    if (place->reader->faults == 0)
        qr_check_text(place, &out->text);
}

/* ---- vision section ----------------------------------------------------------------------------------------------- */

static void read_vision(const qr_place *place, qr_config *out)
{
    check_section_type(place, "qwen3_5_vision", "qwen3_5");
    qr_read_keys(place, qr_vision_keys, &out->vision);
    check_empty(place, "deepstack_visual_indexes");
    qr_read_vision_rope(place, &out->vision);
    note_unknown(place, qr_vision_keys, vision_keys, false);
    if (place->reader->faults == 0)
        qr_check_vision(place, out);
}

/* ---- the two kinds of file ---------------------------------------------------------------------------------------- */

/* A text key at the root of a composite file is read by nobody; a copy of the section's is harmless. */
static void check_stray(const qr_place *root, const cJSON *text)
{
    const cJSON *child;
    cJSON_ArrayForEach(child, root->object)
    {
        if (is_text_key(child->string) &&
            !cJSON_Compare(child, cJSON_GetObjectItemCaseSensitive(text, child->string), true))
            qr_fault_text(root, child->string, "found at the root, expected it inside text_config");
    }
}

static void note_unknown_root(const qr_place *root)
{
    const cJSON *child;
    cJSON_ArrayForEach(child, root->object)
    {
        const char *key = child->string;
        if (!has_row(key, qr_root_keys) && !among(key, composite_keys) && !among(key, neutral_keys) &&
            !is_text_key(key))
            qr_note_unknown(root, key);
    }
}

static int read_composite(const qr_place *root, qr_config *out, qr_error *error)
{
    const qr_place text = {root->reader, qr_get(root, "text_config"), "text_config."};
    const qr_place vision = {root->reader, qr_get_set(root, "vision_config"), "vision_config."};

    if (!cJSON_IsObject(text.object)) {
        qr_config_fault(root, "text_config", text.object, "an object (a text-only file has model_type qwen3_5_text)");
        return 0;
    }
    if (vision.object != NULL && !cJSON_IsObject(vision.object)) {
        qr_config_fault(root, "vision_config", vision.object, "an object");
        return 0;
    }
    if (check_quantised(&text, error) < 0 || check_quantised(&vision, error) < 0)
        return -1;
    out->has_vision = vision.object != NULL;
    qr_read_keys(root, qr_root_keys, out);
    read_tie(root, &out->tie_root);
    check_eos(root);
    check_stray(root, text.object);
    note_unknown_root(root);
    check_section_type(&text, "qwen3_5_text", "qwen3_5_text");
    read_text(&text, out);
    if (out->has_vision)
        read_vision(&vision, out);
    if (out->has_vision && root->reader->faults == 0)
        qr_check_placeholders(root, out);
    return 0;
}

static int report(const qr_reader *reader, qr_error *error)
{
    char lines[QR_FAULTS_SHOWN * (QR_FAULT_SIZE + 5) + 1] = "";
    size_t used = 0;
    const int shown = reader->faults < QR_FAULTS_SHOWN ? reader->faults : QR_FAULTS_SHOWN;

    if (reader->out_of_memory)
        return qr_fail(error, QR_NO_MEMORY, "%s: out of memory", reader->source);
    if (reader->faults == 0)
        return 0;
    if (reader->faults == 1)
        return qr_fail(error, QR_BAD_CONFIG, "%s: %s", reader->source, reader->fault[0]);
    for (int i = 0; i < shown; i++)
        used += (size_t)snprintf(lines + used, sizeof lines - used, "\n    %s", reader->fault[i]);
    if (reader->faults > shown)
        return qr_fail(error, QR_BAD_CONFIG, "%s: %d faults%s\n    ... and %d more", reader->source, reader->faults,
                       lines, reader->faults - shown);
    return qr_fail(error, QR_BAD_CONFIG, "%s: %d faults%s", reader->source, reader->faults, lines);
}

int qr_config_parse(const char *text, size_t length, const char *source, qr_config *out, qr_error *error)
{
    const qr_json_rules rules = {.source = source, .kind = QR_BAD_CONFIG, .bytes = MAX_CONFIG, .depth = QR_JSON_DEPTH};
    qr_reader reader = {.source = source, .config = out};
    qr_place root = {&reader, NULL, ""};
    cJSON *json = NULL;
    int rc = -1;

    *out = (qr_config){0};
    QR_TRY(qr_json_parse(text, length, &rules, &json, error));
    root.object = json;
    QR_TRY(read_kind(&root, out, error));
    QR_TRY(check_quantised(&root, error));
    if (out->composite)
        QR_TRY(read_composite(&root, out, error));
    else
        read_text(&root, out);
    if (out->tie_root == QR_FLAG_ABSENT && out->tie_text == QR_FLAG_ABSENT)
        qr_note_default(&root, "tie_word_embeddings");
    out->tie_word_embeddings = (out->tie_root != QR_FLAG_ABSENT ? out->tie_root : out->tie_text) == QR_FLAG_TRUE;
    QR_TRY(report(&reader, error));
    rc = 0;
done:
    cJSON_Delete(json);
    if (rc < 0)
        qr_config_clear(out);
    return rc;
}

static void clear_names(qr_names *names)
{
    for (size_t i = 0; i < names->count; i++)
        free(names->item[i]);
    free(names->item);
}

void qr_config_clear(qr_config *config)
{
    free(config->text.full_attention);
    clear_names(&config->defaults);
    clear_names(&config->unknown);
    *config = (qr_config){0};
}
