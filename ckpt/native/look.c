/* One pass over the containers, objects and modules of a state: its structure, and its tensors.
 *
 * The few functions that are used of Python's stable interface are declared here, as many machines with a compiler have
 * not its headers. All of this runs with the global interpreter lock. After a training step none of the objects is in a
 * cache, so that most of the time goes into waiting for memory, unless it is asked for ahead. */
#include <stdint.h>
#include <stdlib.h>

typedef struct object object;
object *PyDict_GetItemWithError(object *, object *);
int PyDict_Next(object *, intptr_t *, object **, object **);
intptr_t PyDict_Size(object *);
void PyErr_Clear(void);
object *PyErr_NoMemory(void);
object *PyErr_Occurred(void);
int PyList_Append(object *, object *);
object *PyList_GetItem(object *, intptr_t);
intptr_t PyList_Size(object *);
int PyList_SetSlice(object *, intptr_t, intptr_t, object *);
long PyLong_AsLong(object *);
object *PyLong_FromSsize_t(intptr_t);
object *PyObject_CallFunctionObjArgs(object *, ...);
object *PyObject_CallMethod(object *, const char *, const char *, ...);
object *PyObject_GenericGetAttr(object *, object *);
object *PyObject_GenericGetDict(object *, void *);
int PyObject_RichCompareBool(object *, object *, int);
int PySequence_Contains(object *, object *);
object *PySequence_List(object *);
object *PyTuple_GetItem(object *, intptr_t);
void Py_DecRef(object *);
void Py_IncRef(object *);
extern object PySet_Type;

/* The kinds of nodes; those before KINDS are also written into the structure. As `Kind` in state_look.py. */
enum { TENSOR, PART, DICT, ORDERED, LIST, TUPLE, MODULE, ASKED, ABSENT, DTENSOR, KINDS, OTHER = KINDS, EACH };

/* The results of a look at a node. NO_MODULE says that a module has to be asked. */
enum { FAILED = -1, FINE, DIFFERENT, UNKNOWN, NO_MODULE };

/* The attributes of a module that its state dict is made of, in the order of NAMES in state_look.py; and those that it
 * has not, unless it makes the state dict in its own way. */
enum { PARAMETERS, BUFFERS, MODULES, SKIPPED, HOOKS, PRE_HOOKS, TABLES, NAMES = TABLES + 2 };

enum { EQUAL = 2, MOST_NESTED = 100, SLOTS = 32, LINE = 64, BLOCK = 16, AHEAD = 12, NEAR = 6 };

/* The same fields, in this order, as _Look in compiled.py. */
struct look {
    object *kinds;    /* dict of the kinds of types. If it has none, or EACH, `classify` is asked for each object. */
    object *classify; /* returns the kind of an object */
    object *ask;      /* returns what is to be compared of an object, and its state dict */
    object *call_hook; /* calls the hook before the state dict of a module; returns None if it is not a known one */
    object *marks[KINDS]; /* the kinds as Python's numbers */
    object *names[NAMES];
    object *none, *dict, *text, *number; /* None, and types: dict, and those of keys */
    object *local, *spec;         /* names of what is in a DTensor */
    object *structure;            /* list: what is found is appended, or compared with it */
    /* Lists of what is found. Of a DTensor, `tensors` has the local one; `specs` has those that are not the one before.
     * `read` has the modules that were not asked. */
    object *tensors, *dtensors, *specs, *parts, *read;
    int64_t at, length;             /* of the structure, if it is compared; else -1 */
    int64_t calls;                  /* of `classify`, `ask` and `call_hook`, which may change the state */
    int64_t hook_calls;             /* `calls` when `hook` was called */
    object *hook;                   /* the last one */
    object *last_spec;
    object *types[SLOTS];           /* some of `kinds`; at first NULL */
    int64_t codes[SLOTS];
};

static object *type_of(const object *node) { return ((object *const *)node)[1]; }

static int append(object *list, object *item) { return PyList_Append(list, item) ? FAILED : FINE; }

/* Have in the caches what the first words of an object point to. Where they do not, it has no effect, but takes time:
 * counts are below 4 GiB. */
static void prefetch_inner(const object *node, int lines) {
    for (int word = 2; word < 6; word++) {
        const char *inner = ((const char *const *)node)[word];
        for (int line = 0; (uintptr_t)inner >> 32 && line < lines; line++) __builtin_prefetch(inner + line * LINE);
    }
}

