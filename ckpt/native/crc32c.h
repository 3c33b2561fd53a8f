/* CRC-32C of memory, made while it is read once, and if wanted while it is copied. */
#ifndef CKPT_NATIVE_CRC32C_H
#define CKPT_NATIVE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of a stream whose checksum was `crc`, and that `data` continues. 0 is the checksum of nothing. */
uint32_t ckpt_crc32c(uint32_t crc, const uint8_t *data, size_t bytes);

/* The same, of the bytes that are stored at `to`, whatever others do to `from` meanwhile. No overlap. What was stored
 * may have gone past the caches: `ckpt_crc32c_copied`, after the last copy, puts it before what is stored later. */
uint32_t ckpt_crc32c_copy(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes);
void ckpt_crc32c_copied(void);

/* The checksum of what has the checksum `first`, followed by `second_bytes` bytes with the checksum `second`. */
uint32_t ckpt_crc32c_joined(uint32_t first, uint32_t second, uint64_t second_bytes);

/* Use the best way the processor has, but none above `most`: 0 is any processor, 1 x86-64 with 128 bits at a time, 2 with
 * 512. Returns what is used. At first, the best. Not while others call the functions above. */
int ckpt_crc32c_choose(int most);

/* What is used. */
int ckpt_crc32c_level(void);

#endif
