/* Frames of Blosc, format 1, of a single block: the bytes of numbers in another order, compressed by zstd. */
#include <stdint.h>
#include <string.h>

/* ZSTD_compress2 of libzstd (zstd.h). What it returns for an error is larger than any `room`. */
typedef size_t compress2(void *context, void *to, size_t room, const void *from, size_t bytes);

enum { HEAD = 16, PLACE = 4, SIZE = 4, LEAST = 128 };
enum { VERSION = 2, ZSTD_VERSION = 1 };
enum { SHUFFLED = 1, STORED = 2, ZSTD = 4 << 5 }; /* flags */

/* Put the first bytes of all elements before the second ones, and so on; here those from `first` to `end`. Compilers use
 * vectors where the last three are constants, and the bytes no more than four. */
static inline __attribute__((always_inline)) void shuffle(uint8_t *restrict to, const uint8_t *restrict from,
                                                          size_t count, size_t size, size_t first, size_t end) {
    for (size_t n = 0; n < count; n++)
        for (size_t byte = first; byte < end; byte++) to[byte * count + n] = from[n * size + byte];
}

static void shuffle_2(uint8_t *to, const uint8_t *from, size_t count) { shuffle(to, from, count, 2, 0, 2); }
static void shuffle_4(uint8_t *to, const uint8_t *from, size_t count) { shuffle(to, from, count, 4, 0, 4); }
static void shuffle_8(uint8_t *to, const uint8_t *from, size_t count) {
    shuffle(to, from, count, 8, 0, 4);
    shuffle(to, from, count, 8, 4, 8);
}

static void put(uint8_t *to, uint64_t number) {
    for (int n = 0; n < 4; n++) to[n] = (uint8_t)(number >> (8 * n));
}

/* Write the frame of `bytes` bytes, which are elements of `size` bytes (2, 4 or 8), to `to`, where HEAD + `bytes`
 * bytes have room; return its size. `shuffled` is memory for `bytes` bytes. */
uint64_t ckpt_blosc_frame(compress2 *compress, void *context, const uint8_t *from, uint64_t bytes, uint64_t size,
                          uint8_t *shuffled, uint8_t *to) {
    uint64_t count = bytes / size, at = HEAD + PLACE, end = HEAD + bytes;
    (size == 2 ? shuffle_2 : size == 4 ? shuffle_4 : shuffle_8)(shuffled, from, count);
    int fits = count >= LEAST;
    for (const uint8_t *part = shuffled; fits && part < shuffled + bytes; part += count) {
        uint64_t room = at + SIZE < end ? end - at - SIZE : 0, most = room < count ? room : count - 1;
        uint64_t made = compress(context, to + at + SIZE, most, part, count);
        if (made > most && count <= room) memcpy(to + at + SIZE, part, made = count);
        fits = made <= room;
        if (!fits) break;
        put(to + at, made);
        at += SIZE + made;
    }
    if (!fits) memcpy(to + HEAD, from, bytes), at = end;
    to[0] = VERSION, to[1] = ZSTD_VERSION, to[2] = ZSTD | SHUFFLED | (fits ? 0 : STORED), to[3] = (uint8_t)size;
    put(to + 4, bytes), put(to + 8, bytes), put(to + 12, at);
    if (fits) put(to + HEAD, HEAD + PLACE);
    return at;
}