/* ---------------------------------------------------------- structure ---------------------------------------------- */

static object *expected(struct look *look) {
    return look->at < look->length ? PyList_GetItem(look->structure, look->at++) : NULL;
}

static int note(struct look *look, int kind) {
    object *mark = look->marks[kind];
    if (look->at < 0) return append(look->structure, mark);
    return expected(look) == mark ? FINE : DIFFERENT;
}

static int note_equal(struct look *look, object *item) {
    if (look->at < 0) return append(look->structure, item);
    object *before = expected(look);
    if (before == item) return FINE;
    if (!before || type_of(before) != type_of(item)) return DIFFERENT;
    int equal = PyObject_RichCompareBool(before, item, EQUAL);
    return equal < 0 ? FAILED : equal ? FINE : DIFFERENT;
}

static int note_count(struct look *look, intptr_t count) {
    object *number = count < 0 ? NULL : PyLong_FromSsize_t(count);
    if (!number) return FAILED;
    int result = note_equal(look, number);
    Py_DecRef(number);
    return result;
}

static int note_key(struct look *look, object *key) {
    if (type_of(key) != look->text && type_of(key) != look->number) return UNKNOWN; /* such as True, which equals 1 */
    return note_equal(look, key);
}

static int kind_of(struct look *look, object *node) {
    object *type = type_of(node);
    uintptr_t slot = ((uintptr_t)type >> 4 ^ (uintptr_t)type >> 9) % SLOTS;
    if (look->types[slot] == type) return (int)look->codes[slot];
    object *known = PyDict_GetItemWithError(look->kinds, type);
    if (!known && PyErr_Occurred()) return FAILED;
    long kind = known ? PyLong_AsLong(known) : EACH;
    if (kind != EACH) {
        look->types[slot] = type, look->codes[slot] = kind;
        return (int)kind;
    }
    look->calls++;
    object *found = PyObject_CallFunctionObjArgs(look->classify, node, NULL);
    if (!found) return FAILED;
    kind = PyLong_AsLong(found);
    Py_DecRef(found);
    return (int)kind;
}

/* Take a tensor of a kind; of a DTensor the local one, if that is plain. No code of a program runs before `tensor` is
 * used for the last time: it may be borrowed. */
static int take_tensor(struct look *look, int kind, object *tensor) {
    int result = note(look, kind);
    if (result || kind == TENSOR) return result ? result : append(look->tensors, tensor);
    if ((result = append(look->dtensors, tensor))) return result;
    object *spec = PyObject_GenericGetAttr(tensor, look->spec);
    object *local = spec ? PyObject_GenericGetAttr(tensor, look->local) : NULL;
    if (!local) PyErr_Clear(), result = UNKNOWN;
    if (!result && spec != look->last_spec) result = append(look->specs, look->last_spec = spec);
    if (!result) result = note_count(look, PyList_Size(look->specs));
    if (!result) kind = kind_of(look, local);
    if (!result) result = kind == TENSOR ? append(look->tensors, local) : kind == FAILED ? FAILED : UNKNOWN;
    if (spec) Py_DecRef(spec);
    if (local) Py_DecRef(local);
    return result;
}

/* ----------------------------------------------------------- modules ----------------------------------------------- */

/* What is read of a module, kept meanwhile: `classify` lets other threads run. */
struct module {
    object *attributes, *tables[TABLES], *pre_hook;
    int is_kept;
};

static void release(struct module *modules, int count) {
    for (int n = 0; n < count; n++) {
        if (modules[n].attributes) Py_DecRef(modules[n].attributes);
        for (int table = 0; modules[n].is_kept && table < HOOKS; table++) Py_DecRef(modules[n].tables[table]);
        if (modules[n].pre_hook) Py_DecRef(modules[n].pre_hook);
    }
}

/* NO_MODULE if a module has not all tables, or makes its state dict in its own way. */
static int find_tables(struct look *look, struct module *module) {
    for (int name = 0; name < NAMES; name++) {
        object *found = PyDict_GetItemWithError(module->attributes, look->names[name]);
        if (!found && PyErr_Occurred()) return FAILED;
        if (!found != (name >= TABLES)) return NO_MODULE;
        if (name < TABLES) __builtin_prefetch(module->tables[name] = found);
    }
    return FINE;
}

