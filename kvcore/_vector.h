/* int64 vectors of torch, read from C without torch's headers: through DLPack's exchange table, which
 * the tensor type offers in recent releases. Each compiled module includes this and is bound once. */
#ifndef KVCORE_VECTOR_H
#define KVCORE_VECTOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* What is used here of DLPack 1 (https://dmlc.github.io/dlpack/latest/c_api.html). */
typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct {
        uint32_t major, minor;
        void *previous;
    } header;
    void *allocator, *owning_from_object, *object_from_owning;
    int (*view_of_object)(void *object, DLTensor *out);
    void *current_stream;
} Exchange;

#define EXCHANGE_NAME "dlpack_exchange_api"
enum { DL_CPU = 1, DL_INT = 0 };

/* Of the compiled modules and of what Python expects of them (kvcore.native); one more whenever
 * either changes, so that an old binary in a checkout is not used. */
#define KVCORE_LAYOUT 3

/* No index is longer; so no number of bytes or pages overflows. */
#define MOST_SLOTS ((int64_t)1 << 32)

static const Exchange *exchange;
static PyObject *tensor_type;

/* An int64 vector on the CPU. */
typedef struct {
    const int64_t *data;
    int64_t size, stride;
} Vector;

/* Whether an index is what nearly every call passes; never raises. */
static int
as_vector(PyObject *index, Vector *vector)
{
    DLTensor tensor;
    if (exchange == NULL || (PyObject *)Py_TYPE(index) != tensor_type) {
        return 0;
    }
    if (exchange->view_of_object(index, &tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (tensor.device.type != DL_CPU || tensor.ndim != 1 || tensor.dtype.code != DL_INT ||
        tensor.dtype.bits != 64 || tensor.dtype.lanes != 1) {
        return 0;
    }
    vector->data = (const int64_t *)((const char *)tensor.data + tensor.byte_offset);
    vector->size = tensor.shape[0];
    vector->stride = tensor.strides != NULL ? tensor.strides[0] : 1;
    if (vector->size < 2) {
        vector->stride = 1;
    }
    /* Some tensors have a shape and no memory. */
    return vector->size == 0 ||
           (tensor.data != NULL && (uintptr_t)vector->data % sizeof(int64_t) == 0 &&
            vector->size <= MOST_SLOTS && vector->stride >= -MOST_SLOTS &&
            vector->stride <= MOST_SLOTS);
}

/* bind(exchange, tensor_type): read tensors of this type through this table. */
static PyObject *
bind(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *type;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &type)) {
        return NULL;
    }
    const Exchange *found = PyCapsule_GetPointer(capsule, EXCHANGE_NAME);
    if (found == NULL) {
        return NULL;
    }
    if (found->header.major != 1 || found->view_of_object == NULL) {
        PyErr_SetString(PyExc_ValueError, "bind: expected an exchange table of DLPack 1");
        return NULL;
    }
    Py_INCREF(type);
    Py_XSETREF(tensor_type, type);
    exchange = found;
    Py_RETURN_NONE;
}

#endif
