/* Checkpoint files below Python: the reader at every cut of a header, the guard, the writer, the lists of faults. */
#include "../../csrc/core/checkpoint.h"
#include "../../csrc/core/checkpoint_index.h"
#include "../../csrc/core/near.h"

#include "check.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = P_tmpdir "/qr_safetensors_XXXXXX";
static char path[256];

/* `path` becomes a file of the test's folder. */
static const char *in_folder(const char *name)
{
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void put(const char *name, const void *bytes, size_t size)
{
    FILE *file = fopen(in_folder(name), "wb");
    const size_t written = file != NULL ? fwrite(bytes, 1, size, file) : 0;
    const int closed = file != NULL ? fclose(file) : -1;
    CHECK(written == size && closed == 0);
}

/* A file of `header` and `data` bytes of zeros. */
static size_t compose(unsigned char *out, const char *header, size_t data)
{
    const size_t n = strlen(header);
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)((uint64_t)n >> (8 * i));
    memcpy(out + 8, header, n);
    memset(out + 8 + n, 0, data);
    return 8 + n + data;
}

static int open_header(const char *header, size_t data, qr_shard *shard, qr_error *error)
{
    unsigned char *file = malloc(8 + strlen(header) + data);
    put("m", file, compose(file, header, data));
    free(file);
    *error = (qr_error){0};
    return qr_shard_open(in_folder("m"), "m", shard, error);
}

static const char two[] =
    "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":"
    "[8,20]},\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";

TEST(a_good_file_is_described)
{
    qr_shard shard;
    qr_error error;

    CHECK_INT(open_header(two, 20, &shard, &error), 0);
    CHECK_INT(shard.tensors, 2);
    CHECK_TEXT(shard.tensor[0].name, "a");
    CHECK_TEXT(shard.tensor[1].name, "b");
    CHECK_INT(shard.tensor[1].dtype, QR_FILE_BF16);
    CHECK_INT(shard.tensor[1].ndim, 2);
    CHECK_INT(shard.tensor[1].shape[1], 3);
    CHECK_INT(shard.tensor[1].begin, (long long)(8 + strlen(two) + 8));
    CHECK_INT(shard.pairs, 1);
    CHECK_TEXT(shard.metadata[0].value, "pt");
    qr_shard_close(&shard);
    qr_shard_close(&shard); /* an empty one is fine */
}

/* Cut with the length as it was (a download that stopped) and with the length of what is left (a header that lies). */
TEST(a_file_cut_at_any_byte_is_refused)
{
    unsigned char file[512];
    const size_t size = compose(file, two, 20);

    for (size_t cut = 0; cut < size; cut++) {
        qr_shard shard;
        qr_error error = {0};
        put("m", file, cut);
        CHECK_INT(qr_shard_open(in_folder("m"), "m", &shard, &error), -1);
        CHECK_INT(error.kind, QR_BAD_CHECKPOINT);
        CHECK(shard.map == NULL && shard.tensor == NULL);
    }
    for (size_t n = 0; n < strlen(two); n++) {
        char header[512];
        qr_shard shard;
        qr_error error;
        memcpy(header, two, n);
        header[n] = '\0';
        CHECK_INT(open_header(header, 20, &shard, &error), -1);
        CHECK_INT(error.kind, QR_BAD_CHECKPOINT);
        CHECK(strncmp(error.text, "m: ", 3) == 0);
    }
}

/* One byte replaced by each of its 255 others: an answer every time, and nothing outside the file. */
TEST(any_one_wrong_byte_is_survived)
{
    unsigned char file[512];
    const size_t size = compose(file, two, 20);
    int opened = 0, refused = 0;

    for (size_t at = 0; at < size - 20; at++)
        for (int flip = 1; flip < 256; flip += at < 8 ? 1 : 17) {
            qr_shard shard;
            qr_error error = {0};
            file[at] = (unsigned char)(file[at] ^ flip);
            unlink(in_folder("m"));
            put("m", file, size);
            file[at] = (unsigned char)(file[at] ^ flip);
            if (qr_shard_open(in_folder("m"), "m", &shard, &error) < 0) {
                refused++;
                continue;
            }
            opened++;
            for (int64_t i = 0; i < shard.tensors; i++)
                CHECK(shard.tensor[i].begin >= 8 && shard.tensor[i].begin <= shard.tensor[i].end &&
                      shard.tensor[i].end <= (int64_t)shard.size);
            qr_shard_close(&shard);
        }
    CHECK(opened > 0);
    CHECK(refused > opened);
}

