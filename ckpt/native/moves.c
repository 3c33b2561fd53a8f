/* Copies and checked reads: many in a single call, without the global interpreter lock. */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "crc32c.h"
#include "digest.h"
#include "mapped.h"

/* The same fields, in this order, as RUN in record_types.py. Addresses are numbers there. */
struct run {
    uint64_t to, from, bytes;
    uint64_t seal_at;   /* where the checksum of the bytes goes as well (little-endian), or 0 */
    uint64_t continues; /* not 0: the bytes have one checksum with those of the run before */
    uint64_t crc32c;    /* out: of the bytes */
};

enum { CHECKSUM_BYTES = 4 };

/* The checksum of a stream whose checksum was `crc`, followed by zeros: the complement is a product (see crc32c.c). */
static uint32_t followed_by_zeros(uint32_t crc, uint64_t bytes) { return ~ckpt_crc32c_joined(~crc, 0, bytes); }

/* Copy a run. Where `to` is 0 only the checksum is computed, where `from` is 0 that of zeros. */
static void copy_run(struct run *run) {
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

/* Make `count` copies, one after the other. The first run does not continue another. */
void ckpt_copy_runs(struct run *runs, uint64_t count) {
    for (struct run *run = runs; run < runs + count; run++) copy_run(run);
    ckpt_crc32c_copied();
}

/* What is known of the bytes at `to` of a run. The same fields, in this order, as HELD in record_types.py. */
struct held {
    uint64_t state;   /* UNKNOWN, COPIED, or HASHED: `hashes` has theirs */
    uint64_t content; /* the number of the call that copied them: the same number, the same bytes */
    uint64_t crc32c;  /* of the run that they were copied by */
    uint64_t hashes;  /* address of the room for them */
    uint64_t is_same; /* out: they were not copied */
};

enum { UNKNOWN, COPIED, HASHED };

static uint64_t hash_bytes(uint64_t bytes) { return (bytes + 8191) / 8192 * 32; }

/* Hash the bytes that a run has copied, and note if they are those that are known from elsewhere. Not the bytes at
 * `from`: these may have changed since. */
static void hash_copied(const struct run *run, struct held *held, const struct held *last, const uint64_t *key) {
    uint64_t *hashes = (uint64_t *)(uintptr_t)held->hashes;
    ckpt_hash((const uint8_t *)(uintptr_t)run->to, run->bytes, key, hashes);
    held->state = HASHED;
    if (last->state == HASHED && last != held &&
        !memcmp(hashes, (const void *)(uintptr_t)last->hashes, hash_bytes(run->bytes)))
        held->content = last->content;
}

/* Make the same copies as ckpt_copy_runs, but for the runs whose bytes are at `to` already, which is known by their
 * hashes. `held` has what is known of each, `last` what the last call has left, which may be the same memory or another
 * one with other addresses. Only bytes that had their checksum in the last call, too, are hashed. `number` is that of the
 * call. */
void ckpt_update_runs(struct run *runs, struct held *held, const struct held *last, uint64_t count, const uint64_t *key,
                      uint64_t number) {
    for (struct run *run = runs; run < runs + count; run++, held++, last++) {
        const uint8_t *from = (const uint8_t *)(uintptr_t)run->from;
        int can_be_same = held->state != UNKNOWN && (!run->continues || held[-1].is_same);
        if (from && run->bytes && can_be_same && held->state == HASHED &&
            ckpt_has_hash(from, run->bytes, key, (const uint64_t *)(uintptr_t)held->hashes)) {
            run->crc32c = held->crc32c; /* and it is at `seal_at` already */
            held->is_same = 1;
            continue;
        }
        int may_be_quiet = last->state != UNKNOWN;
        uint64_t last_crc = last->crc32c;
        copy_run(run);
        held->is_same = !from && can_be_same; /* zeros, that are not copied */
        held->crc32c = run->crc32c;
        if (held->is_same) continue;
        held->content = from ? number : 0;
        held->state = run->bytes ? COPIED : UNKNOWN; /* a run without bytes: something else has copied there */
        if (from && run->bytes && may_be_quiet && last_crc == run->crc32c) hash_copied(run, held, last, key);
    }
    ckpt_crc32c_copied();
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The same fields, in this order, as SEGMENT in record_types.py. At byte `base` of a file a series of blocks begins, each
 * of `block_bytes` bytes followed by their checksum. Row number r of the segment has `bytes` bytes: they go to `to` +
 * r * `to_step`, from byte `at` + r * `at_step` of the blocks, not counting checksums. */
struct segment {
    uint64_t base, block_bytes, at, to, bytes, rows, at_step, to_step;
};

/* The segments that are left: of the next one `row` rows are read, and `done` bytes of the next row. Of data that
 * `may_change` meanwhile, each byte is read once: what is checked is what is copied. */
struct segments {
    const struct segment *next, *end;
    uint64_t row, done;
    int may_change;
};

static void skip_empty(struct segments *left) {
    while (left->next < left->end && !(left->next->bytes && left->next->rows)) left->next++;
}

/* Where the next byte is among the blocks of its series. */
static uint64_t position(const struct segments *left) {
    return left->next->at + left->row * left->next->at_step + left->done;
}

/* Where the block with byte `at` of a segment's series begins in the file. */
static uint64_t block_start(const struct segment *segment, uint64_t at) {
    return segment->base + at / segment->block_bytes * (segment->block_bytes + CHECKSUM_BYTES);
}

enum { SHORT_ROW = 2048 };

/* Copy what belongs to segments out of `bytes` bytes of data, which begin at `at` of the blocks at `base`. Returns the
 * checksum `crc` continued by the data. Short rows are copied after the checksum of all, while the data are in the
 * cache: then the loop has few calls. */
static uint32_t take(struct segments *left, uint32_t crc, const uint8_t *data, uint64_t base, uint64_t at,
                     uint64_t bytes) {
    uint64_t end = at + bytes, checked = at;
    while (left->next < left->end && left->next->base == base && position(left) < end) {
        const struct segment *segment = left->next;
        uint64_t from = position(left), count = least(segment->bytes - left->done, end - from);
        uint8_t *to = (uint8_t *)(uintptr_t)(segment->to + left->row * segment->to_step + left->done);
        if (segment->bytes < SHORT_ROW && !left->may_change) {
            if (checked < end) crc = ckpt_crc32c(crc, data + (checked - at), end - checked);
            checked = end;
        }
        if (checked <= from) {
            crc = ckpt_crc32c(crc, data + (checked - at), from - checked);
            crc = ckpt_crc32c_copy(crc, to, data + (from - at), count);
            checked = from + count;
        } else
            memcpy(to, data + (from - at), count);
        left->done += count;
        if (left->done < segment->bytes) break;
        left->done = 0;
        if (++left->row == segment->rows) {
            left->row = 0;
            left->next++;
            skip_empty(left);
        }
    }
    return checked < end ? ckpt_crc32c(crc, data + (checked - at), end - checked) : crc;
}

/* The part of the file that is in the buffer. */
struct window {
    int fd, in_memory;
    uint8_t *buffer;
    uint64_t buffer_bytes, start, bytes;
};

enum { BLOCK_ENDS = -1, BLOCK_DIFFERS = -2, NEAR_BYTES = 4096 };

/* Have the byte at `offset` in the buffer. What is read with it are the bytes up to `needed` and the blocks that follow
 * near enough that one call for all takes less time. */
static int fill(struct window *window, uint64_t offset, uint64_t needed, const struct segments *left) {
    uint64_t most = offset + window->buffer_bytes;
    for (const struct segment *next = left->next; next < left->end && needed < most; next++) {
        if (!next->bytes || !next->rows) continue;
        uint64_t at = next == left->next ? position(left) : next->at;
        if (block_start(next, at) > needed + NEAR_BYTES) break;
        int apart = next->rows > 1 && next->at_step - next->bytes >= next->block_bytes; /* by blocks not needed */
        uint64_t row = next == left->next ? left->row : 0, last_row = apart ? row : next->rows - 1;
        uint64_t end = block_start(next, next->at + last_row * next->at_step + next->bytes - 1);
        end += next->block_bytes + CHECKSUM_BYTES;
        if (end > needed) needed = end;
        if (apart) break;
    }
    if (window->in_memory) return BLOCK_ENDS; /* all there is of the file is in the buffer */
    for (;;) {
        ssize_t got = pread(window->fd, window->buffer, least(most, needed) - offset, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got ? errno : BLOCK_ENDS;
        window->start = offset;
        window->bytes = (uint64_t)got;
        return 0;
    }
}

/* Read the block with the next byte, and the checksum (little-endian) after it, in parts that stay in a core's cache
 * between the copy by the kernel and the one here. */
static int read_block(struct window *window, struct segments *left) {
    uint64_t base = left->next->base, block_bytes = left->next->block_bytes, all = block_bytes + CHECKSUM_BYTES;
    uint64_t number = position(left) / block_bytes, start = base + number * all;
    uint32_t found = 0, expected = 0;
    for (uint64_t at = 0; at < all;) {
        uint64_t offset = start + at;
        if (offset < window->start || offset >= window->start + window->bytes) {
            int error = fill(window, offset, start + all, left);
            if (error) return error;
        }
        const uint8_t *data = window->buffer + (offset - window->start);
        uint64_t got = least(window->start + window->bytes - offset, all - at), end = at + got;
        uint64_t checked = at < block_bytes ? least(block_bytes, end) - at : 0;
        if (checked) found = take(left, found, data, base, number * block_bytes + at, checked);
        for (uint64_t n = checked; n < got; n++) expected |= (uint32_t)data[n] << (8 * (at + n - block_bytes));
        at = end;
    }
    return found == expected ? 0 : BLOCK_DIFFERS;
}

/* Read the segments that are left, through the window. */
static int read_all(struct window *window, struct segments *left) {
    int error = 0;
    for (skip_empty(left); !error && left->next < left->end;) error = read_block(window, left);
    ckpt_crc32c_copied();
    return error;
}

static int read_mapped(void *segments, const uint8_t *data, uint64_t start, uint64_t bytes) {
    struct window window = {-1, 1, (uint8_t *)(uintptr_t)data, bytes, start, bytes};
    return read_all(&window, segments);
}

/* Where the blocks of segments begin and end in the file. Returns whether to read them from a map: not if the segments are
 * far apart, have short rows apart from each other, which take less time from a buffer (see `take`), or if checksums take
 * longer than the kernel's copy. */
static int is_for_map(const struct segment *segments, uint64_t count, uint64_t *start, uint64_t *end) {
    uint64_t wanted = 0;
    *start = UINT64_MAX, *end = 0;
    for (const struct segment *segment = segments; segment < segments + count; segment++) {
        if (!segment->bytes || !segment->rows) continue;
        if (segment->rows > 1 && segment->bytes < SHORT_ROW) return 0;
        *start = least(*start, block_start(segment, segment->at));
        *end = block_start(segment, segment->at + (segment->rows - 1) * segment->at_step + segment->bytes - 1);
        *end += segment->block_bytes + CHECKSUM_BYTES;
        wanted += segment->bytes * segment->rows;
    }
    return wanted > (*end - *start) / 2 && ckpt_crc32c_level() > 0;
}

/* Read `count` segments of a file. They are in order and do not overlap, also if all between the first and the last row
 * of one is counted to it. Each block that they touch is read once, as a whole. Returns 0, an errno, BLOCK_ENDS or
 * BLOCK_DIFFERS.
 *
 * `buffer` is the caller's, one for each thread. It cannot be on the stack, of which a Python thread may have as little
 * as 32 KiB, and allocating it for each call takes longer than a small read. */
int ckpt_read_pieces(int fd, const struct segment *segments, uint64_t count, uint8_t *buffer, uint64_t buffer_bytes) {
    struct segments left = {segments, segments + count, 0, 0, 1};
    uint64_t start, end;
    int error;
    if (is_for_map(segments, count, &start, &end) && ckpt_use_mapped(fd, start, end, read_mapped, &left, &error))
        return error;
    left = (struct segments){segments, segments + count, 0, 0, 0};
    struct window window = {fd, 0, buffer, buffer_bytes, 0, 0};
    return read_all(&window, &left);
}

/* The same for `bytes` bytes of a file that are in memory, the first of them at `start` of the file. */
int ckpt_check_pieces(uint8_t *data, uint64_t start, uint64_t bytes, const struct segment *segment, uint64_t count) {
    struct segments left = {segment, segment + count, 0, 0, 0};
    struct window window = {-1, 1, data, bytes, start, bytes};
    return read_all(&window, &left);
}

/* The sizes of the records, by which Python checks that it has the same version of them. */
uint64_t ckpt_record_bytes(void) {
    return sizeof(struct held) << 16 | sizeof(struct run) << 8 | sizeof(struct segment);
}
