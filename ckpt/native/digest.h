/* The hash of memory under a secret key: see digest.c. */
#ifndef CKPT_NATIVE_DIGEST_H
#define CKPT_NATIVE_DIGEST_H

#include <stdint.h>

/* Hash memory in blocks of 8 KiB: 4 words of `hashes` for each block, also for the last one, which may be shorter. The key
 * has 2 words more than a block. */
void ckpt_hash(const uint8_t *data, uint64_t bytes, const uint64_t *key, uint64_t *hashes);

/* Whether memory has these hashes. Reads no block behind the first one that has not. */
int ckpt_has_hash(const uint8_t *data, uint64_t bytes, const uint64_t *key, const uint64_t *hashes);

#endif
