/* Signatures of ops: parsing them, and unifying the arrays of a call with them.  Allocates nothing. */
#include "op.h"

#include <stdlib.h>
#include <string.h>

/* ---- parsing ------------------------------------------------------------------------------------------------ */

typedef struct cursor {
    const char *at, *text;
    qr_error *error;
} cursor;

static int syntax(cursor *c, const char *expected)
{
    return qr_fail(c->error, QR_INTERNAL, "signature \"%s\": expected %s at column %d", c->text, expected,
                   (int)(c->at - c->text) + 1);
}

static void blanks(cursor *c)
{
    while (*c->at == ' ')
        c->at++;
}

static bool accept(cursor *c, char wanted)
{
    blanks(c);
    if (*c->at != wanted)
        return false;
    c->at++;
    return true;
}

static bool is_digit(char ch)
{
    return ch >= '0' && ch <= '9';
}

static int parse_name(cursor *c, char *out, size_t size)
{
    size_t n = 0;
    blanks(c);
    for (; (*c->at >= 'a' && *c->at <= 'z') || (*c->at >= 'A' && *c->at <= 'Z') || is_digit(*c->at) || *c->at == '_';
         c->at++) {
        if (n + 1 >= size)
            return syntax(c, "a shorter name");
        out[n++] = *c->at;
    }
    out[n] = '\0';
    return n > 0 ? 0 : syntax(c, "a name");
}

static int64_t parse_number(cursor *c)
{
    int64_t n = 0;
    while (is_digit(*c->at) && n < INT64_MAX / 10 - 10)
        n = n * 10 + (*c->at++ - '0');
    return n;
}

static int parse_dim(cursor *c, qr_dim *out)
{
    blanks(c);
    *out = (qr_dim){0, 0};
    if (is_digit(*c->at)) {
        out->offset = parse_number(c);
        return 0;
    }
    if (*c->at == '*' || *c->at == '#' || (*c->at >= 'A' && *c->at <= 'Z')) {
        out->letter = *c->at++;
        if (accept(c, '-'))
            out->offset = -parse_number(c);
        else if (accept(c, '+'))
            out->offset = parse_number(c);
        return 0;
    }
    return syntax(c, "a dimension");
}

/* name, name=default, or name[dims]:kind followed by an optional '?' */
static int parse_param(cursor *c, qr_signature *s, bool output)
{
    if (s->params == QR_MAX_ARRAYS + QR_MAX_SCALARS)
        return syntax(c, "fewer parameters");
    qr_param *p = &s->param[s->params];
    *p = (qr_param){.output = output};
    if (parse_name(c, p->name, sizeof p->name) < 0)
        return -1;
    if (!accept(c, '[')) {
        if (output || s->scalars == QR_MAX_SCALARS)
            return syntax(c, output ? "'['" : "fewer scalars");
        p->slot = s->scalars++;
        if (accept(c, '=')) {
            char *end = NULL;
            p->value = strtod(c->at, &end);
            if (end == c->at)
                return syntax(c, "a number");
            p->has_default = true;
            c->at = end;
        }
        s->params++;
        return 0;
    }
    do {
        if (p->ndim == QR_MAX_DIMS)
            return syntax(c, "fewer dimensions");
        if (parse_dim(c, &p->dim[p->ndim++]) < 0)
            return -1;
    } while (accept(c, ','));
    if (!accept(c, ']'))
        return syntax(c, "']'");
    if (!accept(c, ':'))
        return syntax(c, "':'");
    if (*c->at == '\0' || strchr("fsvwid", *c->at) == NULL)
        return syntax(c, "a kind, one of f s v w i d");
    p->kind = *c->at++;
    p->optional = accept(c, '?');
    p->scratch = output && p->name[0] == '_';
    if (s->arrays == QR_MAX_ARRAYS)
        return syntax(c, "fewer arrays");
    p->slot = s->arrays++;
    s->inputs += !output;
    s->params++;
    return 0;
}

int qr_signature_parse(const char *text, qr_signature *out, qr_error *error)
{
    cursor c = {text, text, error};
    *out = (qr_signature){0};
    if (parse_name(&c, out->name, sizeof out->name) < 0)
        return -1;
    if (!accept(&c, '('))
        return syntax(&c, "'('");
    if (!accept(&c, ')')) {
        do {
            if (parse_param(&c, out, false) < 0)
                return -1;
        } while (accept(&c, ','));
        if (!accept(&c, ')'))
            return syntax(&c, "',' or ')'");
    }
    if (!accept(&c, '-') || !accept(&c, '>'))
        return syntax(&c, "'->'");
    do {
        if (parse_param(&c, out, true) < 0)
            return -1;
    } while (accept(&c, ','));
    blanks(&c);
    return *c.at == '\0' ? 0 : syntax(&c, "the end");
}

