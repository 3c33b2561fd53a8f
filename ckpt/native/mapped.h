/* Parts of files that are read where the page cache has them, without a copy by the kernel. */
#ifndef CKPT_NATIVE_MAPPED_H
#define CKPT_NATIVE_MAPPED_H

#include <stdint.h>

/* It takes no lock and allocates nothing, for it may be interrupted anywhere, and not continued. */
typedef int use_bytes(void *context, const uint8_t *data, uint64_t start, uint64_t bytes);

/* Call `use` with the bytes from `start` to `end` of a file, and put what it returns into `result`. Others may write to
 * them meanwhile. Returns 0 if that was not possible, or was interrupted: then read in another way, which tells what is
 * wrong with the file, if anything is. */
int ckpt_use_mapped(int fd, uint64_t start, uint64_t end, use_bytes *use, void *context, int *result);

#endif
