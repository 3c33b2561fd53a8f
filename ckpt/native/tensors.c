/* What PyTorch says of many tensors, in a single call that keeps the global interpreter lock. */
#include <stdint.h>
#include <string.h>

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

enum { UNREADABLE = -1, NO_ROOM = -2, AHEAD = 8, LINES = 3, LINE_BYTES = 64, HEAD = 3 };

/* Write the address of each tensor's elements, and into `described` its dtype, device, number of dimensions, sizes and
 * strides. A tensor is a word that points to its implementation, as an at::Tensor is. Returns how many words were
 * written to `described`; UNREADABLE if a tensor has not the layout `strided`; NO_ROOM if there are more than `room`. */
int64_t ckpt_describe_tensors(void *const *tensors, uint64_t count, const struct getters *get, int32_t strided,
                              uint64_t *addresses, int64_t *described, int64_t room) {
    int64_t *next = described, *end = described + room;
    for (uint64_t n = 0; n < count; n++) {
        if (n + AHEAD < count) /* they are in no cache after a training step */
            for (int line = 0; line < LINES; line++)
                __builtin_prefetch((const char *)tensors[n + AHEAD] + line * LINE_BYTES);
        const void *tensor = tensors + n;
        int32_t layout, dtype, device_type, device_index;
        int64_t dim, *sizes, *strides;
        if (get->layout(tensor, &layout) || layout != strided) return UNREADABLE;
        if (get->data(tensor, addresses + n) || get->dim(tensor, &dim) || get->sizes(tensor, &sizes) ||
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
