/* PyInit__C: the module, its state, and the settings that belong to the process (threads, instruction level). */
#define QR_IMPORTS_NUMPY
#include "py.h"

#include "../core/cpu.h"

#include <stdlib.h>

static qr_state *
state_of_module(PyObject *module)
{
    return (qr_state *)PyModule_GetState(module);
}

qr_state *
qr_state_of(PyTypeObject *type)
{
#if PY_VERSION_HEX >= 0x030B0000
    PyObject *module = PyType_GetModuleByDef(type, &qr_module); /* borrowed */
    return module != NULL ? state_of_module(module) : NULL;
#else
    PyObject *mro = type->tp_mro; /* borrowed */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(mro, i);
        if (!PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE))
            continue;
        PyObject *module = ((PyHeapTypeObject *)base)->ht_module; /* borrowed */
        if (module != NULL && PyModule_GetDef(module) == &qr_module)
            return state_of_module(module);
    }
    PyErr_Format(PyExc_TypeError, "%s is not a type of qwenref", type->tp_name);
    return NULL;
#endif
}

PyObject *
qr_raise(qr_state *state, const qr_error *error)
{
    static const char *const names[] = {
        [QR_BAD_SHAPE] = "ShapeError",           [QR_BAD_DTYPE] = "DTypeError",
        [QR_BAD_INPUT] = "InputError",           [QR_BAD_CONFIG] = "ConfigError",
        [QR_BAD_CHECKPOINT] = "CheckpointError", [QR_NOT_CAPABLE] = "CapabilityMissing",
    };
    PyObject *type = NULL, *text = NULL;

    if (error->kind == QR_NO_MEMORY)
        type = Py_NewRef(PyExc_MemoryError);
    else if (error->kind == QR_OK || error->kind == QR_INTERNAL || state->errors == NULL)
        type = Py_NewRef(PyExc_RuntimeError);
    else
        type = PyObject_GetAttrString(state->errors, names[error->kind]);
    /* A path may hold any bytes, and a long message may end inside a character. */
    text = PyUnicode_DecodeUTF8(error->text, (Py_ssize_t)strlen(error->text), "replace");
    if (type != NULL && text != NULL)
        PyErr_SetObject(type, text);
    Py_XDECREF(text);
    Py_XDECREF(type);
    return NULL;
}

PyObject *
qr_raise_key(PyObject *key)
{
    PyObject *args = PyTuple_Pack(1, key); /* a key that is a tuple would be taken for the arguments */
    if (args != NULL)
        PyErr_SetObject(PyExc_KeyError, args);
    Py_XDECREF(args);
    return NULL;
}

int
qr_typenum(const qr_state *state, qr_dtype dtype)
{
    switch (dtype) {
    case QR_F32:
        return NPY_FLOAT32;
    case QR_F64:
        return NPY_FLOAT64;
    case QR_F16:
        return NPY_FLOAT16;
    case QR_I64:
        return NPY_INT64;
    case QR_BF16:
        return state->bf16_typenum;
    default:
        return -1;
    }
}

qr_dtype
qr_dtype_of(const qr_state *state, int typenum)
{
    if (typenum == state->bf16_typenum)
        return QR_BF16;
    switch (typenum) {
    case NPY_FLOAT32:
        return QR_F32;
    case NPY_FLOAT64:
        return QR_F64;
    case NPY_FLOAT16:
        return QR_F16;
    case NPY_INT64:
        return QR_I64;
    default:
        /* `long` and `long long` are both 64 bits wide here; NumPy gives them two numbers. */
        return PyTypeNum_ISSIGNED(typenum) && typenum == NPY_LONGLONG ? QR_I64 : QR_DTYPES;
    }
}

PyDoc_STRVAR(set_num_threads_doc, "set_num_threads(n, /)\n--\n\n"
                                  "Use n threads (>= 1) from the next call on. No result depends on it.");

