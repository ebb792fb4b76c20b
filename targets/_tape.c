/* The shortest way of recording a call: kvcore.targets._tape.
 *
 * `State` is where a tape stands; the class of tapes extends it. `Recorded` is a method that writes
 * down what it is given and calls the method that it stands for. Only the plainest calls are written
 * here; all others are made through a function of Python's that records them
 * (kvcore.targets.recorder). `Either` is a method that two objects of one class share, each of which
 * is recorded in its own way.
 *
 * A record is a number (int64), the size of its body in bytes (uint32), two bytes of nothing, a tag
 * (uint16) and the body. The tag is written last: what has one is complete.
 */
#include "../kvcore/_vector.h"
#include <structmember.h>

enum { HEAD = 16, SIZE_AT = 8, TAG_AT = 14 };

typedef struct {
    PyObject_HEAD
    long long tail, room;
    unsigned long long address;
    char inside;
} State;

static PyMemberDef state_members[] = {
    {"tail", T_LONGLONG, offsetof(State, tail), 0, NULL},
    {"room", T_LONGLONG, offsetof(State, room), 0, NULL},
    {"address", T_ULONGLONG, offsetof(State, address), 0, NULL},
    {"inside", T_BOOL, offsetof(State, inside), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject StateType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvcore.targets._tape.State",
    .tp_basicsize = sizeof(State),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = state_members,
};

/* What a method is called with. */
enum { INDEX, SEGMENT, BARE };

/* Of a `Recorded`: what records unusual calls, and what notes an error. Of an `Either`: what records
 * calls on the first object and on the other one. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    State *tape;
    PyObject *method, *unusual, *failed, *names;
    PyObject *first, *of_first, *of_other;
    int kind;
    uint16_t tag;
} Recorded;

static PyObject *name_start_pos;

/* Whether the record is written: 0 if there is no room, and then nothing was. */
static int
write_record(State *tape, uint16_t tag, int64_t number, const void *body, int64_t size)
{
    if (size > UINT32_MAX || tape->tail + HEAD + size >= tape->room) {
        return 0;
    }
    char *at = (char *)(intptr_t)tape->address + tape->tail;
    uint32_t bytes = (uint32_t)size;
    if (size) {
        memcpy(at + HEAD, body, size);
    }
    memcpy(at, &number, sizeof(number));
    memcpy(at + SIZE_AT, &bytes, sizeof(bytes));
    /* Not before the rest, whenever the process ends. */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    memcpy(at + TAG_AT, &tag, sizeof(tag));
    tape->tail += HEAD + size;
    return 1;
}

/* Whether this is the plainest call there is, and written down. */
static int
is_written(Recorded *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Vector slots;
    Py_ssize_t named = names != NULL ? PyTuple_GET_SIZE(names) : 0;
    int64_t number = 0;
    if (self->kind == BARE) {
        return count == 1 && write_record(self->tape, self->tag, 0, NULL, 0);
    }
    if (count != 2 || named != (self->kind == SEGMENT)) {
        return 0;
    }
    if (self->kind == SEGMENT) {
        if (PyTuple_GET_ITEM(names, 0) != name_start_pos || !is_start(args[2], 1)) {
            return 0;
        }
        number = PyLong_AsLongLong(args[2]);
    }
    if (!as_vector(args[1], &slots) || (slots.stride != 1 && slots.size > 1)) {
        return 0;
    }
    return write_record(self->tape, self->tag, number, slots.data, slots.size * 8);
}

static PyObject *
recorded_call(PyObject *callable, PyObject *const *args, size_t flagged, PyObject *names)
{
    Recorded *self = (Recorded *)callable;
    State *tape = self->tape;
    if (tape->inside) {
        return PyObject_Vectorcall(self->method, args, flagged, names);
    }
    if (!is_written(self, args, PyVectorcall_NARGS(flagged), names)) {
        return PyObject_Vectorcall(self->unusual, args, flagged, names);
    }
    tape->inside = 1;
    PyObject *answer = PyObject_Vectorcall(self->method, args, flagged, names);
    if (answer == NULL) {
        PyObject *type, *error, *traceback, *noted;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        noted = PyObject_CallOneArg(self->failed, error);
        if (noted == NULL) {
            PyErr_WriteUnraisable(self->failed);
        }
        Py_XDECREF(noted);
        PyErr_Restore(type, error, traceback);
    }
    tape->inside = 0;
    return answer;
}

static int
recorded_init(Recorded *self, PyObject *args, PyObject *kwds)
{
    static char *keys[] = {"tape", "tag", "kind", "method", "unusual", "failed", NULL};
    PyObject *tape, *method, *unusual, *failed;
    const char *kind;
    unsigned short tag;
    if (!PyArg_ParseTupleAndKeywords(args, kwds, "O!HsOOO", keys, &StateType, &tape, &tag, &kind,
                                     &method, &unusual, &failed)) {
        return -1;
    }
    if (strcmp(kind, "index") == 0) {
        self->kind = INDEX;
    } else if (strcmp(kind, "segment") == 0) {
        self->kind = SEGMENT;
    } else if (strcmp(kind, "bare") == 0) {
        self->kind = BARE;
    } else {
        PyErr_Format(PyExc_ValueError, "expected index, segment or bare, got %s", kind);
        return -1;
    }
    self->call = recorded_call;
    self->tag = tag;
    Py_XSETREF(self->tape, (State *)Py_NewRef(tape));
    Py_XSETREF(self->method, Py_NewRef(method));
    Py_XSETREF(self->unusual, Py_NewRef(unusual));
    Py_XSETREF(self->failed, Py_NewRef(failed));
    return 0;
}

static PyObject *
either_call(PyObject *callable, PyObject *const *args, size_t flagged, PyObject *names)
{
    Recorded *self = (Recorded *)callable;
    PyObject *method = self->method;
    if (!self->tape->inside) {
        int is_first = PyVectorcall_NARGS(flagged) > 0 && args[0] == self->first;
        method = is_first ? self->of_first : self->of_other;
    }
    return PyObject_Vectorcall(method, args, flagged, names);
}

static int
either_init(Recorded *self, PyObject *args, PyObject *kwds)
{
    static char *keys[] = {"tape", "method", "first", "of_first", "of_other", NULL};
    PyObject *tape, *method, *first, *of_first, *of_other;
    if (!PyArg_ParseTupleAndKeywords(args, kwds, "O!OOOO", keys, &StateType, &tape, &method, &first,
                                     &of_first, &of_other)) {
        return -1;
    }
    self->call = either_call;
    Py_XSETREF(self->tape, (State *)Py_NewRef(tape));
    Py_XSETREF(self->method, Py_NewRef(method));
    Py_XSETREF(self->first, Py_NewRef(first));
    Py_XSETREF(self->of_first, Py_NewRef(of_first));
    Py_XSETREF(self->of_other, Py_NewRef(of_other));
    return 0;
}

/* As a function of Python's does: in an instance it is a method. */
static PyObject *
recorded_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static int
recorded_traverse(Recorded *self, visitproc visit, void *arg)
{
    Py_VISIT(self->tape);
    Py_VISIT(self->method);
    Py_VISIT(self->unusual);
    Py_VISIT(self->failed);
    Py_VISIT(self->names);
    Py_VISIT(self->first);
    Py_VISIT(self->of_first);
    Py_VISIT(self->of_other);
    return 0;
}

static int
recorded_clear(Recorded *self)
{
    Py_CLEAR(self->tape);
    Py_CLEAR(self->method);
    Py_CLEAR(self->unusual);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->names);
    Py_CLEAR(self->first);
    Py_CLEAR(self->of_first);
    Py_CLEAR(self->of_other);
    return 0;
}

