/* CRC-32C by folding, with carry-less multiplication.
 *
 * Bytes are coefficients of a polynomial over GF(2), and their CRC is its remainder modulo P. A block of 128 bits that
 * lies D bits before another one can be multiplied with x^D mod P and added to it without changing the remainder: so
 * several blocks wide a window is folded over the data, down to 128 bits at the end, which the CPU's own CRC instruction
 * takes. The method is that of V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction" (Intel, 2009). The constants are computed when the library is loaded.
 *
 * All numbers are in the reflected order of bits: the highest power is the lowest bit.
 */
#include "crc32c.h"

#include <string.h>

#define REFLECTED_P UINT32_C(0x82F63B78)
#define ONE UINT32_C(0x80000000) /* x^0 */

/* ------------------------------------------------------------ polynomials modulo P --------------------------------- */

static uint32_t times_x(uint32_t a) { return (a >> 1) ^ (REFLECTED_P & (0 - (a & 1))); }

static uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1, b = times_x(b))
        if (a & ONE) product ^= b;
    return product;
}

static uint32_t x_to_the(uint64_t power) {
    uint32_t result = ONE, square = ONE >> 1; /* x^1 */
    for (; power; power >>= 1, square = times(square, square))
        if (power & 1) result = times(result, square);
    return result;
}

uint32_t ckpt_crc32c_joined(uint32_t first, uint32_t second, uint64_t second_bytes) {
    return times(first, x_to_the(8 * second_bytes)) ^ second;
}

/* ------------------------------------------------------------ any processor ---------------------------------------- */

static uint32_t table[8][256];

static void make_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = times_x(crc);
        table[0][byte] = crc;
    }
    for (int n = 1; n < 8; n++)
        for (uint32_t byte = 0; byte < 256; byte++)
            table[n][byte] = (table[n - 1][byte] >> 8) ^ table[0][table[n - 1][byte] & 255];
}

/* `state` is the complement of a checksum, here and below. */
static uint32_t extend_by_table(uint32_t state, const uint8_t *data, size_t bytes) {
    for (; bytes >= 8; data += 8, bytes -= 8) {
        uint32_t low = state ^ (data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24);
        state = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
                table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    }
    for (; bytes; data++, bytes--) state = (state >> 8) ^ table[0][(state ^ *data) & 255];
    return state;
}

static uint32_t copy_by_table(uint32_t state, uint8_t *to, const uint8_t *from, size_t bytes) {
    while (bytes) { /* in parts that stay in the cache, and from `to`, for that is what is checked */
        size_t part = bytes < 16384 ? bytes : 16384;
        memcpy(to, from, part);
        state = extend_by_table(state, to, part);
        to += part, from += part, bytes -= part;
    }
    return state;
}

/* ------------------------------------------------------------ x86-64 ----------------------------------------------- */

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

#define NARROW __attribute__((target("sse4.2,pclmul")))
#define WIDE __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,avx512dq,vpclmulqdq")))
#define ALWAYS inline __attribute__((always_inline))

/* Below so many bytes a copy stays in the caches. */
enum { STREAM_BYTES = 4096 };

/* To move 128 bits forward by D bits: the factor of the first 64 of them, and of the others. */
struct fold {
    uint64_t first, second;
};
static struct fold fold_128, fold_256, fold_384, fold_512, fold_2048;

static struct fold fold_by(uint64_t bits) {
    return (struct fold){(uint64_t)x_to_the(bits + 32) << 1, (uint64_t)x_to_the(bits - 32) << 1};
}

/* Less than 64 bytes, or what is left behind the last of them. */
NARROW static ALWAYS uint32_t few(uint32_t state, uint8_t *to, const uint8_t *from, size_t bytes) {
    uint64_t wide = state;
    for (; bytes >= 8; bytes -= 8, from += 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        wide = _mm_crc32_u64(wide, word);
        if (to) memcpy(to, &word, 8), to += 8;
    }
    state = (uint32_t)wide;
    for (; bytes; bytes--) {
        uint8_t byte = *from++;
        state = _mm_crc32_u8(state, byte);
        if (to) *to++ = byte;
    }
    return state;
}