static PyObject *
set_num_threads(PyObject *module, PyObject *value)
{
    long n = PyLong_AsLong(value);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    if (n < 1 || n > QR_MAX_THREADS) {
        qr_error error = {0};
        qr_fail(&error, QR_BAD_INPUT,
                "set_num_threads: %ld threads\n    expected 1 to %d\n    do       "
                "leave it unset to use every CPU this process may use",
                n, QR_MAX_THREADS);
        return qr_raise(state_of_module(module), &error);
    }
    qr_pool_resize(state_of_module(module)->pool, (int)n);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(get_num_threads_doc, "get_num_threads()\n--\n\nThreads an op may use.");

static PyObject *
get_num_threads(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(qr_pool_size(state_of_module(module)->pool));
}

PyDoc_STRVAR(cpu_level_doc, "cpu_level()\n--\n\n"
                            "Name of the instruction level in use: scalar, avx2, avx512 or avx512bf16.");

static PyObject *
cpu_level(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyUnicode_FromString(qr_level_name(qr_level_of(state_of_module(module))));
}

PyDoc_STRVAR(set_cpu_level_doc,
             "set_cpu_level(name, /)\n--\n\n"
             "Use another instruction level from the next call on; for tests, since every level gives "
             "the same bits.");

static PyObject *
set_cpu_level(PyObject *module, PyObject *name)
{
    qr_error error = {0};
    qr_level level;
    const char *text = PyUnicode_AsUTF8(name); /* borrowed from name */
    if (text == NULL)
        return NULL;
    if (qr_cpu_choose(text, &level, &error) < 0)
        return qr_raise(state_of_module(module), &error);
    __atomic_store_n(&state_of_module(module)->level, level, __ATOMIC_RELAXED);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_num_threads", set_num_threads, METH_O, set_num_threads_doc},
    {"get_num_threads", get_num_threads, METH_NOARGS, get_num_threads_doc},
    {"set_cpu_level", set_cpu_level, METH_O, set_cpu_level_doc},
    {"cpu_level", cpu_level, METH_NOARGS, cpu_level_doc},
    {NULL, NULL, 0, NULL},
};

/* QWENREF_NUM_THREADS, or the CPUs this process may use; a value that is no count is an error, not a guess. */
static int
default_threads(int *threads, qr_error *error)
{
    const char *text = getenv("QWENREF_NUM_THREADS");
    char *end = NULL;

    *threads = qr_cpu_count();
    if (text == NULL || *text == '\0')
        return 0;
    const long n = strtol(text, &end, 10);
    if (*end != '\0' || n < 1 || n > QR_MAX_THREADS)
        return qr_fail(error, QR_BAD_INPUT, "QWENREF_NUM_THREADS: '%.40s'\n    expected a number from 1 to %d", text,
                       QR_MAX_THREADS);
    *threads = (int)n;
    return 0;
}

static int
import_bf16(qr_state *state)
{
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    PyObject *scalar = module != NULL ? PyObject_GetAttrString(module, "bfloat16") : NULL;
    PyArray_Descr *descr = NULL;
    int ok = scalar != NULL && PyArray_DescrConverter(scalar, &descr) == NPY_SUCCEED;

    Py_XDECREF(scalar);
    Py_XDECREF(module);
    if (!ok)
        return -1;
    state->bf16_typenum = descr->type_num;
    state->bf16 = (PyObject *)descr; /* takes the reference */
    return 0;
}

static int
module_exec(PyObject *module)
{
    qr_state *state = state_of_module(module);
    qr_error error = {0};
    int threads = 0;

    import_array1(-1);
    state->errors = PyImport_ImportModule("qwenref.errors");
    if (state->errors == NULL || import_bf16(state) < 0)
        return -1;
    state->numerics = PyContextVar_New("qwenref_numerics", Py_None);
    state->sites = PyContextVar_New("qwenref_sites", Py_None);
    state->call_hooked = PyUnicode_InternFromString("_call_hooked");
    if (state->numerics == NULL || state->sites == NULL || state->call_hooked == NULL)
        return -1;
    if (PyModule_AddObjectRef(module, "numerics_var", state->numerics) < 0 ||
        PyModule_AddObjectRef(module, "sites_var", state->sites) < 0)
        return -1;

    if (qr_cpu_choose(getenv("QWENREF_CPU"), &state->level, &error) < 0 || default_threads(&threads, &error) < 0) {
        qr_raise(state, &error);
        return -1;
    }
    state->pool = qr_pool_new(threads);
    if (state->pool == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (qr_add_buffers(module) < 0 || qr_add_ops(module) < 0 || qr_add_module_type(module) < 0 ||
        qr_add_checkpoint_types(module) < 0 || qr_add_config_types(module) < 0 || qr_add_rates(module) < 0)
        return -1;
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    qr_state *state = state_of_module(module);
    Py_VISIT(state->numerics);
    Py_VISIT(state->sites);
    Py_VISIT(state->errors);
    Py_VISIT(state->bf16);
    Py_VISIT(state->op_type);
    Py_VISIT(state->node_type);
    for (size_t i = 0; i < sizeof state->config_type / sizeof *state->config_type; i++)
        Py_VISIT(state->config_type[i]);
    Py_VISIT(state->parameter);
    Py_VISIT(state->call_hooked);
    Py_VISIT(state->forward);
    Py_VISIT(state->hook_table);
    Py_VISIT(state->global_forward_hooks);
    Py_VISIT(state->global_forward_pre_hooks);
    return 0;
}

static int
module_clear(PyObject *module)
{
    qr_state *state = state_of_module(module);
    Py_CLEAR(state->numerics);
    Py_CLEAR(state->sites);
    Py_CLEAR(state->errors);
    Py_CLEAR(state->bf16);
    Py_CLEAR(state->op_type);
    Py_CLEAR(state->node_type);
    for (size_t i = 0; i < sizeof state->config_type / sizeof *state->config_type; i++)
        Py_CLEAR(state->config_type[i]);
    Py_CLEAR(state->parameter);
    Py_CLEAR(state->call_hooked);
    Py_CLEAR(state->forward);
    Py_CLEAR(state->hook_table);
    Py_CLEAR(state->global_forward_hooks);
    Py_CLEAR(state->global_forward_pre_hooks);
    return 0;
}

static void
module_free(void *module)
{
    qr_state *state = state_of_module(module);
    (void)module_clear(module);
    qr_pool_free(state->pool); /* accepts NULL */
    state->pool = NULL;
    Py_CLEAR(state->buffer_handler); /* refers to nothing, so no cycle needs it dropped before */
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* as NumPy */
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

PyModuleDef qr_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "qwenref._C",
    .m_doc = "The compiled half of qwenref: ops, the module node, configuration and checkpoint files.",
    .m_size = sizeof(qr_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&qr_module);
}
