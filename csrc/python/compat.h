/* New references to what others may replace meanwhile: functions of CPython 3.13, for older ones too, and for builds
 * without the GIL the lock that a field of an object needs. Included by py.h. */
#ifndef QR_COMPAT_H
#define QR_COMPAT_H

#if PY_VERSION_HEX < 0x030D0000

/* 1 with a new reference in *found, 0 with NULL, -1 with NULL and an exception set. */
static inline int
PyDict_GetItemRef(PyObject *dict, PyObject *key, PyObject **found)
{
    *found = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    return *found != NULL ? 1 : PyErr_Occurred() ? -1 : 0;
}

static inline PyObject *
PyList_GetItemRef(PyObject *list, Py_ssize_t i)
{
    return Py_XNewRef(PyList_GetItem(list, i));
}

static inline PyObject *
_PyType_LookupRef(PyTypeObject *type, PyObject *name)
{
    return Py_XNewRef(_PyType_Lookup(type, name));
}

#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }

#endif

/* What an object's field refers to: a new reference, or NULL. */
static inline PyObject *
qr_hold(PyObject *object, PyObject *const *field)
{
    PyObject *held;
    (void)object; /* only locks want it */
    if (__atomic_load_n(field, __ATOMIC_RELAXED) == NULL)
        return NULL;
    Py_BEGIN_CRITICAL_SECTION(object);
    held = Py_XNewRef(*field);
    Py_END_CRITICAL_SECTION();
    return held;
}

/* Put `value` (stolen, may be NULL) into the field. */
static inline void
qr_put(PyObject *object, PyObject **field, PyObject *value)
{
    PyObject *before;
    (void)object;
    Py_BEGIN_CRITICAL_SECTION(object);
    before = *field;
    __atomic_store_n(field, value, __ATOMIC_RELEASE);
    Py_END_CRITICAL_SECTION();
    Py_XDECREF(before); /* what that runs may want the lock */
}

#endif
