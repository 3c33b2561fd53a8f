/* The hash of whole pages under a secret key: it tells whether memory differs, also from what an adversary has chosen.
 *
 * Each page has its value of NH (UMAC: Black, Halevi, Krawczyk, Krovetz, Rogaway, 1999), with words of 64 bits, twice:
 * the second time with the key shifted by two words (the Toeplitz construction there). Two different pages have the same
 * 32 bytes for one key in 2**128. */
#include <stdint.h>
#include <string.h>

enum { PAGE_BYTES = 4096, WORDS = PAGE_BYTES / 8, SHIFT = 2 };

__extension__ typedef unsigned __int128 wide;

/* Hash `pages` pages at `data`: 4 words of `hashes` for each. The key has WORDS + SHIFT words. */
void ckpt_hash_pages(const uint8_t *data, uint64_t pages, const uint64_t *key, uint64_t *hashes) {
    for (uint64_t page = 0; page < pages; page++, data += PAGE_BYTES, hashes += 4) {
        wide first = 0, second = 0;
        for (int n = 0; n < WORDS; n += 2) {
            uint64_t words[2];
            memcpy(words, data + 8 * n, sizeof words);
            first += (wide)(words[0] + key[n]) * (words[1] + key[n + 1]);
            second += (wide)(words[0] + key[n + SHIFT]) * (words[1] + key[n + 1 + SHIFT]);
        }
        hashes[0] = (uint64_t)first, hashes[1] = (uint64_t)(first >> 64);
        hashes[2] = (uint64_t)second, hashes[3] = (uint64_t)(second >> 64);
    }
}
