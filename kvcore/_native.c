/* The shortest way of a free on a CPU: kvcore._native.
 *
 * A second form of what Python does by numpy (kvcore.allocator.giving), in the plainest case alone:
 * whatever is unusual is left to Python by the answer "not done", before anything was changed.
 *
 * Left out: which case is plain by anything but the tensor and the free lists (kvcore.native).
 */
#include "_vector.h"

static PyObject *name_head, *name_end, *name_address, *name_free_list, *name_group_open;

/* Whether a segment may start there: an int of Python's that is no bool, not negative, on a page
 * boundary; never raises. */
static int
is_start(PyObject *start_pos, int64_t page_size)
{
    if (!PyLong_CheckExact(start_pos)) {
        return 0;
    }
    int64_t start = PyLong_AsLongLong(start_pos);
    if (start == -1 && PyErr_Occurred()) {
        PyErr_Clear();
    }
    return start >= 0 && start % page_size == 0;
}

static int64_t
pages_in(const Vector *slots, int64_t page_size)
{
    return slots->size / page_size + (slots->size % page_size != 0);
}

/* copied(index, page_size=1, start_pos=0): the pages of a piece of a row as bytes, int64 each, or
 * None if there is anything unusual about it. */
static PyObject *
copied(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Vector slots;
    int64_t size = 1;
    if (count < 1 || count > 3) {
        PyErr_SetString(PyExc_TypeError, "copied: expected index, page_size and start_pos");
        return NULL;
    }
    if (count > 1) {
        size = PyLong_AsLongLong(args[1]);
        if (size < 1) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "copied: expected a page_size of at least 1");
            }
            return NULL;
        }
    }
    if ((count > 2 && !is_start(args[2], size)) || !as_vector(args[0], &slots)) {
        Py_RETURN_NONE;
    }
    int64_t pages = pages_in(&slots, size), step;
    if (__builtin_mul_overflow(slots.stride, size, &step)) {
        Py_RETURN_NONE;
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, pages * (int64_t)sizeof(int64_t));
    if (bytes == NULL) {
        return NULL;
    }
    int64_t *ids = (int64_t *)PyBytes_AS_STRING(bytes);
    if (pages == 0) {
        return bytes;
    }
    if (step == 1) {
        memcpy(ids, slots.data, pages * sizeof(int64_t));
        return bytes;
    }
    for (int64_t i = 0; i < pages; i++) {
        int64_t slot = slots.data[i * step];
        if (slot < 0 && size > 1) {
            Py_DECREF(bytes);
            Py_RETURN_NONE;
        }
        ids[i] = slot / size;
    }
    return bytes;
}

/* -- frees ------------------------------------------------------------------------------------ */

static int
read_number(PyObject *object, PyObject *name, int64_t *number)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL) {
        return 0;
    }
    *number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return !(*number == -1 && PyErr_Occurred());
}

typedef struct {
    PyObject_HEAD
    PyObject *full, *swa;
    Py_buffer rows;
    int64_t page_size, num_rows;
    int stacks;
    int64_t full_capacity, swa_capacity;
} Releaser;

/* Where one side's free list stands. */
typedef struct {
    PyObject *list;
    int64_t *store;
    int64_t head, end;
} Ends;

/* 1: read, 0: a group is open, -1: an error is set. */
static int
read_ends(PyObject *side, Ends *ends)
{
    PyObject *open = PyObject_GetAttr(side, name_group_open);
    if (open == NULL) {
        return -1;
    }
    int closed = open == Py_False;
    Py_DECREF(open);
    if (!closed) {
        return 0;
    }
    int64_t address;
    ends->list = PyObject_GetAttr(side, name_free_list);
    if (ends->list == NULL) {
        return -1;
    }
    if (!read_number(ends->list, name_head, &ends->head) ||
        !read_number(ends->list, name_end, &ends->end) ||
        !read_number(ends->list, name_address, &address)) {
        Py_CLEAR(ends->list);
        return -1;
    }
    ends->store = (int64_t *)(intptr_t)address;
    return 1;
}

/* Where the next pages go, and NULL if there is no room without moving or at all. */
static int64_t *
place_of(const Ends *ends, int stack, int64_t capacity, int64_t pages)
{
    if (pages > capacity) {
        return NULL;
    }
    if (stack) {
        return ends->head >= pages ? ends->store + ends->head - pages : NULL;
    }
    int fits = ends->end + pages <= 2 * capacity && ends->end - ends->head + pages <= capacity;
    return fits ? ends->store + ends->end : NULL;
}

static int
commit(const Ends *ends, int stack, int64_t pages)
{
    PyObject *number = PyLong_FromLongLong(stack ? ends->head - pages : ends->end + pages);
    if (number == NULL) {
        return 0;
    }
    int failed = PyObject_SetAttr(ends->list, stack ? name_head : name_end, number);
    Py_DECREF(number);
    return failed == 0;
}