/* Only tables of types that run no code of a program when they are read. */
static int check_tables(struct look *look, struct module *module) {
    intptr_t hooks = PyDict_Size(module->tables[HOOKS]), pre_hooks = PyDict_Size(module->tables[PRE_HOOKS]), at = 0;
    if (hooks < 0 || pre_hooks < 0) PyErr_Clear();
    if (hooks || pre_hooks < 0 || pre_hooks > 1) return NO_MODULE;
    if (type_of(module->tables[SKIPPED]) != &PySet_Type) return NO_MODULE;
    for (int table = PARAMETERS; table <= MODULES; table++)
        if (type_of(module->tables[table]) != look->dict) return NO_MODULE;
    for (int table = PARAMETERS; table < HOOKS; table++) Py_IncRef(module->tables[table]);
    module->is_kept = 1;
    object *key, *hook;
    if (pre_hooks && PyDict_Next(module->tables[PRE_HOOKS], &at, &key, &hook)) Py_IncRef(module->pre_hook = hook);
    prefetch_inner(module->tables[PARAMETERS], 2);
    return FINE;
}

/* Find the tables of a block of modules. Each step has in the caches what the next ones will read. */
static int prepare(struct look *look, object *const *nodes, int count, struct module *modules) {
    int result = FINE;
    for (int n = 0; n < count; n++) __builtin_prefetch(nodes[n]), __builtin_prefetch((const char *)nodes[n] - LINE / 2);
    for (int n = 0; n < count; n++) {
        int kind = kind_of(look, nodes[n]);
        if (kind != MODULE) return kind == FAILED ? FAILED : NO_MODULE;
        modules[n].attributes = PyObject_GenericGetDict(nodes[n], NULL);
        if (!modules[n].attributes) return FAILED;
    }
    for (int n = 0; n < count; n++) prefetch_inner(modules[n].attributes, 8);
    for (int n = 0; !result && n < count; n++) result = find_tables(look, &modules[n]);
    for (int n = 0; !result && n < count; n++) result = check_tables(look, &modules[n]);
    for (int n = 0; !result && n < count; n++) {
        object *key, *value;
        for (intptr_t at = 0; PyDict_Next(modules[n].tables[PARAMETERS], &at, &key, &value);) __builtin_prefetch(value);
    }
    return result;
}

/* Take the parameters or buffers of a module, but for those that are None or `skipped`. */
static int take_tensors(struct look *look, object *table, object *skipped) {
    intptr_t count = PyDict_Size(table);
    int result = note_count(look, count);
    object *key, *value;
    for (intptr_t at = 0; count && !result && PyDict_Next(table, &at, &key, &value);) {
        int absent = value == look->none ? 1 : skipped ? PySequence_Contains(skipped, key) : 0;
        if (absent < 0) return FAILED;
        int kind = absent ? ABSENT : kind_of(look, value);
        if (!absent && kind != TENSOR && kind != DTENSOR) return kind == FAILED ? FAILED : NO_MODULE;
        if ((result = note_key(look, key))) return result;
        result = absent ? note(look, ABSENT) : take_tensor(look, kind, value);
    }
    return result;
}

/* Call the hook that PyTorch calls before it reads the tables of a module; NO_MODULE if it is not a known one. Several
 * modules have the same, which need not be called again if no other code ran since. */
static int call_hook(struct look *look, object *hook, object *module) {
    if (hook == look->hook && look->calls == look->hook_calls) return FINE;
    object *called = PyObject_CallFunctionObjArgs(look->call_hook, hook, module, NULL);
    if (!called) return FAILED;
    Py_DecRef(called);
    if (called == look->none) return NO_MODULE;
    look->hook = hook;
    look->hook_calls = ++look->calls;
    return FINE;
}

static int read_modules(struct look *look, object *const *nodes, intptr_t count, int depth);

/* Take the modules in a module, but for those that are None. */
static int take_modules(struct look *look, object *table, int depth) {
    intptr_t count = PyDict_Size(table), found = 0;
    int result = note_count(look, count);
    if (result || !count) return result;
    object **children = malloc((size_t)count * sizeof *children), *key, *value;
    if (!children) return PyErr_NoMemory(), FAILED;
    for (intptr_t at = 0; !result && found < count && PyDict_Next(table, &at, &key, &value);) {
        result = note_key(look, key);
        if (!result) result = note(look, value == look->none ? ABSENT : MODULE);
        if (!result && value != look->none) Py_IncRef(children[found++] = value);
    }
    if (!result) result = read_modules(look, children, found, depth + 1);
    while (found) Py_DecRef(children[--found]);
    free(children);
    return result;
}

