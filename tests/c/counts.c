/* Runs every kernel once for callgrind to count its instructions: sizes like those of a layer, one thread, no clock.
 * QWENREF_CPU names the level. Each case is a dump of its own, labelled with the op and the case; counts.sh compares them.
 * The BLAS variant is left out: its instructions are not ours. */
#pragma GCC diagnostic ignored "-Wunused-function" /* of the helpers of the tests, some are enough */
#include "run_op.h"

#include <valgrind/callgrind.h>

/* An op, and the size of each letter of its signature ("*3 D64"). Optional inputs and outputs are named behind. */
typedef struct count_case {
    const char *op, *dims, *options;
    qr_dtype weights; /* of kind w */
} count_case;

#define DELTA "B1 T16 G2 K128 H4 V128"
#define ATTENTION "B1 T4 Q4 K2 S96 D256"

static const count_case cases[] = {
    {"embedding", "*4 V8 H1024", "", QR_BF16},
    {"linear", "*1 I1024 O96", "", QR_BF16},
    {"linear", "*1 I1024 O96", "", QR_F16},
    {"linear", "*1 I1024 O96", "", QR_F32},
    {"linear", "*16 I512 O96", "", QR_BF16},
    {"linear", "*64 I512 O96", "", QR_BF16},
    {"linear", "*64 I512 O96", "b", QR_F32},
    {"linear_parts", "*16 I512 O96", "", QR_BF16},
    {"linear_f64", "*1 I512 O96", "", QR_BF16},
    {"linear_f64", "*16 I512 O96", "", QR_BF16},
    {"rms_norm", "*4 D1024", "", QR_F32},
    {"rms_norm_gated", "*16 D128", "", QR_F32},
    {"l2_norm", "*16 D128", "", QR_F32},
    {"layer_norm", "*4 D1024", "", QR_F32},
    {"add", "*4096", "", QR_F32},
    {"mul", "*4096", "", QR_F32},
    {"silu", "*4096", "", QR_F32},
    {"silu_mul", "*4096", "", QR_F32},
    {"sigmoid", "*4096", "", QR_F32},
    {"sigmoid_mul", "*4096", "", QR_F32},
    {"softplus", "*4096", "", QR_F32},
    {"gelu", "*4096", "", QR_F32},
    {"gelu_tanh", "*4096", "", QR_F32},
    {"exp", "*4096", "", QR_F32},
    {"round_bf16", "*4096", "", QR_F32},
    {"round_f16", "*4096", "", QR_F32},
    {"delta_decay", "*64 V48", "", QR_F32},
    {"softmax", "*2 D4096", "", QR_F32},
    {"log_softmax", "*2 D4096", "", QR_F32},
    {"argmax", "*1 D4096", "", QR_F32},
    {"rope_frequencies", "F32", "", QR_F32},
    {"rope_table", "A3 *16 F32", "", QR_F32},
    {"rope", "B1 T16 H4 D256 F32", "", QR_F32},
    {"attention", ATTENTION, "", QR_F32},
    {"attention", ATTENTION, "p", QR_F32},
    {"attention_scores", ATTENTION, "", QR_F32},
    {"attention_softmax", ATTENTION, "", QR_F32},
    {"attention_mix", ATTENTION, "", QR_F32},
    {"segment_attention", "N144 H2 D64 G1", "", QR_F32},
    {"segment_attention", "N48 H2 D72 G1", "p", QR_F32},
    {"segment_scores", "N48 H2 D64 G1", "", QR_F32},
    {"segment_softmax", "N48 H2 G1", "", QR_F32},
    {"segment_mix", "N48 H2 D64 G1", "", QR_F32},
    {"sample_table", "R4 C4 N16 D256", "", QR_BF16},
    {"grid_table", "A2 N16 F16", "", QR_F32},
    {"rope_whole", "N16 H4 D64 F32", "", QR_F32},
    {"causal_conv1d", "B1 T16 C512 W4", "next", QR_F32},
    {"gated_delta_rule", "B1 T1 G2 K128 H4 V128", "state final", QR_F32},
    {"gated_delta_rule", DELTA, "final", QR_F32},
    {"gated_delta_rule_chunked", DELTA, "final", QR_F32},
};

static int64_t size_of_letter(const char *dims, char letter)
{
    const char *const at = strchr(dims, letter);
    return at != NULL ? strtoll(at + 1, NULL, 10) : 1;
}

static bool named(const char *options, const char *name)
{
    const size_t n = strlen(name);
    for (const char *at = options; *at != '\0'; at += strcspn(at, " "), at += strspn(at, " "))
        if (strncmp(at, name, n) == 0 && (at[n] == ' ' || at[n] == '\0'))
            return true;
    return false;
}