static void
recorded_dealloc(Recorded *self)
{
    PyObject_GC_UnTrack(self);
    recorded_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define METHOD_TYPE(its_name, its_init)                                                           \
    {                                                                                             \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvcore.targets._tape." its_name,                \
        .tp_basicsize = sizeof(Recorded),                                                         \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |        \
                    Py_TPFLAGS_METHOD_DESCRIPTOR,                                                 \
        .tp_new = PyType_GenericNew, .tp_init = (initproc)its_init,                               \
        .tp_dealloc = (destructor)recorded_dealloc,                                               \
        .tp_traverse = (traverseproc)recorded_traverse, .tp_clear = (inquiry)recorded_clear,      \
        .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Recorded, call),           \
        .tp_descr_get = recorded_get, .tp_dictoffset = offsetof(Recorded, names),                 \
        .tp_getattro = PyObject_GenericGetAttr, .tp_setattro = PyObject_GenericSetAttr,           \
    }

static PyTypeObject RecordedType = METHOD_TYPE("Recorded", recorded_init);
static PyTypeObject EitherType = METHOD_TYPE("Either", either_init);

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvcore.targets._tape",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__tape(void)
{
    name_start_pos = PyUnicode_InternFromString("start_pos");
    if (name_start_pos == NULL || PyType_Ready(&StateType) < 0 ||
        PyType_Ready(&RecordedType) < 0 || PyType_Ready(&EitherType) < 0) {
        return NULL;
    }
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (PyModule_AddIntConstant(made, "LAYOUT", KVCORE_LAYOUT) < 0 ||
                         PyModule_AddObjectRef(made, "State", (PyObject *)&StateType) < 0 ||
                         PyModule_AddObjectRef(made, "Recorded", (PyObject *)&RecordedType) < 0 ||
                         PyModule_AddObjectRef(made, "Either", (PyObject *)&EitherType) < 0)) {
        Py_CLEAR(made);
    }
    return made;
}