const char *qr_param_text(const qr_param *param, char *buffer, size_t size)
{
    size_t n = (size_t)snprintf(buffer, size, "%s[", param->name);
    for (int d = 0; d < param->ndim && n < size; d++) {
        const qr_dim *dim = &param->dim[d];
        const char *comma = d > 0 ? "," : "";
        if (dim->letter == 0)
            n += (size_t)snprintf(buffer + n, size - n, "%s%lld", comma, (long long)dim->offset);
        else if (dim->offset != 0)
            n += (size_t)snprintf(buffer + n, size - n, "%s%c%+lld", comma, dim->letter, (long long)dim->offset);
        else
            n += (size_t)snprintf(buffer + n, size - n, "%s%c", comma, dim->letter);
    }
    if (n < size)
        snprintf(buffer + n, size - n, "]");
    return buffer;
}

/* ---- binding ------------------------------------------------------------------------------------------------ */

static const char *shape_text(const int64_t *shape, int ndim, char *buffer, size_t size)
{
    size_t n = (size_t)snprintf(buffer, size, "[");
    for (int d = 0; d < ndim && n < size; d++)
        n += (size_t)snprintf(buffer + n, size - n, d > 0 ? ", %lld" : "%lld", (long long)shape[d]);
    if (n < size)
        snprintf(buffer + n, size - n, "]");
    return buffer;
}

enum { UNBOUND = -1 };

/* What the bound letters say the shape of `param` is, unbound ones by name: "[*, H 5120]". */
static const char *expected_text(const qr_param *param, const qr_call *call, const qr_star *star, char *buffer,
                                 size_t size)
{
    size_t n = (size_t)snprintf(buffer, size, "[");
    for (int d = 0; d < param->ndim && n < size; d++) {
        const qr_dim *dim = &param->dim[d];
        if (d > 0)
            n += (size_t)snprintf(buffer + n, size - n, ", ");
        if (n >= size)
            break;
        if (dim->letter == '*') {
            n += (size_t)snprintf(buffer + n, size - n, "*");
            for (int i = 0; i < star->ndim && n < size; i++)
                n += (size_t)snprintf(buffer + n, size - n, " %lld", (long long)star->shape[i]);
        } else if (dim->letter == 0) {
            n += (size_t)snprintf(buffer + n, size - n, "%lld", (long long)dim->offset);
        } else if (QR_DIM(call, dim->letter) == UNBOUND) {
            n += (size_t)snprintf(buffer + n, size - n, "%c", dim->letter);
        } else {
            n += (size_t)snprintf(buffer + n, size - n, "%c %lld", dim->letter,
                                  (long long)(QR_DIM(call, dim->letter) + dim->offset));
        }
    }
    if (n < size)
        snprintf(buffer + n, size - n, "]");
    return buffer;
}

static int bad_shape(const qr_signature *s, const qr_param *param, const qr_array *a, const qr_call *call,
                     const qr_star *star, const char *what, qr_error *error)
{
    char found[160], expected[160];
    return qr_fail(error, QR_BAD_SHAPE, "%s: %s %s\n    found    %s %s\n    expected %s", s->name, param->name, what,
                   qr_dtype_name(a->dtype), shape_text(a->shape, a->ndim, found, sizeof found),
                   expected_text(param, call, star, expected, sizeof expected));
}

static bool kind_takes(char kind, qr_dtype dtype)
{
    switch (kind) {
    case 'f':
    case 's':
        return dtype == QR_F32;
    case 'v': /* the binder has widened it */
        return dtype == QR_F32;
    case 'w':
        return dtype == QR_F32 || dtype == QR_BF16 || dtype == QR_F16;
    case 'i':
        return dtype == QR_I64;
    default:
        return dtype == QR_F64;
    }
}

static int check_dtype(const qr_signature *s, const qr_param *param, const qr_array *a, qr_error *error)
{
    if (kind_takes(param->kind, a->dtype))
        return 0;
    const char *expected = param->kind == 'w'   ? "float32, bfloat16 or float16"
                           : param->kind == 'i' ? "int64"
                           : param->kind == 'd' ? "float64"
                                                : "float32";
    return qr_fail(error, QR_BAD_DTYPE, "%s: %s has the wrong dtype\n    found    %s\n    expected %s", s->name,
                   param->name, qr_dtype_name(a->dtype), expected);
}

