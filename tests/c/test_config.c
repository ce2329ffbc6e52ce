/* core/config.c and core/json_text.c: what is read, what is refused, and that no text whatever breaks the reader. */
#include "check.h"

#include "../../csrc/core/config.h"

#include <stdlib.h>

static const char *const SMALL =
    "{\"model_type\": \"qwen3_5\", \"architectures\": [\"Qwen3_5ForConditionalGeneration\"],\n"
    " \"text_config\": {\"model_type\": \"qwen3_5_text\", \"vocab_size\": 512, \"hidden_size\": 32, "
    "\"num_hidden_layers\": 3,\n"
    "  \"layer_types\": [\"full_attention\", \"linear_attention\", \"full_attention\"], \"head_dim\": 16,\n"
    "  \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 1e7, \"partial_rotary_factor\": 0.5,\n"
    "   \"mrope_section\": [2, 1, 1], \"mrope_interleaved\": true}, \"eos_token_id\": [1, 2], \"odd\": "
    "\"\\u00e9\\n\"},\n"
    " \"vision_config\": {\"depth\": 2, \"hidden_size\": 64, \"num_heads\": 4, \"out_hidden_size\": 32,\n"
    "  \"num_position_embeddings\": 16}, \"image_token_id\": 500, \"video_token_id\": 501,\n"
    " \"vision_start_token_id\": 502, \"vision_end_token_id\": 503, \"tie_word_embeddings\": true}";

/* Parse a copy that ends exactly where its 0 is, so that a sanitizer sees any read beyond. */
static int parse(const char *text, size_t length, qr_config *config, qr_error *error)
{
    char *copy = malloc(length + 1);
    if (copy == NULL)
        abort();
    memcpy(copy, text, length);
    copy[length] = '\0';
    const int rc = qr_config_parse(copy, length, "config.json", config, error);
    free(copy);
    return rc;
}

static void check_fault(const char *text, const char *message)
{
    qr_config config;
    qr_error error = {0};
    CHECK_INT(parse(text, strlen(text), &config, &error), -1);
    CHECK_INT(error.kind, QR_BAD_CONFIG);
    CHECK_TEXT(error.text, message);
}

TEST(composite_file_is_read_whole)
{
    qr_config config;
    qr_error error = {0};

    CHECK_INT(parse(SMALL, strlen(SMALL), &config, &error), 0);
    CHECK_TEXT(error.text, "");
    CHECK(config.composite && config.has_vision && config.tie_word_embeddings);
    CHECK_INT(config.text.vocab_size, 512);
    CHECK_INT(config.text.intermediate_size, 12288); /* the class default */
    CHECK_INT(config.text.full_attention_layers, 2);
    CHECK(config.text.full_attention[0] && !config.text.full_attention[1] && config.text.full_attention[2]);
    CHECK_INT(config.text.full_attention_interval, 0);
    CHECK_INT(config.text.rotary_dim, 8);
    CHECK_NEAR(config.text.rope_theta, 1e7, 0);
    CHECK_INT(config.text.conv_dim, 2 * 16 * 128 + 32 * 128);
    CHECK_TEXT(config.text.hidden_act, "silu");
    CHECK_INT(config.vision.head_dim, 16);
    CHECK_INT(config.vision.grid_side, 4);
    CHECK_INT(config.image_token_id, 500);
    CHECK_INT(config.unknown.count, 1);
    CHECK_TEXT(config.unknown.item[0], "text_config.odd");
    CHECK_INT(config.tie_root, QR_FLAG_TRUE);
    CHECK_INT(config.tie_text, QR_FLAG_ABSENT);
    qr_config_clear(&config);
}

TEST(axes_of_frequencies_follow_the_interleaving)
{
    const int64_t usual[3] = {11, 11, 10}, plain[3] = {8, 0, 0};
    int64_t count[3] = {0, 0, 0};

    for (int64_t f = 0; f < 32; f++) {
        CHECK_INT(qr_rope_axis(plain, f), 0);
        count[qr_rope_axis(usual, f)]++;
    }
    CHECK_INT(qr_rope_axis(usual, 0), 0);
    CHECK_INT(qr_rope_axis(usual, 1), 1);
    CHECK_INT(qr_rope_axis(usual, 2), 2);
    CHECK_INT(qr_rope_axis(usual, 31), 1); /* 31 % 3 == 1 and 31 < 33 */
    CHECK_INT(count[0], 11);
    CHECK_INT(count[1], 11);
    CHECK_INT(count[2], 10);
}

TEST(faults_of_one_file_come_together_and_are_counted)
{
    check_fault(
        "{\"model_type\": \"qwen3_5_text\", \"hidden_size\": 0, \"rms_norm_eps\": -1, \"hidden_act\": \"relu\"}",
        "config.json: 3 faults\n"
        "    hidden_size: found 0, expected a positive integer\n"
        "    hidden_act: found \"relu\", expected silu or swish\n"
        "    rms_norm_eps: found -1, expected a positive finite number");
    check_fault("{\"model_type\": \"qwen3_5_text\", \"vocab_size\": 0, \"hidden_size\": 0, \"intermediate_size\": 0,"
                " \"num_hidden_layers\": 0, \"num_attention_heads\": 0, \"num_key_value_heads\": 0, \"head_dim\": 0}",
                "config.json: 7 faults\n"
                "    vocab_size: found 0, expected a positive integer\n"
                "    hidden_size: found 0, expected a positive integer\n"
                "    intermediate_size: found 0, expected a positive integer\n"
                "    num_hidden_layers: found 0, expected a positive integer\n"
                "    num_attention_heads: found 0, expected a positive integer\n"
                "    ... and 2 more");
}

