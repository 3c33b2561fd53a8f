/* What Python calls: many copies, or one read, in a single call without the interpreter's lock. */
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "crc32c.h"

/* The same fields, in this order, as RUN in __init__.py. Addresses are numbers there. */
struct run {
    uint64_t to, from, bytes;
    uint64_t seal_at;   /* where the checksum of the bytes goes as well (little-endian), or 0 */
    uint64_t continues; /* not 0: the bytes have one checksum with those of the run before */
    uint64_t crc32c;    /* out: of the bytes */
};

enum { CHECKSUM_BYTES = 4 };

/* The checksum of a stream whose checksum was `crc`, followed by zeros: the complement is a product (see crc32c.c). */
static uint32_t followed_by_zeros(uint32_t crc, uint64_t bytes) { return ~ckpt_crc32c_joined(~crc, 0, bytes); }

/* Do `count` copies, one after the other. Where `to` is 0 only the checksum is made, where `from` is 0 that of zeros
 * only. The first one does not continue another. */
void ckpt_copy_runs(struct run *runs, uint64_t count) {
    for (struct run *run = runs; run < runs + count; run++) {
        uint32_t crc = run->continues ? (uint32_t)run[-1].crc32c : 0;
        const uint8_t *from = (const uint8_t *)(uintptr_t)run->from;
        uint8_t *to = (uint8_t *)(uintptr_t)run->to;
        if (!from)
            crc = followed_by_zeros(crc, run->bytes);
        else
            crc = to ? ckpt_crc32c_copy(crc, to, from, run->bytes) : ckpt_crc32c(crc, from, run->bytes);
        run->crc32c = crc;
        uint8_t *seal = (uint8_t *)(uintptr_t)run->seal_at;
        for (int n = 0; seal && n < CHECKSUM_BYTES; n++) seal[n] = (uint8_t)(crc >> (8 * n));
    }
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The same fields, in this order, as SEGMENT in __init__.py: `bytes` bytes of a file, from byte `at` of what is in its
 * pieces, go to `to`. */
struct segment {
    uint64_t at, to, bytes;
};

/* Segments, the next one first, of which `done` bytes are read. */
struct segments {
    const struct segment *next, *end;
    uint64_t done;
};

static void skip_empty(struct segments *left) {
    while (left->next < left->end && !left->next->bytes) left->next++;
}

/* Take `bytes` bytes, which begin at `at` of what is in the pieces: put to their places what belongs to a segment.
 * Returns the checksum of a stream whose checksum was `crc`, and that they continue. */
static uint32_t take(struct segments *left, uint32_t crc, const uint8_t *data, uint64_t at, uint64_t bytes) {
    uint64_t end = at + bytes;
    while (at < end) {
        const struct segment *segment = left->next;
        uint64_t start = segment < left->end ? least(segment->at + left->done, end) : end;
        crc = ckpt_crc32c(crc, data, start - at);
        data += start - at;
        at = start;
        if (at == end) break;
        uint64_t count = least(segment->bytes - left->done, end - at);
        crc = ckpt_crc32c_copy(crc, (uint8_t *)(uintptr_t)segment->to + left->done, data, count);
        data += count;
        at += count;
        left->done += count;
        if (left->done == segment->bytes) {
            left->next++;
            left->done = 0;
            skip_empty(left);
        }
    }
    return crc;
}

enum { PIECE_ENDS = -1, PIECE_DIFFERS = -2 };

/* Read piece `number`, and the checksum (little-endian) behind it, in blocks that stay in a core's cache between the
 * kernel's copy and ours. */
static int read_piece(int fd, uint64_t number, uint64_t piece_bytes, struct segments *left, uint8_t *block,
                      uint64_t block_bytes) {
    uint64_t all = piece_bytes + CHECKSUM_BYTES;
    uint32_t found = 0, expected = 0;
    for (uint64_t at = 0; at < all;) {
        ssize_t got = pread(fd, block, least(block_bytes, all - at), (off_t)(number * all + at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got ? errno : PIECE_ENDS;
        uint64_t end = at + (uint64_t)got, checked = at < piece_bytes ? least(piece_bytes, end) - at : 0;
        found = take(left, found, block, number * piece_bytes + at, checked);
        for (uint64_t n = checked; n < (uint64_t)got; n++) expected |= (uint32_t)block[n] << (8 * (at + n - piece_bytes));
        at = end;
    }
    return found == expected ? 0 : PIECE_DIFFERS;
}

/* Read `count` segments of a file that begins with pieces of `piece_bytes` bytes, each with its checksum behind it.
 * Segments are in order and do not overlap. Each piece that they touch is read once, as a whole. Returns 0, the number
 * of an error, PIECE_ENDS or PIECE_DIFFERS.
 *
 * `block` is the caller's, one for each thread, and stays warm: it cannot be on the stack, of which a thread of Python
 * may have as little as 32 KiB, and to allocate it each time costs more than many a read. */
int ckpt_read_pieces(int fd, uint64_t piece_bytes, const struct segment *segments, uint64_t count, uint8_t *block,
                     uint64_t block_bytes) {
    struct segments left = {segments, segments + count, 0};
    int error = 0;
    for (skip_empty(&left); !error && left.next < left.end;)
        error = read_piece(fd, (left.next->at + left.done) / piece_bytes, piece_bytes, &left, block, block_bytes);
    return error;
}

/* The sizes of the records that Python hands over: whether both are of the same version. */
uint64_t ckpt_record_bytes(void) { return sizeof(struct run) << 8 | sizeof(struct segment); }
