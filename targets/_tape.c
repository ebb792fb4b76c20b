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

/* What a method is called with, and what of it is written: `first` is the place of a number among
 * the arguments, 0 if there is none, `tensors` those of tensors; the first tensor is the body of the
 * record itself if there is `body`, the others are parts that follow it. */
typedef struct {
    const char *name;
    Py_ssize_t count;
    int number, tensors[3], body, lends;
} Form;

static const Form forms[] = {
    /* free_group_begin, free_group_end */
    {"bare", 1, 0, {0}, 0, 0},
    /* free: free_index, and whatever else takes one tensor */
    {"index", 2, 0, {1}, 1, 0},
    /* set_full_to_swa_mapping: full_indices, swa_indices; recover_tombstone */
    {"pair", 3, 0, {1, 2}, 1, 0},
    /* free_segment: free_index, start_pos */
    {"segment", 2, 2, {1}, 1, 0},
    /* alloc: need_size */
    {"number", 2, 1, {0}, 0, 1},
    /* alloc_extend: prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc,
     * extend_num_tokens */
    {"extend", 7, 6, {2, 4, 5}, 0, 1},
    /* alloc_decode: seq_lens, seq_lens_cpu, last_loc */
    {"decode", 4, 0, {2, 3}, 0, 1},
};

enum { FORMS = sizeof(forms) / sizeof(forms[0]), PARTS = 3 };

/* Tags of records that are no calls (kvcore.targets.recording_tape). */
enum { PART = 0x0F00, ANSWER = 0x0F01 };

/* Of a `Recorded`: what records unusual calls, what notes an error, what writes down an unusual
 * answer, the object whose calls are recorded, and whether its mapping has the peers of an answer.
 * Of an `Either`: what records calls on the first object and on the other one. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    State *tape;
    PyObject *method, *unusual, *failed, *answered, *owner, *names, *references;
    PyObject *first, *of_first, *of_other;
    const Form *form;
    uint16_t tag;
    int has_peers;
} Recorded;

static PyObject *name_start_pos, *name_mapping, *name_self;

/* One record. */
typedef struct {
    int64_t number;
    const void *body;
    int64_t size;
    uint16_t tag;
} Record;

/* Whether all of them are written: 0 if there is no room, and then nothing was. */
static int
write_records(State *tape, const Record *records, int count)
{
    int64_t total = 0;
    for (int i = 0; i < count; i++) {
        if (records[i].size > UINT32_MAX) {
            return 0;
        }
        total += HEAD + records[i].size;
    }
    if (tape->tail + total >= tape->room) {
        return 0;
    }
    char *at = (char *)(intptr_t)tape->address + tape->tail;
    for (int i = 0; i < count; i++) {
        uint32_t bytes = (uint32_t)records[i].size;
        if (bytes && records[i].body != at + HEAD) {
            memcpy(at + HEAD, records[i].body, bytes);
        }
        memcpy(at, &records[i].number, sizeof(int64_t));
        memcpy(at + SIZE_AT, &bytes, sizeof(bytes));
        /* Not before the rest, whenever the process ends. */
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        memcpy(at + TAG_AT, &records[i].tag, sizeof(uint16_t));
        at += HEAD + bytes;
    }
    tape->tail += total;
    return 1;
}

/* Whether an index is a vector whose numbers lie side by side. */
static int
as_row(PyObject *index, Vector *vector)
{
    return as_vector(index, vector) && vector->stride == 1;
}

/* Whether this is an int of Python's that a record can hold. */
static int
as_number(PyObject *object, int64_t *number)
{
    int overflow;
    if (!PyLong_CheckExact(object)) {
        return 0;
    }
    *number = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && *number >= -INT64_MAX;
}

/* Whether this is the plainest call there is, and written down. */
static int
is_written(Recorded *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const Form *form = self->form;
    Py_ssize_t named = names != NULL ? PyTuple_GET_SIZE(names) : 0;
    Record records[1 + PARTS] = {{0, NULL, 0, self->tag}};
    Vector vector;
    int used = 1;
    /* A start is given by name, everything else by place. */
    if (count != form->count || named != (form->number == form->count)) {
        return 0;
    }
    if (named && PyTuple_GET_ITEM(names, 0) != name_start_pos) {
        return 0;
    }
    if (form->number && !as_number(args[form->number], &records[0].number)) {
        return 0;
    }
    for (int i = 0; i < PARTS && form->tensors[i]; i++) {
        if (!as_row(args[form->tensors[i]], &vector)) {
            return 0;
        }
        Record *record = form->body && i == 0 ? &records[0] : &records[used++];
        record->body = vector.data;
        record->size = vector.size * (int64_t)sizeof(int64_t);
        if (record != &records[0]) {
            record->number = 0;
            record->tag = PART;
        }
    }
    return write_records(self->tape, records, used);
}

/* Whether a mapping names a peer of each slot; 0 leaves zeros. */
static int
write_peers(const Vector *slots, const Vector *mapping, char *peers)
{
    for (int64_t done = 0; done < slots->size; done++) {
        int64_t slot = slots->data[done];
        if (slot < 0 || slot >= mapping->size) {
            /* What lies behind the last record is zero. */
            memset(peers, 0, done * sizeof(int64_t));
            return 0;
        }
        /* Records begin anywhere, not where an int64 may. */
        memcpy(peers + done * sizeof(int64_t), &mapping->data[slot], sizeof(int64_t));
    }
    return 1;
}

