/* What Python calls: many copies, or one read, in a single call without the interpreter's lock. */
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "crc32c.h"

/* The same fields, in this order, as RUN in __init__.py. Addresses are numbers there. */
struct run {
    uint64_t to, from, bytes;
    uint64_t seal_at; /* where the checksum of the bytes goes as well (little-endian), or 0 */
    uint64_t crc32c;  /* out: of the bytes */
};

enum { BLOCK_BYTES = 256 << 10, CHECKSUM_BYTES = 4 };

/* Do `count` copies, one after the other. */
void ckpt_copy_runs(struct run *runs, uint64_t count) {
    for (struct run *run = runs; run < runs + count; run++) {
        uint32_t crc = ckpt_crc32c_copy(0, (uint8_t *)(uintptr_t)run->to, (const uint8_t *)(uintptr_t)run->from, run->bytes);
        run->crc32c = crc;
        uint8_t *seal = (uint8_t *)(uintptr_t)run->seal_at;
        for (int n = 0; seal && n < CHECKSUM_BYTES; n++) seal[n] = (uint8_t)(crc >> (8 * n));
    }
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Read a piece of `piece_bytes` bytes at `offset`, and the checksum (little-endian) behind it; put the first `bytes`
 * bytes to `to`. Returns 0, the number of an error, PIECE_ENDS or PIECE_DIFFERS.
 *
 * In blocks that stay in a core's cache between the kernel's copy and ours. They are on the stack, of which a thread of
 * Python has 8 MB. */
enum { PIECE_ENDS = -1, PIECE_DIFFERS = -2 };

int ckpt_read_piece(int fd, uint64_t offset, uint64_t piece_bytes, uint8_t *to, uint64_t bytes) {
    _Alignas(64) uint8_t block[BLOCK_BYTES];
    uint32_t found = 0, expected = 0;
    for (uint64_t at = 0; at < piece_bytes + CHECKSUM_BYTES;) {
        ssize_t got = pread(fd, block, least(BLOCK_BYTES, piece_bytes + CHECKSUM_BYTES - at), (off_t)(offset + at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got ? errno : PIECE_ENDS;
        uint64_t end = at + (uint64_t)got, wanted = at < bytes ? least(bytes, end) - at : 0;
        uint64_t checked = at < piece_bytes ? least(piece_bytes, end) - at : 0;
        if (wanted) found = ckpt_crc32c_copy(found, to + at, block, wanted);
        found = ckpt_crc32c(found, block + wanted, checked - wanted);
        for (uint64_t n = checked; n < (uint64_t)got; n++) expected |= (uint32_t)block[n] << (8 * (at + n - piece_bytes));
        at = end;
    }
    return found == expected ? 0 : PIECE_DIFFERS;
}