static int64_t
give(Releaser *self, const Vector *slots, int64_t pages, const Ends *full, const Ends *swa)
{
    int64_t size = self->page_size, *rows = self->rows.buf, found = 0, step;
    const char *data = (const char *)slots->data, *start = self->rows.buf;
    /* An index that lies in the mapping would change while it is being read. */
    if ((data >= start && data < start + self->rows.len) ||
        __builtin_mul_overflow(slots->stride, size, &step)) {
        return -1;
    }
    int64_t *ids = full ? place_of(full, self->stacks, self->full_capacity, pages) : NULL;
    int64_t *peers = place_of(swa, self->stacks, self->swa_capacity, pages);
    if (peers == NULL || (full && ids == NULL)) {
        return -1;
    }
    for (int64_t i = 0; i < pages; i++) {
        int64_t slot = slots->data[i * step], page = slot / size;
        if (slot < 0 || page >= self->num_rows) {
            return -1;
        }
        int64_t peer = rows[page * size];
        if (ids) {
            ids[i] = page;
        }
        if (peer > 0) {
            peers[found++] = peer;
        }
    }
    if (self->stacks && found < pages) {
        memmove(peers + pages - found, peers, found * sizeof(int64_t));
    }
    if ((full && !commit(full, self->stacks, pages)) || !commit(swa, self->stacks, found)) {
        return -2;
    }
    for (int64_t i = 0; i < pages; i++) {
        int64_t page = ids ? ids[i] : slots->data[i * step] / size;
        memset(rows + page * size, 0, size * sizeof(int64_t));
    }
    return found;
}

/* release(index, with_full, start_pos=0): see `GivingAllocator._release_at_once`. */
static PyObject *
releaser_release(Releaser *self, PyObject *const *args, Py_ssize_t count)
{
    Vector slots;
    int64_t size = self->page_size, found = -1, pages;
    if (count < 2 || count > 3) {
        PyErr_SetString(PyExc_TypeError, "release: expected index, with_full and start_pos");
        return NULL;
    }
    if (self->full == NULL || self->swa == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "release: expected a Releaser that was initialised");
        return NULL;
    }
    int with_full = args[1] == Py_True;
    if ((count > 2 && !is_start(args[2], size)) || !as_vector(args[0], &slots)) {
        return PyLong_FromLong(-1);
    }
    pages = pages_in(&slots, size);
    Ends full = {NULL}, swa = {NULL};
    int ready = read_ends(self->swa, &swa);
    if (ready > 0) {
        ready = read_ends(self->full, &full);
    }
    if (ready > 0) {
        found = give(self, &slots, pages, with_full ? &full : NULL, &swa);
    }
    Py_XDECREF(full.list);
    Py_XDECREF(swa.list);
    if (ready < 0 || found == -2) {
        return NULL;
    }
    return PyLong_FromLongLong(found < 0 ? -1 : with_full ? pages - found : found);
}

static int
releaser_init(Releaser *self, PyObject *args, PyObject *kwds)
{
    static char *names[] = {"full", "swa", "mapping", "page_size", "num_rows", "stacks",
                            "full_capacity", "swa_capacity", NULL};
    PyObject *full, *swa, *mapping;
    long long size, rows, full_capacity, swa_capacity;
    int stacks;
    if (!PyArg_ParseTupleAndKeywords(args, kwds, "OOOLLpLL", names, &full, &swa, &mapping, &size,
                                     &rows, &stacks, &full_capacity, &swa_capacity)) {
        return -1;
    }
    Py_buffer found;
    if (PyObject_GetBuffer(mapping, &found, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    if (size < 1 || rows < 0 || rows > found.len / (Py_ssize_t)sizeof(int64_t) / size) {
        PyBuffer_Release(&found);
        PyErr_SetString(PyExc_ValueError, "Releaser: expected a mapping of num_rows pages");
        return -1;
    }
    if (self->rows.obj != NULL) {
        PyBuffer_Release(&self->rows);
    }
    self->rows = found;
    Py_XSETREF(self->full, Py_NewRef(full));
    Py_XSETREF(self->swa, Py_NewRef(swa));
    self->page_size = size;
    self->num_rows = rows;
    self->stacks = stacks;
    self->full_capacity = full_capacity;
    self->swa_capacity = swa_capacity;
    return 0;
}

static int
releaser_traverse(Releaser *self, visitproc visit, void *arg)
{
    Py_VISIT(self->full);
    Py_VISIT(self->swa);
    return 0;
}

static int
releaser_clear(Releaser *self)
{
    Py_CLEAR(self->full);
    Py_CLEAR(self->swa);
    return 0;
}

static void
releaser_dealloc(Releaser *self)
{
    PyObject_GC_UnTrack(self);
    releaser_clear(self);
    if (self->rows.obj != NULL) {
        PyBuffer_Release(&self->rows);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef releaser_methods[] = {
    {"release", (PyCFunction)(void (*)(void))releaser_release, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ReleaserType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvcore._native.Releaser",
    .tp_basicsize = sizeof(Releaser),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)releaser_init,
    .tp_dealloc = (destructor)releaser_dealloc,
    .tp_traverse = (traverseproc)releaser_traverse,
    .tp_clear = (inquiry)releaser_clear,
    .tp_methods = releaser_methods,
};

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, NULL},
    {"copied", (PyCFunction)(void (*)(void))copied, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvcore._native",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    name_head = PyUnicode_InternFromString("_head");
    name_end = PyUnicode_InternFromString("_end");
    name_address = PyUnicode_InternFromString("_address");
    name_free_list = PyUnicode_InternFromString("free_list");
    name_group_open = PyUnicode_InternFromString("_group_open");
    if (!name_head || !name_end || !name_address || !name_free_list || !name_group_open ||
        PyType_Ready(&ReleaserType) < 0) {
        return NULL;
    }
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (PyModule_AddIntConstant(made, "LAYOUT", KVCORE_LAYOUT) < 0 ||
                         PyModule_AddObjectRef(made, "Releaser", (PyObject *)&ReleaserType) < 0)) {
        Py_CLEAR(made);
    }
    return made;
}
