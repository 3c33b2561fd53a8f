"""The owner of a root: the job that may decide about its saves, by a token that only grows.

    <root>/.owner/1763840000123.json    a claim, made by an exclusive create; the highest number is the owner's token
    <root>/.owner/1763840000123/        the leases of its writers (see `leases`)

A token is the time of the claim in milliseconds, or the highest existing token plus one if that is larger: so it grows
even when the root is removed and made again. The job that starts later wins: its claim fences the earlier owner, whose
writers check the token after they have begun a save and before they publish it. A job that claims the root looks at the
pending saves *after* the claim, so either the writer sees the new token, or the new owner sees the save.
See docs/decisions/0023.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt.errors import CheckpointCorruptError, FencedError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.documents import ILL_FORMED, decode_document, encode_document, well_formed
from ckpt.storage.leases import EXPIRY_S, RENEW_S, Leases, RegisteredWriter, changed_s, is_fresh
from ckpt.storage.links import refuse_link
from ckpt.storage.regular_files import read_document_at
from inprocess.ipc.process import Process

_CLAIM = re.compile(r"(\d{8,18})\.json")
MAX_CLAIM_BYTES = 1 << 16
_IDENTITY = "root.json"
_ATTEMPTS = 100
_LATEST_S = 253402300799.0  # the end of the year 9999: later times cannot be printed
_TEMPORARY_S = 60.0  # the longest wait for a restore or a tool with a temporary claim
_LAST_RENEWAL_S = 1.0  # how long a release waits for it
_PAUSE_S = 0.05


class OwnerState(enum.Enum):
    """Which processes of an owner are alive. One of another host counts as alive until its lease has expired."""

    ACTIVE = "a trainer is alive"
    FINISHING = "only writers are alive, which finish staged saves"
    GONE = "no process is alive, or there is no owner"


@dataclass(frozen=True, slots=True)
class Claim:
    """The process that claimed a root, and when (seconds since 1970, by the clock of that host).

    A `temporary` claim is for deciding about saves that were left behind, not for saving.
    """

    token: int
    process: Process
    node: str
    time: float
    temporary: bool

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.time))
        return f"process {self.process.pid} on {self.node}, which claimed it at {when} (token {self.token})"


@dataclass(frozen=True, slots=True)
class OwnerOverview:
    """What can be told of an owner. `writers` counts the ranks whose writer processes are alive.

    `renewed_s` is the time since one of its processes gave a sign of life, None if there is none.
    """

    token: int
    state: OwnerState
    writers: int
    renewed_s: float | None


class ClaimLease:
    """A thread that renews the claim of this process, from the first `hold` to `close`, or as long as this exists."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._token = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._closed.set).atexit = False

    def hold(self, token: int) -> None:
        """Renew the claim with this token from now on."""
        self._token = token
        if self._thread is None:
            renew_s = self._ownership.renew_s
            keep = functools.partial(_keep_claim, weakref.ref(self), self._closed, renew_s)
            self._thread = threading.Thread(target=keep, name="ckpt-claim", daemon=True)
            self._thread.start()

    def renew(self) -> None:
        """Renew the claim now. StorageError if it was removed, or the file system is not available."""
        self._ownership.renew(self._token)

    def close(self) -> None:
        """Stop renewing, and end the thread unless the file system does not answer. Idempotent."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_RENEWAL_S)


def _keep_claim(lease: weakref.ref[ClaimLease], closed: threading.Event, renew_s: float) -> None:
    while not closed.wait(renew_s):
        held = lease()
        if held is not None:
            with contextlib.suppress(StorageError):
                held.renew()
        del held


class Ownership:
    """The claims of one root, in a directory. Any process, any thread."""

    renew_s = RENEW_S
    """How often the process that made a claim renews it."""

    expiry_s = EXPIRY_S
    """A process of another host counts as dead if it has not renewed its claim for so long."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.passed_over: dict[int, Claim] = {}
        """Temporary claims by which `check` was not stopped: those processes took the job for dead."""

    @property
    def path(self) -> str:
        """The directory of the claims. StorageError if it is a symbolic link."""
        return refuse_link(os.path.join(self._root, ".owner"))

    def identity(self) -> str:
        """Return the identity of this root, which no later one here has. Makes the root and its record if needed.

        CheckpointError if that is not possible.
        """
        data = self._identity_data()
        if data is None:
            self._create_identity(encode_document({"id": secrets.token_hex(16)}))
            data = self._identity_data()
        if data is None:
            raise StorageError(f"{self.path}/{_IDENTITY} was removed just now")
        with well_formed(f"{self.path}/{_IDENTITY}"):
            return str(decode_document(data, f"{self.path}/{_IDENTITY}")["id"])

    def _identity_data(self) -> bytes | None:
        return read_document_at(os.path.join(self.path, _IDENTITY), MAX_CLAIM_BYTES)

    def _create_identity(self, data: bytes) -> None:
        directories.make_with_parents(self.path)
        files.create_exclusive(os.path.join(self.path, _IDENTITY), data)

    def leases(self, token: int) -> Leases:
        """Return the leases of the owner that has, or had, this token."""
        return Leases(os.path.join(self.path, f"{token:08d}"))

    def newest(self) -> int:
        """Return the newest token, also that of a temporary claim; 0 if there is none."""
        return max(self._claimed(), default=0)

    def owner(self) -> int:
        """Return the token of the job that owns the root: that of the newest claim that is not temporary, or else 0.

        A restore that took a job for dead, because that was stopped, has decided its saves. That ends no job: none but
        one that claims the root to save there does.
        """
        for token in sorted(self._claimed(), reverse=True):
            claim = self._read(token)
            if (claim is None and self._is_there(token)) or (claim is not None and not claim.temporary):
                return token
        return 0

    def _claimed(self) -> list[int]:
        """Return the tokens of all claims that are there."""
        return tokens_in(directories.fresh_names(self.path))

    def has(self, token: int) -> bool:
        """Return whether this process sees the claim with this token, or a later one."""
        return files.exists(self._file(token)) or self.newest() > token

    def check(self, token: int) -> None:
        """Raise FencedError unless `token` is the owner's, or of the newest claim, which is temporary.

        If the claims were removed, perhaps with the root, the one with `token`, which this job had made, is made again.
        """
        newest = self.newest()
        if newest < token:
            self._make(token)
            self._make_leases(token)
            newest = self.newest()
        if newest == token:
            return
        own = self._read(token)
        if own is None or own.temporary or (owner := self.owner()) > token:
            raise self._fenced(token, newest if own is None or own.temporary else owner)
        self.passed_over |= {
            later: claim for later in self._claimed() if later > token and (claim := self._read(later)) is not None
        }

    def _fenced(self, token: int, newest: int) -> FencedError:
        return FencedError(
            f"{self._root} is owned by a job that started later: {self.describe(newest)}. This job (token {token}) "
            "can publish nothing there any more; stop one of the two, or give each a root of its own"
        )

    def claim(self, seen: int, *, temporary: bool = False, above: int = 0) -> int:
        """Become the owner, and return the new token. The root exists; `seen` is the token found at the start.

        The new one is larger than all here, and larger than `above`, which was found in the mirror of this root.

        FencedError if a live job has claimed the root since then: that one has started later. If its claim is
        `temporary`, this waits for its release instead.
        """
        for _ in range(_ATTEMPTS):
            newest = self.newest()
            if newest > seen and self._wait_until_settled(newest) is OwnerState.ACTIVE:
                raise self._fenced(seen, newest)
            token = max(newest + 1, above + 1, int(1000 * time.time()))
            with self._withdrawn_on_error(token):
                if self._make(token, temporary) and self.newest() == token:
                    self._make_leases(token)
                    self._remove_old_claims(token)
                    return token
        raise StorageError(f"{self._root}: too many jobs claim this root at the same time; start one of them")

    @contextlib.contextmanager
    def _withdrawn_on_error(self, token: int) -> Iterator[None]:
        """Release the claim that the block makes if that fails: the caller does not learn of it, and claims again."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):
                self._make_leases(token)
                self.release(token)
            raise

    def claim_as(self, token: int, before: int = 0) -> int:
        """Become the owner with the token of a job that owns another root, of which this one has copies.

        Returns the token to act with here: this one, or a larger one if another process has made a temporary claim
        meanwhile. `before` is what this has returned to an earlier process of the job. FencedError if a job with a
        larger token has claimed this root; StorageError as long as a temporary claim is in use.
        """
        token = max(token, before)
        for _ in range(_ATTEMPTS):
            later = [(each, self._read(each)) for each in sorted(self._claimed()) if each > token]
            for each, claim in later:
                if claim is None or not claim.temporary:
                    raise self._fenced(token, each)
                if self.state(each) is OwnerState.ACTIVE:
                    raise StorageError(f"{self._root} is just being recovered by {claim}: try again later")
            if not later and token in self._claimed():
                return token  # this job has claimed it before
            wanted = later[-1][0] + 1 if later else token
            if self._make(wanted) and self.newest() == wanted:
                self._make_leases(wanted)
                self._remove_old_claims(wanted)
                return wanted
        raise StorageError(f"{self._root}: too many jobs claim this root at the same time; start one of them")

    def _wait_until_settled(self, token: int) -> OwnerState:
        """Return the state of an owner; wait some time for a temporary claim, which counts as gone then."""
        claim = self._read(token)
        if claim is None or not claim.temporary:
            return self.state(token)
        deadline = time.monotonic() + _TEMPORARY_S
        while (state := self.state(token)) is OwnerState.ACTIVE and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return OwnerState.GONE if state is OwnerState.ACTIVE else state

    def renew(self, token: int) -> None:
        """Renew the claim with this token, so that its process counts as alive on other hosts."""
        files.touch(self._file(token))

    def release(self, token: int, rank: int = 0, *, done: bool = True) -> None:
        """Record that this process, a trainer, no longer acts as the owner with this token.

        Unless `done`, its writers go on.
        """
        self.leases(token).leave(rank, Process.here(), done=done)

    def state(self, token: int) -> OwnerState:
        """Return the state of the owner that has, or had, this token. StorageError if it cannot be read."""
        if token == 0:
            return OwnerState.GONE
        leases = self.leases(token)
        writers = leases.writers()
        if any(writer.has_trainer for writer in writers) or self._claimer_is_active(token, leases):
            return OwnerState.ACTIVE
        return OwnerState.FINISHING if any(writer.alive for writer in writers) else OwnerState.GONE

    def overview(self, now: float) -> OwnerOverview | None:
        """Return what can be told of the owner without writing anything; None if there is none.

        `now` is the time of this host, by which processes of others count as alive or dead: it may be off by the
        difference of the clocks, which `state` is not.
        """
        token = max(tokens_in(directories.names_in(self.path)), default=0)
        if token == 0:
            return None
        leases = self.leases(token)
        names = directories.names_in(leases.path)
        ages = {name: now - at for name in names if (at := changed_s(os.path.join(leases.path, name))) is not None}
        writers = [
            w for name, age in ages.items() for w in leases.of_host(name, functools.partial(operator.lt, abs(age)))
        ]
        changed = changed_s(self._file(token))
        return self._overview(token, writers, None if changed is None else now - changed, ages.values())

    def _overview(
        self, token: int, writers: Sequence[RegisteredWriter], claim_age_s: float | None, ages: Iterable[float]
    ) -> OwnerOverview:
        claimer = self.claimer(token)
        active = any(writer.has_trainer for writer in writers)
        if claimer is not None and not self.leases(token).has_left(claimer):
            alive = claimer.alive
            active |= (claim_age_s is not None and claim_age_s < self.expiry_s) if alive is None else alive
        ranks = {writer.rank for writer in writers if writer.alive}
        state = OwnerState.ACTIVE if active else OwnerState.FINISHING if ranks else OwnerState.GONE
        newest = min([*ages, *([] if claim_age_s is None else [claim_age_s])], default=None)
        return OwnerOverview(token, state, len(ranks), None if newest is None else max(0.0, newest))

    def _claimer_is_active(self, token: int, leases: Leases) -> bool:
        """Return whether the process that made the claim is alive and has not left."""
        claim = self._read(token)
        if claim is None:  # it is not known which process: if the claim is damaged, it is alive as long as it renews it
            return self._is_renewed(token)
        if leases.has_left(claim.process):
            return False
        alive = claim.process.alive
        return self._is_renewed(token) if alive is None else alive

    def _is_renewed(self, token: int) -> bool:
        """Return whether a claim was renewed within `EXPIRY_S`."""
        return is_fresh(self._file(token), directories.server_time(self.path))

    def _make_leases(self, token: int) -> None:
        """Make the directory of the leases of an owner, unless it is there."""
        directories.make_directories(self.path, f"{token:08d}")

    def _make(self, token: int, temporary: bool = False) -> bool:
        """Make a claim, durably, and return whether this call made it.

        A network file system may repeat the call and report that the file exists, so its content is compared.
        """
        process = Process.here()
        document = {"token": token, "process": [process.host, process.pid, process.start]}
        document |= {"node": os.uname().nodename, "time": time.time(), "temporary": temporary}
        document |= {"nonce": os.urandom(8).hex()}
        return self._create(token, encode_document(document))

    def _create(self, token: int, data: bytes) -> bool:
        for made in directories.make_directories(self._root, ".owner"):
            directories.fsync_directory(made)
        return files.create_exclusive(self._file(token), data) or files.holds(self._file(token), data)

    def _oldest_to_keep(self, token: int) -> int:
        """Return the token of the owner before the one with `token`: its claim says that it was fenced, or was not.

        That of the claim before, if all are temporary.
        """
        before = sorted((number for number in self._claimed() if number < token), reverse=True)
        for number in before:
            claim = self._read(number)
            if claim is None or not claim.temporary:
                return number
        return max(before, default=0)

    def _remove_old_claims(self, token: int) -> None:
        """Remove the claims and leases older than those of the owner before this one."""
        oldest = self._oldest_to_keep(token)
        for name in directories.names_in(self.path):
            number = re.match(r"\d{8,18}", name)
            if number is not None and int(number[0]) < oldest:
                path = os.path.join(self.path, name)
                with contextlib.suppress(StorageError):
                    files.remove(path) if name.endswith(".json") else directories.remove_tree(path)

    def _file(self, token: int) -> str:
        return os.path.join(self.path, f"{token:08d}.json")

    def _read(self, token: int) -> Claim | None:
        """Return a claim; None if it does not exist or is damaged."""
        try:
            data = self._data(token)
            document = {} if data is None else decode_document(data, self._file(token))
            host, pid, start = document["process"]
            return Claim(
                token,
                Process(str(host), int(pid), int(start)),
                str(document["node"]),
                min(max(float(document["time"]), 0.0), _LATEST_S),
                bool(document["temporary"]),
            )
        except (CheckpointCorruptError, *ILL_FORMED):
            return None

    def _data(self, token: int) -> bytes | None:
        """Return the content of a claim; None if it does not exist."""
        return read_document_at(self._file(token), MAX_CLAIM_BYTES)

    def _is_there(self, token: int) -> bool:
        """Return whether there is a claim with this token, perhaps a damaged one."""
        try:
            return self._data(token) is not None
        except CheckpointCorruptError:
            return True

    def claimer(self, token: int) -> Process | None:
        """Return the trainer that has, or had, claimed the root with this token; None if that is not known."""
        claim = self._read(token)
        return None if claim is None else claim.process

    def describe(self, token: int) -> str:
        """Return a description of the owner that has, or had, this token, for messages."""
        claim = self._read(token)
        if claim is not None and claim.process == Process.here():
            return f"this process, by another Checkpointer or by a restore since then (token {token})"
        return str(claim or f"an unknown process (token {token})")


def tokens_in(names: Iterable[str]) -> list[int]:
    """Return the tokens of the claims with these file names."""
    return [int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))]