TEST(text_that_is_not_json_is_told_by_line_and_column)
{
    check_fault("", "config.json: line 1, column 1: found the end of the text, expected well-formed JSON");
    check_fault("{\"a\": 1}\n x", "config.json: line 2, column 2: found x, expected a JSON value");
    check_fault("{\"a\": 1} {}", "config.json: line 1, column 10: found {}, expected well-formed JSON");
    check_fault("{\n  \"\xC3\xA9\": NaN}", "config.json: line 2, column 8: found NaN}, expected a JSON value");
    check_fault("{\"a\": -Infinity}", "config.json: line 1, column 7: found -Infinity}, expected a JSON number");
    check_fault("{\"a\": 01}", "config.json: line 1, column 7: found 01}, expected a JSON number");
    check_fault("{\"a\": 1.}", "config.json: line 1, column 7: found 1.}, expected a JSON number");
    check_fault("{\"a\": \"\\u0000\"}",
                "config.json: line 1, column 8: found \\u0000\"}, expected no NUL inside a string");
    check_fault("{\"a\": \"b\tc\"}",
                "config.json: line 1, column 9: found ?c\"}, expected no control character inside a string");
    check_fault("{\"a\": \"b", "config.json: line 1, column 7: found \"b, expected a string that ends");
    check_fault("{\"a\": {\"b\": 1, \"b\": 2}}", "config.json: a: found the key \"b\" twice, expected it once");
    check_fault("{\"b\": 1, \"c\": 1, \"b\": 1}",
                "config.json: top level: found the key \"b\" twice, expected it once");
    check_fault("\xEF\xBB\xBF{}", "config.json: found a byte order mark, expected plain UTF-8");
    check_fault("[1]", "config.json: found JSON that is no object, expected an object of keys");
}

TEST(nesting_is_bounded_before_anything_recurses)
{
    enum { DEEP = 200000 };
    char *text = malloc(DEEP + 1);
    qr_config config;
    qr_error error = {0};

    if (text == NULL)
        abort();
    memset(text, '[', DEEP);
    text[DEEP] = '\0';
    CHECK_INT(parse(text, DEEP, &config, &error), -1);
    CHECK_HAS(error.text, "config.json: line 1, column 65: found [[[");
    CHECK_HAS(error.text, "expected less nesting");
    free(text);
}

TEST(a_nul_byte_does_not_end_the_text_quietly)
{
    qr_config config;
    qr_error error = {0};
    CHECK_INT(parse("{}\0{}", 5, &config, &error), -1);
    CHECK_TEXT(error.text, "config.json: line 1, column 3: found ?{}, expected a JSON value");
}

TEST(every_truncation_is_one_clean_fault)
{
    for (size_t length = 0; length < strlen(SMALL); length++) {
        qr_config config;
        qr_error error = {0};
        CHECK_INT(parse(SMALL, length, &config, &error), -1);
        CHECK_INT(error.kind, QR_BAD_CONFIG);
        CHECK(strncmp(error.text, "config.json: line ", 18) == 0);
        CHECK(config.text.full_attention == NULL && config.defaults.item == NULL);
    }
}

/* Numerical Recipes' 32-bit generator: any will do, the seed being fixed. */
static unsigned next_random(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

TEST(random_edits_are_read_or_refused_but_never_break)
{
    static const char likely[] = "\"{}[]:,\\0123456789-+.eE truefalsn\n\x01\xFF";
    const size_t length = strlen(SMALL);
    char *text = malloc(length + 1);
    unsigned state = 20261202;
    int read = 0, refused = 0;

    if (text == NULL)
        abort();
    for (int round = 0; round < 30000; round++) {
        qr_config config;
        qr_error error = {0};
        char page[2048];

        memcpy(text, SMALL, length + 1);
        for (unsigned edits = 1 + next_random(&state) % 4; edits > 0; edits--)
            text[next_random(&state) % length] = likely[next_random(&state) % (sizeof likely - 1)];
        if (parse(text, length, &config, &error) == 0) {
            CHECK(error.kind == QR_OK && config.text.full_attention != NULL);
            qr_config_describe(&config, QR_PART_ROOT, "config.json", page, sizeof page);
            qr_config_clear(&config);
            read++;
        } else {
            CHECK(error.kind == QR_BAD_CONFIG || error.kind == QR_NOT_CAPABLE);
            CHECK(strncmp(error.text, "config.json: ", 13) == 0);
            for (const char *c = error.text; *c != '\0'; c++)
                CHECK(*c == '\n' || (*c >= ' ' && *c < 127)); /* whatever the file holds, a message is plain text */
            refused++;
        }
    }
    CHECK(read > 100 && refused > 10000); /* both ways were taken */
    free(text);
}

TEST(description_fits_any_buffer)
{
    qr_config config;
    qr_error error = {0};
    char page[600];

    CHECK_INT(parse(SMALL, strlen(SMALL), &config, &error), 0);
    for (size_t size = 1; size <= sizeof page; size++) {
        memset(page, 'x', sizeof page);
        qr_config_describe(&config, QR_PART_ROOT, "config.json", page, size);
        CHECK(memchr(page, '\0', size) != NULL);
    }
    CHECK_HAS(page, "Config of config.json: qwen3_5, Qwen3_5ForConditionalGeneration\n");
    CHECK_HAS(page, "1 linear_attention + 2 full_attention");
    qr_config_clear(&config);
}

RUN_TESTS()