static int read_modules(struct look *look, object *const *nodes, intptr_t count, int depth) {
    int result = depth > MOST_NESTED ? UNKNOWN : FINE;
    for (intptr_t first = 0; !result && first < count; first += BLOCK) {
        int some = count - first < BLOCK ? (int)(count - first) : BLOCK;
        struct module modules[BLOCK] = {0};
        result = prepare(look, nodes + first, some, modules);
        for (int n = 0; !result && n < some; n++) {
            object **tables = modules[n].tables;
            if (modules[n].pre_hook) result = call_hook(look, modules[n].pre_hook, nodes[first + n]);
            if (!result) result = take_tensors(look, tables[PARAMETERS], NULL);
            if (!result) result = take_tensors(look, tables[BUFFERS], tables[SKIPPED]);
            if (!result) result = take_modules(look, tables[MODULES], depth);
        }
        release(modules, some);
    }
    return result;
}

/* Read a module without asking it. Where that is impossible, nothing is left of the attempt. */
static int read_module(struct look *look, object *node, int depth) {
    intptr_t noted = PyList_Size(look->structure), tensors = PyList_Size(look->tensors);
    intptr_t dtensors = PyList_Size(look->dtensors), specs = PyList_Size(look->specs);
    object *last_spec = look->last_spec;
    int result = note(look, MODULE);
    if (!result) result = read_modules(look, &node, 1, depth);
    if (!result && PyList_Size(look->tensors) == tensors) result = NO_MODULE; /* its state dict is a value */
    if (!result) return append(look->read, node);
    if (result != NO_MODULE) return result;
    if (look->at >= 0) return DIFFERENT;
    if (PyList_SetSlice(look->structure, noted, PyList_Size(look->structure), NULL)) return FAILED;
    if (PyList_SetSlice(look->dtensors, dtensors, PyList_Size(look->dtensors), NULL)) return FAILED;
    look->last_spec = last_spec;
    if (PyList_SetSlice(look->specs, specs, PyList_Size(look->specs), NULL)) return FAILED;
    return PyList_SetSlice(look->tensors, tensors, PyList_Size(look->tensors), NULL) ? FAILED : NO_MODULE;
}

/* ------------------------------------------------------------ nodes ------------------------------------------------ */

static int walk(struct look *look, object *node, int depth);

/* Have in the caches what will be read of the nodes after this one. */
static void prefetch(object *const *nodes, intptr_t count, intptr_t n, const struct look *look) {
    object *key, *value;
    if (n + AHEAD < count && type_of(nodes[n + AHEAD]) == look->dict) prefetch_inner(nodes[n + AHEAD], 2);
    if (n + NEAR < count && type_of(nodes[n + NEAR]) == look->dict)
        for (intptr_t at = 0; at < NEAR && PyDict_Next(nodes[n + NEAR], &at, &key, &value);) __builtin_prefetch(value);
}

static int walk_all(struct look *look, object *const *nodes, intptr_t count, int depth) {
    int result = FINE;
    for (intptr_t n = 0; !result && n < count; n++) {
        prefetch(nodes, count, n, look);
        result = walk(look, nodes[n], depth);
    }
    return result;
}

/* Whether a dict still has these items, as an object that was asked may have replaced some of them. */
static int has_items(object *dict, object *const *items, intptr_t count) {
    intptr_t n = 0;
    object *key, *value;
    for (intptr_t at = 0; PyDict_Next(dict, &at, &key, &value); n++)
        if (n >= count || items[n] != value) return 0;
    return n == count;
}

/* Look at the items of a dict, in its order. They are kept meanwhile. */
static int walk_dict(struct look *look, object *dict, int depth) {
    intptr_t count = PyDict_Size(dict), found = 0, kept = 0;
    int result = note_count(look, count);
    if (result) return result;
    object **items = malloc((size_t)count * sizeof *items), *key, *value;
    if (!items) return PyErr_NoMemory(), FAILED;
    for (intptr_t at = 0; !result && found < count && PyDict_Next(dict, &at, &key, &value);) {
        result = note_key(look, key);
        __builtin_prefetch(items[found++] = value);
        if (found > AHEAD) Py_IncRef(items[kept++]);
    }
    while (kept < found) Py_IncRef(items[kept++]);
    int64_t calls = look->calls;
    if (!result) result = walk_all(look, items, found, depth + 1);
    if (!result && look->calls != calls && !has_items(dict, items, found)) result = DIFFERENT;
    while (found) Py_DecRef(items[--found]);
    free(items);
    return result;
}

