/* The hash of memory under a secret key: it tells whether memory differs, also from what an adversary has chosen.
 *
 * The hash of a block is a sum over its pairs of words, (a + key) * (b + next key), and the same with the key shifted by
 * two words. With integers that is NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway, 1999), and the shift is the
 * Toeplitz construction there; with polynomials over bits, which newer processors multiply 4 at a time, CLNH (Lemire,
 * Kaser, 2015). Where two blocks differ last, their sums differ by a product with one word of the key that no pair before
 * depends on: two different blocks have the same 32 bytes for one key in 2**128. */
#include <stdint.h>
#include <string.h>

#include "crc32c.h"
#include "digest.h"

enum { BLOCK_BYTES = 8192, STEP_BYTES = 64, SHIFT = 2 };

__extension__ typedef unsigned __int128 wide;

/* Both add to `hash`, and take whole steps of STEP_BYTES. */
static void hash_integers(const uint8_t *data, uint64_t count, const uint64_t *key, uint64_t *hash) {
    wide first = (wide)hash[1] << 64 | hash[0], second = (wide)hash[3] << 64 | hash[2];
    for (uint64_t n = 0; n < count; n += 2) {
        uint64_t words[2];
        memcpy(words, data + 8 * n, sizeof words);
        first += (wide)(words[0] + key[n]) * (words[1] + key[n + 1]);
        second += (wide)(words[0] + key[n + SHIFT]) * (words[1] + key[n + 1 + SHIFT]);
    }
    hash[0] = (uint64_t)first, hash[1] = (uint64_t)(first >> 64);
    hash[2] = (uint64_t)second, hash[3] = (uint64_t)(second >> 64);
}

#ifdef __x86_64__
#include <immintrin.h>

/* The products of the low with the high words of four pairs. */
#define PRODUCTS(pairs) _mm512_clmulepi64_epi128(pairs, pairs, 0x10)

__attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq"))) static void hash_polynomials(const uint8_t *data,
                                                                                             uint64_t count,
                                                                                             const uint64_t *key,
                                                                                             uint64_t *hash) {
    __m512i first = _mm512_setzero_si512(), second = _mm512_setzero_si512();
    for (uint64_t n = 0; n < count; n += 8) {
        __m512i words = _mm512_loadu_si512(data + 8 * n);
        __m512i keyed = _mm512_xor_si512(words, _mm512_loadu_si512(key + n));
        __m512i again = _mm512_xor_si512(words, _mm512_loadu_si512(key + n + SHIFT));
        first = _mm512_xor_si512(first, PRODUCTS(keyed));
        second = _mm512_xor_si512(second, PRODUCTS(again));
    }
    uint64_t sums[16];
    _mm512_storeu_si512(sums, first);
    _mm512_storeu_si512(sums + 8, second);
    for (int n = 0; n < 2; n++) {
        hash[n] ^= sums[n] ^ sums[n + 2] ^ sums[n + 4] ^ sums[n + 6];
        hash[n + 2] ^= sums[n + 8] ^ sums[n + 10] ^ sums[n + 12] ^ sums[n + 14];
    }
}
#else
#define hash_polynomials hash_integers
#endif

/* Hash a block. Zeros follow one that is not whole steps. */
static void hash_block(const uint8_t *data, uint64_t bytes, const uint64_t *key, uint64_t *hash) {
    void (*add)(const uint8_t *, uint64_t, const uint64_t *, uint64_t *) =
        ckpt_crc32c_level() == 2 ? hash_polynomials : hash_integers;
    uint64_t rest = bytes % STEP_BYTES, whole = bytes - rest;
    memset(hash, 0, 4 * sizeof *hash);
    add(data, whole / 8, key, hash);
    if (rest) {
        uint8_t last[STEP_BYTES] = {0};
        memcpy(last, data + whole, rest);
        add(last, STEP_BYTES / 8, key + whole / 8, hash);
    }
}

static uint64_t block_bytes(uint64_t left) { return left < BLOCK_BYTES ? left : BLOCK_BYTES; }

void ckpt_hash(const uint8_t *data, uint64_t bytes, const uint64_t *key, uint64_t *hashes) {
    for (uint64_t count; bytes; bytes -= count, data += count, hashes += 4) {
        count = block_bytes(bytes);
        hash_block(data, count, key, hashes);
    }
}

int ckpt_has_hash(const uint8_t *data, uint64_t bytes, const uint64_t *key, const uint64_t *hashes) {
    for (uint64_t count, hash[4]; bytes; bytes -= count, data += count, hashes += 4) {
        count = block_bytes(bytes);
        hash_block(data, count, key, hash);
        if (memcmp(hash, hashes, sizeof hash)) return 0;
    }
    return 1;
}