/* The same with the peers of its slots. */
static int
is_answer_mapped(Recorded *self, PyObject *answer)
{
    State *tape = self->tape;
    Vector slots, mapping;
    /* Before all else is looked at: it may be a property, which may do anything. */
    PyObject *found = PyObject_GetAttr(self->owner, name_mapping);
    if (found == NULL) {
        /* What this is about shows again where Python writes the answer; an interrupt does not. */
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear();
        }
        return 0;
    }
    int is_written = 0;
    if (as_row(found, &mapping) && as_row(answer, &slots)) {
        int64_t size = slots.size * (int64_t)sizeof(int64_t);
        /* The peers go straight to where they are to be, in front of everything else. */
        if (tape->tail + 2 * (HEAD + size) < tape->room) {
            char *peers = (char *)(intptr_t)tape->address + tape->tail + 2 * HEAD + size;
            Record records[2] = {{0, slots.data, size, ANSWER}, {0, peers, size, PART}};
            is_written = write_peers(&slots, &mapping, peers) && write_records(tape, records, 2);
        }
    }
    Py_DECREF(found);
    return is_written;
}

/* Whether this is the plainest answer there is, and written down. */
static int
is_answer_written(Recorded *self, PyObject *answer)
{
    Vector slots;
    if (answer == Py_None) {
        Record refused = {-1, NULL, 0, ANSWER};
        return write_records(self->tape, &refused, 1);
    }
    if (self->has_peers) {
        return is_answer_mapped(self, answer);
    }
    if (!as_row(answer, &slots)) {
        return 0;
    }
    Record lent = {0, slots.data, slots.size * (int64_t)sizeof(int64_t), ANSWER};
    return write_records(self->tape, &lent, 1);
}

/* What a method is called on, or NULL. */
static PyObject *
object_of(PyObject *const *args, size_t flagged, PyObject *names)
{
    if (PyVectorcall_NARGS(flagged) > 0) {
        return args[0];
    }
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        if (PyTuple_GET_ITEM(names, i) == name_self) {
            return args[i];
        }
    }
    return NULL;
}

static PyObject *
recorded_call(PyObject *callable, PyObject *const *args, size_t flagged, PyObject *names)
{
    Recorded *self = (Recorded *)callable;
    State *tape = self->tape;
    if (tape->inside || object_of(args, flagged, names) != self->owner) {
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
        if (noted == NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
            /* An interrupt meanwhile is more than an error. */
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(traceback);
        } else {
            if (noted == NULL) {
                PyErr_WriteUnraisable(self->failed);
            }
            Py_XDECREF(noted);
            PyErr_Restore(type, error, traceback);
        }
    } else if (self->form->lends && !is_answer_written(self, answer)) {
        PyObject *said = PyErr_Occurred() ? NULL : PyObject_CallOneArg(self->answered, answer);
        if (said == NULL) {
            Py_CLEAR(answer);
        }
        Py_XDECREF(said);
    }
    tape->inside = 0;
    return answer;
}

static int
recorded_init(Recorded *self, PyObject *args, PyObject *kwds)
{
    static char *keys[] = {"tape",   "tag",      "form",   "method", "unusual",
                           "failed", "answered", "owner",  "has_peers", NULL};
    PyObject *tape, *method, *unusual, *failed, *answered, *owner;
    const char *name;
    unsigned short tag;
    int has_peers;
    if (!PyArg_ParseTupleAndKeywords(args, kwds, "O!HsOOOOOp", keys, &StateType, &tape, &tag,
                                     &name, &method, &unusual, &failed, &answered, &owner,
                                     &has_peers)) {
        return -1;
    }
    const Form *form = forms;
    while (form < forms + FORMS && strcmp(form->name, name) != 0) {
        form++;
    }
    if (form == forms + FORMS) {
        PyErr_Format(PyExc_ValueError, "Recorded: expected the name of a form, got %s", name);
        return -1;
    }
    self->form = form;
    self->call = recorded_call;
    self->tag = tag;
    Py_XSETREF(self->tape, (State *)Py_NewRef(tape));
    Py_XSETREF(self->method, Py_NewRef(method));
    Py_XSETREF(self->unusual, Py_NewRef(unusual));
    Py_XSETREF(self->failed, Py_NewRef(failed));
    Py_XSETREF(self->answered, Py_NewRef(answered));
    Py_XSETREF(self->owner, Py_NewRef(owner));
    self->has_peers = has_peers;
    return 0;
}

static PyObject *
either_call(PyObject *callable, PyObject *const *args, size_t flagged, PyObject *names)
{
    Recorded *self = (Recorded *)callable;
    PyObject *method = self->method;
    if (!self->tape->inside) {
        int is_first = object_of(args, flagged, names) == self->first;
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
    Py_VISIT(self->answered);
    Py_VISIT(self->owner);
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
    Py_CLEAR(self->answered);
    Py_CLEAR(self->owner);
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
    if (self->references != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
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
        .tp_weaklistoffset = offsetof(Recorded, references),                                      \
        .tp_getattro = PyObject_GenericGetAttr, .tp_setattro = PyObject_GenericSetAttr,           \
    }

static PyTypeObject RecordedType = METHOD_TYPE("Recorded", recorded_init);
static PyTypeObject EitherType = METHOD_TYPE("Either", either_init);

/* address_of(buffer): where its bytes are. Not by ctypes, which holds on to them for a while. */
static PyObject *
address_of(PyObject *Py_UNUSED(module), PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *address = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view);
    return address;
}

static PyMethodDef functions[] = {
    {"address_of", address_of, METH_O, NULL},
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
    name_mapping = PyUnicode_InternFromString("full_to_swa_index_mapping");
    name_self = PyUnicode_InternFromString("self");
    if (name_start_pos == NULL || name_mapping == NULL || name_self == NULL ||
        PyType_Ready(&StateType) < 0 || PyType_Ready(&RecordedType) < 0 ||
        PyType_Ready(&EitherType) < 0) {
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