/* What an integer input of this name holds: every query sees all keys up to its own, one segment is all tokens, ids and
 * axes go round. */
static int64_t integer(const char *name, int64_t i, const char *dims)
{
    if (strcmp(name, "end") == 0)
        return size_of_letter(dims, 'S') - size_of_letter(dims, 'T') + i + 1;
    if (strcmp(name, "begin") == 0)
        return 0;
    if (strcmp(name, "lengths") == 0)
        return size_of_letter(dims, 'N');
    return strcmp(name, "ids") == 0 ? i % size_of_letter(dims, 'V') : strcmp(name, "axis") == 0 ? i % 3 : i;
}

static void *filled(const qr_param *param, qr_dtype dtype, int64_t n, const char *dims)
{
    float *const floats = random_floats(n);
    void *const data = calloc((size_t)n + 1, 8);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, floats + i, sizeof bits);
        if (dtype == QR_I64)
            ((int64_t *)data)[i] = integer(param->name, i, dims);
        else if (dtype == QR_F64)
            ((double *)data)[i] = fabs((double)floats[i]); /* a place in any table */
        else if (dtype == QR_BF16)
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        else if (dtype == QR_F16)
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16 & 0xbbff); /* any number between -2 and 2 */
        else
            ((float *)data)[i] = floats[i];
    }
    free(floats);
    return data;
}

/* The array of an input or output, full of numbers: weights widened as callers have them where the op wants floats. */
static qr_array array_for(const qr_param *param, const count_case *c)
{
    int64_t shape[QR_MAX_DIMS], n = 1;
    const qr_dtype dtype = param->kind == 'w'   ? c->weights
                           : param->kind == 'i' ? QR_I64
                           : param->kind == 'd' ? QR_F64
                                                : QR_F32;
    for (int d = 0; d < param->ndim; d++) {
        const qr_dim *const dim = &param->dim[d];
        shape[d] = (dim->letter == 0 ? 0 : dim->letter == '#' ? 1 : size_of_letter(c->dims, dim->letter)) + dim->offset;
        n *= shape[d];
    }
    return array_of(dtype, filled(param, dtype, n, c->dims), param->ndim, shape);
}

static void count(qr_level level, const count_case *c)
{
    static const char *const dtypes[] = {[QR_F32] = "fp32", [QR_BF16] = "bf16", [QR_F16] = "fp16"};
    const qr_op *const op = find_op(level, c->op);
    qr_error error = {.kind = QR_OK};
    qr_signature signature;
    qr_star star;
    qr_call call = {.name = c->op, .threads = 1, .error = &error};
    char label[256];

    CHECK(qr_signature_parse(op->signature, &signature, &error) == 0);
    for (int i = 0; i < signature.params; i++) {
        const qr_param *const param = &signature.param[i];
        if (param->kind == 0)
            call.scalar[param->slot] = param->has_default ? param->value : 0.5;
        else if (!param->output && (!param->optional || named(c->options, param->name)))
            call.array[param->slot] = array_for(param, c);
    }
    CHECK(qr_bind_inputs(&signature, &call, &star, &error) == 0);
    for (int i = 0; i < signature.params; i++) {
        const qr_param *const param = &signature.param[i];
        if (param->output && (!param->optional || named(c->options, param->name)))
            call.array[param->slot] = array_for(param, c);
    }
    snprintf(label, sizeof label, "%s %s %s%s%s", c->op, dtypes[c->weights], c->dims, *c->options ? " " : "",
             c->options);
    op->run(&call); /* once without counting, so that what the loader does on the first call is not counted */
    CALLGRIND_ZERO_STATS;
    CALLGRIND_TOGGLE_COLLECT;
    op->run(&call);
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(label);
    CHECK_SAY(error.kind == QR_OK, "%s: %s", label, error.text);
    for (int i = 0; i < QR_MAX_ARRAYS; i++)
        free(call.array[i].data);
}

TEST(every_kernel_runs_at_the_level_asked_for)
{
    const char *const wanted = getenv("QWENREF_CPU");
    bool found = false;
    for (qr_level level = QR_SCALAR; level < QR_LEVELS; level++) {
        if (wanted == NULL || strcmp(wanted, qr_level_name(level)) != 0 || !level_runs(level))
            continue;
        found = true;
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            count(level, &cases[i]);
    }
    CHECK_SAY(found, "QWENREF_CPU: no instruction level this machine can run");
}

RUN_TESTS()