TEST(sizes_of_shapes_neither_wrap_nor_lie)
{
    const int64_t large[] = {INT64_C(1) << 31, INT64_C(1) << 20}, wrap[] = {INT64_C(1) << 32, INT64_C(1) << 32},
                  zero[] = {INT64_MAX, INT64_MAX, 0}, three[] = {3}, negative[] = {0, -1};

    CHECK_INT(qr_tensor_bytes(QR_FILE_F32, 2, large), INT64_C(1) << 53);
    CHECK_INT(qr_tensor_bytes(QR_FILE_F64, 2, large), -1);
    CHECK_INT(qr_tensor_bytes(QR_FILE_U8, 2, wrap), -1);
    CHECK_INT(qr_tensor_bytes(QR_FILE_U64, 3, zero), 0);
    CHECK_INT(qr_tensor_bytes(QR_FILE_BF16, 0, NULL), 2);
    CHECK_INT(qr_tensor_bytes(QR_FILE_F4, 1, three), -1);
    CHECK_INT(qr_tensor_bytes(QR_FILE_F6_E2M3, 1, (const int64_t[]){4}), 3);
    CHECK_INT(qr_tensor_bytes(QR_FILE_U8, 2, negative), -1);
}

static int parse(const char *text, size_t length, qr_error *error)
{
    const qr_json_rules rules = {.source = "x", .kind = QR_BAD_CHECKPOINT, .bytes = 40, .depth = 3, .items = 4};
    char *exact = malloc(length + 1); /* so that a sanitizer sees a read past the end */
    cJSON *tree = NULL;
    memcpy(exact, text, length);
    exact[length] = '\0';
    *error = (qr_error){0};
    const int rc = qr_json_parse(exact, length, &rules, &tree, error);
    CHECK((rc == 0) == (tree != NULL));
    cJSON_Delete(tree);
    free(exact);
    return rc;
}

TEST(what_the_parser_would_hide_is_refused)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"[1]", "x: found JSON that is no object, expected an object of keys"},
        {"{\"\\u0000\":1}", "x: line 1, column 3: found \\u0000\":1}, expected no NUL inside a string"},
        {"{\"\\\\\\u0000\":1}", "x: line 1, column 5: found \\u0000\":1}, expected no NUL inside a string"},
        {"{\"\n\":1}", "x: line 1, column 3: found ?\":1}, expected no control character inside a string"},
        {"{\"\xC3\":1}", "x: line 1, column 3: found ?\":1}, expected UTF-8"},
        {"{\"\xF4\x90\x80\x80\":1}", "x: line 1, column 3: found ????\":1}, expected UTF-8"},
        {"{\"\xE2\x82", "x: line 1, column 3: found ??, expected UTF-8"},
        {"{\"a\":{\"b\":[[", "x: line 1, column 12: found [, expected less nesting"},
        {"{\"a\":[1,2,3,4,5]}", "x: line 1, column 14: found ,5]}, expected a shorter list"},
        {"{\"a\":[[],1,[],3,4,5]}", "x: line 1, column 16: found ,4, expected a shorter list"},
        {"{\"a\":01}", "x: line 1, column 6: found 01}, expected a JSON number"},
        {"{]]]]]]]]", "x: line 1, column 3: found ]]]]]]], expected well-formed JSON"},
        {"{\"\\", "x: line 1, column 2: found \"\\, expected a string that ends"},
        {"{\"a\":[{\"b\":1,\"b\":2}]}", "x: a: found the key \"b\" twice, expected it once"},
        {"{\"0123456789\":0,\"0123456789\":0,\"0\":1,\"1\":2}", "x: found 43 bytes, expected at most 40"},
        {"{\"a\":0,\"b\":0,\"c\":0,\"d\":0,\"e\":0,\"a\":0}",
         "x: top level: found the key \"a\" twice, expected it once"},
    };
    qr_error error;

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_INT(parse(bad[i].text, strlen(bad[i].text), &error), -1);
        CHECK_TEXT(error.text, bad[i].says);
    }
    CHECK_INT(parse("{\"a\0\":1}", 8, &error), -1);
    CHECK_INT(parse("{\"\\\\u0000 \\\"[[[[[[\":[1,2,3,4]}", 30, &error), 0); /* an escaped backslash, then text */
    CHECK_INT(parse(" {\"\xF0\x9F\x98\x80\xED\x9F\xBF\":1} ", 14, &error), 0);
}