NARROW static ALWAYS uint32_t remainder_of(__m128i x) {
    return (uint32_t)_mm_crc32_u64(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(x)), (uint64_t)_mm_extract_epi64(x, 1));
}

NARROW static ALWAYS __m128i moved(__m128i x, struct fold by, __m128i onto) {
    __m128i factors = _mm_set_epi64x((int64_t)by.second, (int64_t)by.first);
    __m128i sum = _mm_xor_si128(_mm_clmulepi64_si128(x, factors, 0x00), _mm_clmulepi64_si128(x, factors, 0x11));
    return _mm_xor_si128(sum, onto);
}

/* The next 16 bytes; they go to `to` as well, if that is given. */
NARROW static ALWAYS __m128i next_16(const uint8_t *from, uint8_t *to, int stream) {
    __m128i x = _mm_loadu_si128((const __m128i *)from);
    if (to && stream) _mm_stream_si128((__m128i *)to, x);
    if (to && !stream) _mm_storeu_si128((__m128i *)to, x);
    return x;
}

/* Windows of 4 x 16 bytes. */
NARROW static ALWAYS uint32_t narrow(uint32_t state, uint8_t *to, const uint8_t *from, size_t bytes, int stream) {
    if (bytes >= 64) {
        __m128i x[4];
        for (int n = 0; n < 4; n++) x[n] = next_16(from + 16 * n, to ? to + 16 * n : NULL, stream);
        x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)state));
        size_t at = 64;
        for (; at + 64 <= bytes; at += 64)
            for (int n = 0; n < 4; n++) {
                __m128i next = next_16(from + at + 16 * n, to ? to + at + 16 * n : NULL, stream);
                x[n] = moved(x[n], fold_512, next);
            }
        for (int n = 1; n < 4; n++) x[n] = moved(x[n - 1], fold_128, x[n]);
        state = remainder_of(x[3]);
        from += at, bytes -= at;
        if (to) to += at;
    }
    return few(state, to, from, bytes);
}

WIDE static ALWAYS __m512i moved_wide(__m512i x, __m512i factors, __m512i onto) {
    __m512i first = _mm512_clmulepi64_epi128(x, factors, 0x00), second = _mm512_clmulepi64_epi128(x, factors, 0x11);
    return _mm512_ternarylogic_epi64(first, second, onto, 0x96); /* the sum of three */
}

WIDE static ALWAYS __m512i next_64(const uint8_t *from, uint8_t *to, int stream) {
    __m512i x = _mm512_loadu_si512(from);
    if (to && stream) _mm512_stream_si512((__m512i *)to, x);
    if (to && !stream) _mm512_storeu_si512(to, x);
    return x;
}

/* Windows of 4 x 64 bytes. */
WIDE static ALWAYS uint32_t wide(uint32_t state, uint8_t *to, const uint8_t *from, size_t bytes, int stream) {
    if (bytes >= 256) {
        __m512i x[4], by_2048 = _mm512_broadcast_i64x2(_mm_set_epi64x((int64_t)fold_2048.second, (int64_t)fold_2048.first));
        __m512i by_512 = _mm512_broadcast_i64x2(_mm_set_epi64x((int64_t)fold_512.second, (int64_t)fold_512.first));
        for (int n = 0; n < 4; n++) x[n] = next_64(from + 64 * n, to ? to + 64 * n : NULL, stream);
        x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
        size_t at = 256;
        for (; at + 256 <= bytes; at += 256)
            for (int n = 0; n < 4; n++) {
                __m512i next = next_64(from + at + 64 * n, to ? to + at + 64 * n : NULL, stream);
                x[n] = moved_wide(x[n], by_2048, next);
            }
        for (int n = 1; n < 4; n++) x[n] = moved_wide(x[n - 1], by_512, x[n]);
        __m128i last = _mm512_extracti32x4_epi32(x[3], 3);
        last = moved(_mm512_extracti32x4_epi32(x[3], 2), fold_128, last);
        last = moved(_mm512_extracti32x4_epi32(x[3], 1), fold_256, last);
        last = moved(_mm512_castsi512_si128(x[3]), fold_384, last);
        state = remainder_of(last);
        from += at, bytes -= at;
        if (to) to += at;
    }
    return narrow(state, to, from, bytes, stream);
}