/* Dimensions `*` absorbs `ndim - (others)` of the array; every letter is bound by its first use and compared after. */
static int bind_array(const qr_signature *s, const qr_param *param, qr_call *call, qr_star *star, qr_error *error)
{
    const qr_array *a = &call->array[param->slot];
    bool starred = false;

    if (check_dtype(s, param, a, error) < 0)
        return -1;
    for (int d = 0; d < param->ndim; d++)
        starred |= param->dim[d].letter == '*';
    const int others = param->ndim - starred;
    const int absorbed = a->ndim - others;
    if (absorbed < 0 || (!starred && absorbed != 0))
        return bad_shape(s, param, a, call, star, "has the wrong number of dimensions", error);

    for (int d = 0, at = 0; d < param->ndim; d++) {
        const qr_dim *dim = &param->dim[d];
        if (dim->letter == '*') {
            if (star->ndim < 0) {
                int64_t product = 1;
                star->ndim = absorbed;
                for (int i = 0; i < absorbed; i++)
                    product *= star->shape[i] = a->shape[at + i];
                QR_DIM(call, '*') = product;
            } else if (star->ndim != absorbed ||
                       (absorbed > 0 &&
                        memcmp(star->shape, a->shape + at, (size_t)absorbed * sizeof *star->shape) != 0)) {
                return bad_shape(s, param, a, call, star, "does not match the other arrays", error);
            }
            at += absorbed;
            continue;
        }
        const int64_t size = a->shape[at++];
        if (dim->letter == 0) {
            if (size != dim->offset)
                return bad_shape(s, param, a, call, star, "has the wrong shape", error);
            continue;
        }
        if (QR_DIM(call, dim->letter) == UNBOUND)
            QR_DIM(call, dim->letter) = size - dim->offset;
        else if (QR_DIM(call, dim->letter) + dim->offset != size)
            return bad_shape(s, param, a, call, star, "has the wrong shape", error);
    }
    return 0;
}

int qr_bind_inputs(const qr_signature *s, qr_call *call, qr_star *star, qr_error *error)
{
    for (size_t i = 0; i < sizeof call->dim / sizeof *call->dim; i++)
        call->dim[i] = UNBOUND;
    QR_DIM(call, '#') = call->threads;
    star->ndim = -1;
    call->inputs = s->inputs;
    for (int i = 0; i < s->params; i++) {
        const qr_param *p = &s->param[i];
        if (p->kind == 0 || p->output || call->array[p->slot].data == NULL)
            continue;
        if (bind_array(s, p, call, star, error) < 0)
            return -1;
    }
    return 0;
}

/* Row-major strides. An empty array may have huge sizes, and scratch made from those sizes would be huge: what cannot
 * be counted in bytes is refused here, so that no product of sizes overflows later. */
static int set_strides(const qr_signature *s, const qr_param *param, qr_array *out, qr_error *error)
{
    int64_t bytes = (int64_t)qr_dtype_size(out->dtype);
    char text[160];

    for (int d = out->ndim - 1; d >= 0; d--) {
        const int64_t size = out->shape[d];
        out->stride[d] = bytes / (int64_t)qr_dtype_size(out->dtype);
        if (size < 0 || __builtin_mul_overflow(bytes, size > 0 ? size : 1, &bytes))
            return qr_fail(error, QR_BAD_SHAPE, "%s: %s would have an impossible shape\n    found    %s", s->name,
                           param->name, shape_text(out->shape, out->ndim, text, sizeof text));
    }
    return 0;
}

int qr_bind_output(const qr_signature *s, const qr_param *param, const qr_call *call, const qr_star *star,
                   qr_array *out, qr_error *error)
{
    *out = (qr_array){0};
    out->dtype = param->kind == 'i' ? QR_I64 : param->kind == 'd' ? QR_F64 : QR_F32;
    for (int d = 0; d < param->ndim; d++) {
        const qr_dim *dim = &param->dim[d];
        const int more = dim->letter == '*' ? star->ndim : 1;
        if (more < 0 || out->ndim + more > QR_MAX_DIMS)
            return qr_fail(error, QR_BAD_SHAPE, "%s: %s would have more than %d dimensions", s->name, param->name,
                           QR_MAX_DIMS);
        if (dim->letter == '*') {
            for (int i = 0; i < star->ndim; i++)
                out->shape[out->ndim++] = star->shape[i];
            continue;
        }
        int64_t size = dim->offset;
        if (dim->letter != 0) {
            if (QR_DIM(call, dim->letter) == UNBOUND)
                return qr_fail(error, QR_INTERNAL, "%s: nothing says how large %c of %s is", s->name, dim->letter,
                               param->name);
            if (__builtin_add_overflow(size, QR_DIM(call, dim->letter), &size))
                size = -1;
        }
        out->shape[out->ndim++] = size;
    }
    return set_strides(s, param, out, error);
}
