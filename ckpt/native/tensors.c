/* What PyTorch says of many tensors, in a single call that keeps the global interpreter lock. */
#include <stdint.h>
#include <string.h>

/* Of Python's stable interface. */
typedef struct object object;
object *PyList_GetItem(object *, intptr_t);
intptr_t PyList_Size(object *);

/* Functions of libtorch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h), in the order of GETTERS in
 * planning/tensor_records.py. Each takes the address of a tensor and returns not 0 for an error. */
struct getters {
    int32_t (*layout)(const void *, int32_t *);
    int32_t (*data)(const void *, uint64_t *);
    int32_t (*dim)(const void *, int64_t *);
    int32_t (*sizes)(const void *, int64_t **);
    int32_t (*strides)(const void *, int64_t **);
    int32_t (*dtype)(const void *, int32_t *);
    int32_t (*device_type)(const void *, int32_t *);
    int32_t (*device_index)(const void *, int32_t *);
};

/* Where parts of objects are, in bytes; and the bits of the dispatch keys of a tensor that is conjugated or negated. As
 * Layout in tensor_records.py. */
struct layout {
    uint64_t implementation; /* of a tensor, in the object in Python: a pointer, and so an at::Tensor */
    uint64_t storage;        /* in the implementation: a pointer */
    uint64_t keys, other_keys;
};

enum { UNREADABLE = -1, NO_ROOM = -2, FAR = 24, AHEAD = 16, NEAR = 8, LINES = 3, LINE_BYTES = 64, HEAD = 3 };

static const char *at(const void *memory, uint64_t offset) { return (const char *)memory + offset; }

static const void *pointer_at(const void *memory, uint64_t offset) { return *(const void *const *)at(memory, offset); }

/* After a training step nothing of a tensor is in a cache: have it there in time. */
static void prefetch(object *tensors, int64_t n, int64_t count, const struct layout *layout) {
    if (n + FAR < count) __builtin_prefetch(PyList_GetItem(tensors, n + FAR));
    if (n + AHEAD < count)
        for (int line = 0; line < LINES; line++)
            __builtin_prefetch(at(pointer_at(PyList_GetItem(tensors, n + AHEAD), layout->implementation), line * LINE_BYTES));
    if (n + NEAR < count)
        __builtin_prefetch(
            pointer_at(pointer_at(PyList_GetItem(tensors, n + NEAR), layout->implementation), layout->storage));
}

/* Write the address of the elements of each tensor in a list, unless `addresses` is NULL, and into `described` its dtype, device, number of
 * dimensions, sizes and strides. Returns how many words were written to `described`; UNREADABLE if a tensor has not the
 * layout `strided`, or is conjugated or negated; NO_ROOM if there are more than `room`. */
int64_t ckpt_describe_tensors(object *tensors, const struct getters *get, int32_t strided, const struct layout *layout,
                              uint64_t *addresses, int64_t *described, int64_t room) {
    int64_t *next = described, *end = described + room, count = PyList_Size(tensors);
    for (int64_t n = 0; n < count; n++) {
        prefetch(tensors, n, count, layout);
        const void *tensor = at(PyList_GetItem(tensors, n), layout->implementation);
        int32_t code, dtype, device_type, device_index;
        int64_t dim, *sizes, *strides;
        if (*(const uint64_t *)at(pointer_at(tensor, 0), layout->keys) & layout->other_keys) return UNREADABLE;
        if (get->layout(tensor, &code) || code != strided) return UNREADABLE;
        if ((addresses && get->data(tensor, addresses + n)) || get->dim(tensor, &dim) || get->sizes(tensor, &sizes) ||
            get->strides(tensor, &strides) || get->dtype(tensor, &dtype) ||
            get->device_type(tensor, &device_type) || get->device_index(tensor, &device_index))
            return UNREADABLE;
        if (end - next < HEAD + 2 * dim) return NO_ROOM;
        *next++ = dtype;
        *next++ = (int64_t)device_type << 32 | (uint32_t)device_index;
        *next++ = dim;
        memcpy(next, sizes, (size_t)dim * sizeof *next);
        memcpy(next + dim, strides, (size_t)dim * sizeof *next);
        next += 2 * dim;
    }
    return next - described;
}