TEST(a_key_that_comes_twice_is_found_among_few_and_many)
{
    for (int count = 2; count <= 12; count++) {
        qr_error error = {0};
        char text[96] = "{";
        const qr_json_rules rules = {.source = "x", .kind = QR_BAD_CHECKPOINT, .bytes = sizeof text, .depth = 1};
        cJSON *tree = NULL;
        size_t n = 1;
        for (int i = 0; i < count; i++)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s\"%c\":%d", i > 0 ? "," : "", 'a' + i, i % 2);
        text[n++] = '}';
        CHECK_INT(qr_json_parse(text, n, &rules, &tree, &error), 0);
        cJSON_Delete(tree);
        text[n - 5] = 'a'; /* the last key, once more the first */
        CHECK_INT(qr_json_parse(text, n, &rules, &tree, &error), -1);
        CHECK_TEXT(error.text, "x: top level: found the key \"a\" twice, expected it once");
    }
}

TEST(names_in_messages_are_short_and_whole)
{
    char shown[QR_SHOWN_SIZE], name[400];

    CHECK_TEXT(qr_shown("a\tb\x7F", shown, sizeof shown), "a?b?");
    for (size_t i = 0; i < 130; i++)
        memcpy(name + 3 * i, "\xE2\x82\xAC", 4);
    qr_shown(name, shown, sizeof shown);
    CHECK(strlen(shown) < QR_SHOWN_SIZE);
    CHECK_TEXT(shown + strlen(shown) - 6, "\xE2\x82\xAC...");
}

TEST(faults_are_counted_and_five_are_shown)
{
    qr_faults faults = {0};
    qr_error error = {0};

    CHECK_INT(qr_faults_raise(&faults, "x", "%lld thing%s bad", "do       mend", &error), 0);
    qr_fault(&faults, "%d", 0);
    CHECK_INT(qr_faults_raise(&faults, "x", "%lld thing%s bad", "do       mend", &error), -1);
    CHECK_TEXT(error.text, "x: 1 thing is bad\n    found    0\n    do       mend");
    for (int i = 1; i < 8; i++)
        qr_fault(&faults, "%0500d", i); /* longer than a line may be */
    error = (qr_error){0};
    CHECK_INT(qr_faults_raise(&faults, "x", "%lld thing%s bad", "do       mend", &error), -1);
    CHECK_HAS(error.text, "x: 8 things are bad\n");
    CHECK_HAS(error.text, "and 3 more\n    do       mend");
}

TEST(near_names_survive_other_prefixes_and_typos)
{
    static const char *const names[] = {"model.language_model.layers.3.mlp.up_proj.weight",
                                        "mtp.layers.3.mlp.up_proj.weight", "lm_head.weight", "b", ""};
    static const struct {
        const char *asked, *nearest;
    } row[] = {{"model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"},
               {"lm_haed.weight", "lm_head.weight"},
               {"lm_head", "lm_head.weight"}};
    char longest[5000];

    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        qr_near near = {0};
        for (size_t n = 0; n < sizeof names / sizeof *names; n++)
            qr_near_consider(&near, row[i].asked, names[n]);
        CHECK(near.found > 0);
        CHECK_TEXT(near.found > 0 ? near.name[0] : "", row[i].nearest);
    }
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    qr_near near = {0};
    qr_near_consider(&near, longest, longest);
    memset(longest, '.', 100);
    qr_near_consider(&near, longest, "a");
    qr_near_consider(&near, "a", longest);
    CHECK_INT(near.found, 0);
}