NARROW static uint32_t extend_narrow(uint32_t state, const uint8_t *data, size_t bytes) {
    return narrow(state, NULL, data, bytes, 0);
}

WIDE static uint32_t extend_wide(uint32_t state, const uint8_t *data, size_t bytes) {
    return wide(state, NULL, data, bytes, 0);
}

/* Stores past the caches want an aligned address; what is before it goes the usual way. */
static size_t before_aligned(const uint8_t *to, size_t alignment) { return -(uintptr_t)to & (alignment - 1); }

NARROW static uint32_t copy_narrow(uint32_t state, uint8_t *to, const uint8_t *from, size_t bytes) {
    if (bytes < STREAM_BYTES) return narrow(state, to, from, bytes, 0);
    size_t head = before_aligned(to, 16);
    state = few(state, to, from, head);
    return narrow(state, to + head, from + head, bytes - head, 1);
}

WIDE static uint32_t copy_wide(uint32_t state, uint8_t *to, const uint8_t *from, size_t bytes) {
    if (bytes < STREAM_BYTES) return wide(state, to, from, bytes, 0);
    size_t head = before_aligned(to, 64);
    state = few(state, to, from, head);
    return wide(state, to + head, from + head, bytes - head, 1);
}

void ckpt_crc32c_copied(void) { _mm_sfence(); } /* once for many copies: it waits for their stores */

static void prepare_folds(void) {
    fold_128 = fold_by(128), fold_256 = fold_by(256), fold_384 = fold_by(384);
    fold_512 = fold_by(512), fold_2048 = fold_by(2048);
}

/* Asks the processor itself: __builtin_cpu_supports needs a runtime library that not every compiler brings. */
static int best(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_2) || !(c & bit_PCLMUL)) return 0;
    if (!(c & bit_OSXSAVE)) return 1;
    unsigned saved; /* XCR0: the registers that the operating system saves, here all those of AVX-512 */
    __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if ((saved & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 1;
    unsigned wide = bit_AVX512F | bit_AVX512VL | bit_AVX512DQ;
    return (b & wide) == wide && (c & bit_VPCLMULQDQ) ? 2 : 1;
}
#else
#define extend_narrow extend_by_table
#define extend_wide extend_by_table
#define copy_narrow copy_by_table
#define copy_wide copy_by_table

void ckpt_crc32c_copied(void) {}

static void prepare_folds(void) {}
static int best(void) { return 0; }
#endif

/* ------------------------------------------------------------ for all ---------------------------------------------- */

static uint32_t (*extend)(uint32_t, const uint8_t *, size_t);
static uint32_t (*copy)(uint32_t, uint8_t *, const uint8_t *, size_t);

static int level;

int ckpt_crc32c_choose(int most) {
    level = best() < most ? best() : most;
    extend = level == 2 ? extend_wide : level == 1 ? extend_narrow : extend_by_table;
    copy = level == 2 ? copy_wide : level == 1 ? copy_narrow : copy_by_table;
    return level;
}

int ckpt_crc32c_level(void) { return level; }

__attribute__((constructor)) static void prepare(void) {
    make_table();
    prepare_folds();
    ckpt_crc32c_choose(2);
}

uint32_t ckpt_crc32c(uint32_t crc, const uint8_t *data, size_t bytes) { return ~extend(~crc, data, bytes); }

uint32_t ckpt_crc32c_copy(uint32_t crc, uint8_t *to, const uint8_t *from, size_t bytes) {
    return ~copy(~crc, to, from, bytes);
}