/* Note the keys of a dict that has another order of its own. */
static int note_keys(struct look *look, object *dict) {
    object *keys = PySequence_List(dict);
    if (!keys) return FAILED;
    int result = note_count(look, PyList_Size(keys));
    for (intptr_t n = 0; !result && n < PyList_Size(keys); n++) result = note_key(look, PyList_GetItem(keys, n));
    Py_DecRef(keys);
    return result;
}

/* Return the items of a list or tuple, or the values of a dict, as a new list. */
static object *items_of(object *container, int is_dict) {
    if (!is_dict) return PySequence_List(container);
    object *values = PyObject_CallMethod(container, "values", NULL), *items = values ? PySequence_List(values) : NULL;
    if (values) Py_DecRef(values);
    return items;
}

static int walk_items(struct look *look, object *container, int is_dict, int depth) {
    object *items = items_of(container, is_dict), *again = NULL;
    if (!items) return FAILED;
    intptr_t count = PyList_Size(items);
    int64_t calls = look->calls;
    int result = is_dict ? FINE : note_count(look, count);
    for (intptr_t n = 0; !result && n < count; n++) result = walk(look, PyList_GetItem(items, n), depth + 1);
    if (!result && look->calls != calls) {
        if (!(again = items_of(container, is_dict))) result = FAILED;
        if (!result && PyList_Size(again) != count) result = DIFFERENT;
        for (intptr_t n = 0; !result && n < count; n++)
            if (PyList_GetItem(items, n) != PyList_GetItem(again, n)) result = DIFFERENT;
        if (again) Py_DecRef(again);
    }
    Py_DecRef(items);
    return result;
}

static int walk_asked(struct look *look, object *node, int depth) {
    int result = note(look, ASKED);
    if (result) return result;
    look->calls++;
    object *asked = PyObject_CallFunctionObjArgs(look->ask, node, NULL);
    if (!asked) return FAILED;
    result = note_equal(look, PyTuple_GetItem(asked, 0));
    if (!result) result = walk(look, PyTuple_GetItem(asked, 1), depth + 1);
    Py_DecRef(asked);
    return result;
}

static int walk(struct look *look, object *node, int depth) {
    if (depth > MOST_NESTED) return UNKNOWN;
    int kind = kind_of(look, node), result;
    if ((kind == DICT || kind == ORDERED) && !PyDict_Size(node)) kind = PART; /* which is a value */
    if (kind == MODULE) {
        /* One that was asked is asked again: `ask` does no harm, and other ranks may do it, too. */
        int was_asked = look->at >= 0 && look->at < look->length &&
                        PyList_GetItem(look->structure, look->at) == look->marks[ASKED];
        result = was_asked ? NO_MODULE : read_module(look, node, depth);
        if (result != NO_MODULE) return result;
        kind = ASKED;
    }
    if (kind == ASKED) return walk_asked(look, node, depth);
    if (kind < 0 || kind >= KINDS) return kind < 0 ? FAILED : UNKNOWN;
    if (kind == TENSOR || kind == DTENSOR) return take_tensor(look, kind, node);
    if ((result = note(look, kind))) return result;
    switch (kind) {
    case PART:
        return append(look->parts, node);
    case DICT:
        return walk_dict(look, node, depth);
    case ORDERED:
        result = note_keys(look, node);
        return result ? result : walk_items(look, node, 1, depth);
    default:
        return walk_items(look, node, 0, depth);
    }
}

/* Look at a state. Returns FINE; DIFFERENT from the structure; UNKNOWN if it cannot be known; FAILED with an exception. */
int ckpt_look(struct look *look, object *state) {
    int result = walk(look, state, 0);
    if (!result && look->at != look->length) return DIFFERENT;
    return result == NO_MODULE ? UNKNOWN : result;
}

/* The size of the arguments, which Python has to have the same. */
uint64_t ckpt_look_bytes(void) { return sizeof(struct look); }
