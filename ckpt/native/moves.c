/* Copies and checked reads: many in a single call, without the global interpreter lock. */
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "crc32c.h"

/* The same fields, in this order, as RUN in records.py. Addresses are numbers there. */
struct run {
    uint64_t to, from, bytes;
    uint64_t seal_at;   /* where the checksum of the bytes goes as well (little-endian), or 0 */
    uint64_t continues; /* not 0: the bytes have one checksum with those of the run before */
    uint64_t crc32c;    /* out: of the bytes */
};

enum { CHECKSUM_BYTES = 4 };

/* The checksum of a stream whose checksum was `crc`, followed by zeros: the complement is a product (see crc32c.c). */
static uint32_t followed_by_zeros(uint32_t crc, uint64_t bytes) { return ~ckpt_crc32c_joined(~crc, 0, bytes); }

/* Make `count` copies, one after the other. Where `to` is 0 only the checksum is computed, where `from` is 0 that of
 * zeros. The first run does not continue another. */
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
        uint8_t *target = (uint8_t *)(uintptr_t)run->seal_at;
        for (int n = 0; target && n < CHECKSUM_BYTES; n++) target[n] = (uint8_t)(crc >> (8 * n));
    }
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The same fields, in this order, as SEGMENT in records.py: `bytes` bytes go to `to`, from byte `at` of the blocks
 * of a file, not counting checksums. */
struct segment {
    uint64_t at, to, bytes;
};

/* The segments that are left; `done` bytes of the next one are read. */
struct segments {
    const struct segment *next, *end;
    uint64_t done;
};

static void skip_empty(struct segments *left) {
    while (left->next < left->end && !left->next->bytes) left->next++;
}

/* Copy what belongs to segments out of `bytes` bytes of data, which begin at `at` of the file's blocks. Returns the
 * checksum `crc` continued by the data. */
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

enum { BLOCK_ENDS = -1, BLOCK_DIFFERS = -2 };

/* Read block `number` and the checksum (little-endian) after it, in parts that stay in a core's cache between the copy
 * by the kernel and the one here. */
static int read_block(int fd, uint64_t number, uint64_t block_bytes, struct segments *left, uint8_t *buffer,
                      uint64_t buffer_bytes) {
    uint64_t all = block_bytes + CHECKSUM_BYTES;
    uint32_t found = 0, expected = 0;
    for (uint64_t at = 0; at < all;) {
        ssize_t got = pread(fd, buffer, least(buffer_bytes, all - at), (off_t)(number * all + at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got ? errno : BLOCK_ENDS;
        uint64_t end = at + (uint64_t)got, checked = at < block_bytes ? least(block_bytes, end) - at : 0;
        found = take(left, found, buffer, number * block_bytes + at, checked);
        for (uint64_t n = checked; n < (uint64_t)got; n++) expected |= (uint32_t)buffer[n] << (8 * (at + n - block_bytes));
        at = end;
    }
    return found == expected ? 0 : BLOCK_DIFFERS;
}

/* Read `count` segments of a file that begins with blocks of `block_bytes` bytes, each followed by its checksum.
 * Segments are in order and do not overlap. Each block that they touch is read once, as a whole. Returns 0, an errno,
 * BLOCK_ENDS or BLOCK_DIFFERS.
 *
 * `buffer` is the caller's, one for each thread. It cannot be on the stack, of which a Python thread may have as little
 * as 32 KiB, and allocating it for each call takes longer than a small read. */
int ckpt_read_pieces(int fd, uint64_t block_bytes, const struct segment *segments, uint64_t count, uint8_t *buffer,
                     uint64_t buffer_bytes) {
    struct segments left = {segments, segments + count, 0};
    int error = 0;
    for (skip_empty(&left); !error && left.next < left.end;)
        error = read_block(fd, (left.next->at + left.done) / block_bytes, block_bytes, &left, buffer, buffer_bytes);
    return error;
}

/* The sizes of the records, by which Python checks that it has the same version of them. */
uint64_t ckpt_record_bytes(void) { return sizeof(struct run) << 8 | sizeof(struct segment); }