static int files_in_folder(void)
{
    DIR *dir = opendir(folder);
    int count = 0;
    for (struct dirent *item = dir != NULL ? readdir(dir) : NULL; item != NULL; item = readdir(dir))
        count += item->d_name[0] != '.';
    if (dir != NULL)
        closedir(dir);
    return count;
}

TEST(a_file_appears_only_when_it_is_finished)
{
    const float data[] = {1, 2, 3};
    qr_tensor tensor[] = {{.name = "small", .dtype = QR_FILE_U8, .ndim = 1, .shape = {3}},
                          {.name = "large", .dtype = QR_FILE_F32, .ndim = 1, .shape = {3}}};
    const qr_pair pair = {"format", "pt"};
    qr_writer *writer = NULL;
    qr_error error = {0};
    const int before = files_in_folder();

    CHECK_INT(qr_writer_open(in_folder("w"), tensor, 2, &pair, 1, &writer, &error), 0);
    CHECK_TEXT(tensor[0].name, "large");
    CHECK_INT(qr_writer_data(writer, data, 12, &error), 0);
    CHECK(access(in_folder("w"), F_OK) < 0);
    CHECK_INT(qr_writer_data(writer, data, 4, &error), -1); /* 3 are left */
    CHECK_INT(error.kind, QR_INTERNAL);
    qr_writer_abort(writer);
    CHECK_INT(files_in_folder(), before);

    error = (qr_error){0};
    CHECK_INT(qr_writer_open(in_folder("w"), tensor, 2, &pair, 1, &writer, &error), 0);
    CHECK_INT(qr_writer_data(writer, data, 12, &error), 0);
    CHECK_INT(qr_writer_finish(writer, &error), -1); /* incomplete: gone */
    CHECK_INT(files_in_folder(), before);

    error = (qr_error){0};
    CHECK_INT(qr_writer_open(in_folder("w"), tensor, 2, &pair, 1, &writer, &error), 0);
    CHECK_INT(qr_writer_data(writer, data, 12, &error), 0);
    CHECK_INT(qr_writer_data(writer, "abc", 3, &error), 0);
    CHECK_INT(qr_writer_finish(writer, &error), 0);
    CHECK_INT(files_in_folder(), before + 1);

    qr_checkpoint *checkpoint = NULL;
    CHECK_INT(qr_checkpoint_open(in_folder("w"), &checkpoint, &error), 0);
    const qr_tensor *large = qr_checkpoint_find(checkpoint, "large");
    CHECK(large != NULL && memcmp(qr_tensor_data(checkpoint, large), data, sizeof data) == 0);
    CHECK(qr_checkpoint_find(checkpoint, "largf") == NULL);
    CHECK(qr_checkpoint_resident(checkpoint, &error) > 0);
    CHECK_INT(qr_tensor_advise(checkpoint, large, QR_DONT_NEED, &error), 0);
    qr_checkpoint_close(checkpoint);
    qr_checkpoint_close(NULL);
    CHECK_INT(unlink(in_folder("w")), 0);
}

TEST(a_name_given_twice_is_not_written)
{
    qr_tensor tensor[] = {{.name = "a", .dtype = QR_FILE_U8}, {.name = "a", .dtype = QR_FILE_F32}};
    qr_writer *writer = NULL;
    qr_error error = {0};
    const int before = files_in_folder();

    CHECK_INT(qr_writer_open(in_folder("w"), tensor, 2, NULL, 0, &writer, &error), -1);
    CHECK_HAS(error.text, "a: given twice");
    CHECK(writer == NULL);
    CHECK_INT(files_in_folder(), before);
}

__attribute__((constructor)) static void make_folder(void)
{
    if (mkdtemp(folder) == NULL)
        abort();
}

__attribute__((destructor)) static void remove_folder(void)
{
    unlink(in_folder("m"));
    rmdir(folder);
}

RUN_TESTS()
