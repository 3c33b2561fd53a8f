/* The hash of whole pages under a secret key: it tells whether memory differs, also from what an adversary has chosen.
 *
 * The hash of a block is a sum over its pairs of words, (a + key) * (b + next key), and the same with the key shifted by
 * two words. With integers that is NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway, 1999), and the shift is the
 * Toeplitz construction there; with polynomials over bits, which newer processors multiply 4 at a time, CLNH (Lemire,
 * Kaser, 2015). Where two blocks differ last, their sums differ by a product with one word of the key that no pair before
 * depends on: two different blocks have the same 32 bytes for one key in 2**128. */
#include <stdint.h>
#include <string.h>

#include "crc32c.h"

enum { PAGE_WORDS = 512, BLOCK_WORDS = 2 * PAGE_WORDS, SHIFT = 2 };

__extension__ typedef unsigned __int128 wide;

static void hash_integers(const uint8_t *data, uint64_t count, const uint64_t *key, uint64_t *hash) {
    wide first = 0, second = 0;
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
        hash[n] = sums[n] ^ sums[n + 2] ^ sums[n + 4] ^ sums[n + 6];
        hash[n + 2] = sums[n + 8] ^ sums[n + 10] ^ sums[n + 12] ^ sums[n + 14];
    }
}
#else
#define hash_polynomials hash_integers
#endif

/* Hash `pages` pages at `data`, in blocks of 2, of which the last may have 1: 4 words of `hashes` for each block. The
 * key has BLOCK_WORDS + SHIFT words. */
void ckpt_hash_pages(const uint8_t *data, uint64_t pages, const uint64_t *key, uint64_t *hashes) {
    int is_wide = ckpt_crc32c_level() == 2;
    for (uint64_t left = pages * PAGE_WORDS, count; left; left -= count, data += 8 * count, hashes += 4) {
        count = left < BLOCK_WORDS ? left : BLOCK_WORDS;
        (is_wide ? hash_polynomials : hash_integers)(data, count, key, hashes);
    }
}
