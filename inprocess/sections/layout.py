"""Where what stands in the memory that a rank and its monitor share. See `board`."""

from __future__ import annotations

MAGIC = 0x494E5052_0002
LARGEST_BYTES = 16 << 20
(
    MAGIC_AT,
    SEQUENCE,
    GENERATION,  # epoch, a bit for "events count", and the owner among the clients; by both parties, never at once
    COUNTING,  # wrapper: whether clocks count
    FROZEN_AT,  # wrapper: the stamp at which the section clock stands still, or 0
    OFFSET,  # wrapper: nanoseconds by which the section clock is behind
    BEGUN,  # wrapper: when the epoch began
    CLIENT_GENERATION,  # the generation the words of the client are of
    ATTACHED,
    STARTED,
    IDLE_SINCE,
    LAST_BEAT,
    STEP_AGE,  # -1 before the first step
    ITERATION,  # -1 where it is not known
    INITIAL_LIMIT,
    BEAT_LIMIT,
    OUT_LIMIT,
    BEATS_LEARNED,
    OUT_LEARNED,
    WARMUP_ITERATIONS,
    SECTION_COUNT,
    BLOB_BYTES,
) = range(22)
SECTIONS = 32
WORDS_PER_SECTION = 4  # since, limit, learned, since when in the background
RECENT = 64
OPEN, CLOSE, BEAT = range(3)
OWNER_MASK = (1 << 16) - 1
LIVE = 1 << 16
EPOCH_SHIFT = 17


def to_ns(seconds: float | None) -> int:
    """Return a limit as it stands in its word."""
    return -1 if seconds is None else max(0, round(seconds * 1e9))


def from_ns(nanoseconds: int) -> float | None:
    """Return the limit in a word."""
    return None if nanoseconds < 0 else nanoseconds / 1e9  # 60 s come back as 60 s
