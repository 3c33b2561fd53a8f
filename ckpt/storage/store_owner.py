"""The owner of a root in a store, and the leases of its writers. See `ownership` and `leases`.

    owner/1763840000123.json                            a claim, created if absent
    owner/1763840000123/renewed                         put again and again by the process that made the claim
    owner/1763840000123/leases/<host>/renewed           the same, by a writer process of a host
    owner/1763840000123/leases/<host>/writer-0-71-512-70-500    a writer of rank 0 (pid, start), and its trainer
    owner/1763840000123/leases/<host>/left-70-500-0     this trainer has left; 1: its writers have, too

The names say everything, so one list tells the state of an owner. All of these objects are empty.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage.leases import Lease, Leases, RegisteredWriter
from ckpt.storage.names import parse_save_name
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.ownership import MAX_CLAIM_BYTES, OwnerOverview, Ownership, tokens_in
from ckpt.storage.stores.interface import About, Store, check_create
from inprocess.ipc.process import Process

_IDENTITY = "owner/root.json"
STORE_RENEW_S = 10.0
STORE_EXPIRY_S = 45.0
_POLL_S = 0.5
_KNOWN_S = 60.0
_WRITER = re.compile(r"writer-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)")
_LEFT = re.compile(r"left-(\d+)-(\d+)-([01])")


class StoreOwnership(Ownership):
    """The claims of one root in a store. Any process, any thread."""

    renew_s = STORE_RENEW_S
    expiry_s = STORE_EXPIRY_S

    def __init__(self, store: Store, impatient: Store) -> None:
        """`impatient` is the same store, and gives up soon while it fails: for what is not worth a long wait."""
        super().__init__(store.url)
        self._store = store
        self._impatient = impatient
        self._leases: dict[int, StoreLeases] = {}

    def _identity_data(self) -> bytes | None:
        return self._get(_IDENTITY)

    def _create_identity(self, data: bytes) -> None:
        self._store.create(_IDENTITY, data)

    def leases(self, token: int) -> StoreLeases:
        """See `Ownership.leases`."""
        return self._leases.setdefault(token, StoreLeases(self._store, self._impatient, f"owner/{token:08d}/leases"))

    def has(self, token: int) -> bool:
        """See `Ownership.has`."""
        return self.newest() >= token

    def claim(self, seen: int, *, temporary: bool = False, above: int = 0) -> int:
        """See `Ownership.claim`. StorageError for a store that ignores the condition of puts."""
        check_create(self._store, "owner")
        return super().claim(seen, temporary=temporary, above=max(above, self._newest_of_saves()))

    def _newest_of_saves(self) -> int:
        """Return the largest token of the owners of saves: claims may be lost, and the clock may be set back since."""
        names = (name for prefix in ("records/", "saves/") for name in self._store.names(prefix)[0])
        return max((save.owner for name in names if (save := parse_save_name(name)) is not None), default=0)

    def claim_as(self, token: int, before: int = 0) -> int:
        """See `Ownership.claim_as`, and `claim`."""
        if max(token, before) not in self._claimed():
            check_create(self._store, "owner")
        return super().claim_as(token, before)

    def renew(self, token: int) -> None:
        """See `Ownership.renew`."""
        self._impatient.put(f"owner/{token:08d}/renewed", b"")

    def overview(self, now: float) -> OwnerOverview | None:
        """See `Ownership.overview`. Two lists and a read, and a look at the claim."""
        token = self.newest()
        if token == 0:
            return None
        claim = self._store.about(self._key(token))
        found = list(self._store.below(f"owner/{token:08d}/"))
        ages = [now - each.modified_s for each in found]
        renewed = [now - each.modified_s for each in found if each.key == f"owner/{token:08d}/renewed"]
        writers = self.leases(token).writers_in([each for each in found if "/leases/" in each.key], lambda: now)
        claim_ages = renewed + ([] if claim is None else [now - claim.modified_s])
        return self._overview(token, writers, min(claim_ages, default=None), ages)

    def _claimed(self) -> list[int]:
        _, objects = self._store.names("owner/")
        return tokens_in(each.key.rpartition("/")[2] for each in objects)

    def _is_renewed(self, token: int) -> bool:
        found = [self._store.about(key) for key in (f"owner/{token:08d}/renewed", self._key(token))]
        now = self._store.now()
        return any(each is not None and now - each.modified_s < STORE_EXPIRY_S for each in found)

    def _make_leases(self, token: int) -> None:
        pass  # prefixes need not be made

    def _create(self, token: int, data: bytes) -> bool:
        return self._store.create(self._key(token), data) is not None

    def _remove_old_claims(self, token: int) -> None:
        oldest = self._oldest_to_keep(token)
        for number in (each for each in self._claimed() if each < oldest):
            keys = [each.key for each in self._store.below(f"owner/{number:08d}/")]
            self._store.delete([*keys, self._key(number)])

    def _data(self, token: int) -> bytes | None:
        return self._get(self._key(token))

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, MAX_CLAIM_BYTES)
        except ValueError as problem:
            raise CheckpointCorruptError(f"{self._store.place(key)} {problem}") from None

    def _key(self, token: int) -> str:
        return f"owner/{token:08d}.json"


class StoreLeases(Leases):
    """The leases of the writers of one owner."""

    def __init__(self, store: Store, impatient: Store, prefix: str) -> None:
        super().__init__(store.place(prefix))
        self._store = store
        self._impatient = impatient
        self._prefix = prefix
        self._ranks_here = 1
        self._count_at, self._known_s = 0.0, _KNOWN_S

    def register(self, rank: int, trainer: Process, trainer_gone: Callable[[], bool], world_size: int = 1) -> Lease:
        """See `Leases.register`."""
        lease = _StoreLease(self, rank, trainer, trainer_gone, world_size)
        lease.ensure()
        return lease

    def enter(self, rank: int, writer: Process, trainer: Process) -> None:
        """See `Leases.enter`."""
        self._put(self._store, f"writer-{rank}-{writer.pid}-{writer.start}-{trainer.pid}-{trainer.start}")

    def leave(self, rank: int, trainer: Process, *, done: bool) -> None:
        """See `Leases.leave`."""
        self._put(self._impatient, f"left-{trainer.pid}-{trainer.start}-{int(done)}")

    def renew(self) -> None:
        """See `Leases.renew`."""
        self._put(self._impatient, "renewed")

    def writers(self) -> list[RegisteredWriter]:
        """See `Leases.writers`. One list."""
        return self.writers_in(list(self._store.below(f"{self._prefix}/")), self._store.now)

    def writers_in(self, found: list[About], now: Callable[[], float]) -> list[RegisteredWriter]:
        """Return the writers that objects tell of. `now` is asked for the time if there are some of other hosts."""
        by_host: dict[str, list[About]] = {}
        for each in found:
            by_host.setdefault(each.key.split("/")[-2], []).append(each)
        return [writer for host, some in by_host.items() for writer in self._writers_of_host(host, some, now)]

    def has_left(self, trainer: Process) -> bool:
        """See `Leases.has_left`."""
        names = {each.key.rpartition("/")[2] for each in self._store.below(f"{self._prefix}/{trainer.host}/")}
        return any(f"left-{trainer.pid}-{trainer.start}-{done}" in names for done in (0, 1))

    def ranks_here(self) -> int:
        """See `Leases.ranks_here`. It only says how often to look: counted after a minute, two minutes, four, ..."""
        if time.monotonic() >= self._count_at:
            found = self._store.below(f"{self._prefix}/{Process.here().host}/")
            ranks = {match[1] for each in found if (match := _WRITER.fullmatch(each.key.rpartition("/")[2]))}
            self._ranks_here = max(1, len(ranks))
            self._count_at, self._known_s = time.monotonic() + self._known_s, 2 * self._known_s
        return self._ranks_here

    def watch_host(self, host: str) -> Any:
        """See `Leases.watch_host`."""
        return _StoreHostWatch(self, host)

    def of_one_host(self, host: str) -> list[RegisteredWriter]:
        """Return the writers of a host."""
        found = list(self._store.below(f"{self._prefix}/{host}/"))
        return list(self._writers_of_host(host, found, self._store.now))

    def has_claim(self) -> bool:
        """Return whether the claim of this owner is still there."""
        return self._impatient.about(f"{self._prefix.removesuffix('/leases')}.json") is not None

    def own_file(self) -> str:
        """Return the place of this host's leases, by which its processes choose the one that renews them."""
        return f"{self.path}/{Process.here().host}"

    def _put(self, store: Store, name: str) -> None:
        store.put(f"{self._prefix}/{Process.here().host}/{name}", b"")

    def _writers_of_host(self, host: str, found: list[About], now: Callable[[], float]) -> Iterable[RegisteredWriter]:
        names = {each.key.rpartition("/")[2]: each for each in found}
        newest = max(each.modified_s for each in found) if found else 0.0
        left = {(int(match[1]), int(match[2])): match[3] == "1" for name in names if (match := _LEFT.fullmatch(name))}
        fresh = functools.cache(lambda: now() - newest < STORE_EXPIRY_S)

        def alive(process: Process) -> bool:
            known = process.alive
            return fresh() if known is None else known

        for name in names:
            if (match := _WRITER.fullmatch(name)) is None:
                continue
            rank, pid, start, trainer_pid, trainer_start = map(int, match.groups())
            process, trainer = Process(host, pid, start), Process(host, trainer_pid, trainer_start)
            key = trainer_pid, trainer_start
            is_done = key in left and (process == trainer or left[key])
            yield RegisteredWriter(rank, process, not is_done and alive(process), key not in left and alive(trainer))


class _StoreHostWatch:
    """Which ranks have live writers on one host, for a process that asks again and again."""

    def __init__(self, leases: StoreLeases, host: str) -> None:
        self._leases = leases
        self._host = host

    def alive_ranks(self) -> set[int]:
        """Return the ranks. StorageError if the leases cannot be read."""
        return {writer.rank for writer in self._leases.of_one_host(self._host) if writer.alive}


class _StoreLease(Lease):
    """The registration of this process as a writer; see `Lease`."""

    _leases: StoreLeases
    _registered = False

    def ensure(self) -> None:
        """Register, unless that is done. StorageError if that fails."""
        if not self._registered:
            self._leases.enter(self._rank, self._own, self._trainer)
            self._registered = True
        self._start()

    def _keep(self) -> None:
        lock = NodeLock(self._leases.own_file())
        renewed, recorded = time.monotonic(), False
        try:
            while not self._closed.wait(_POLL_S):
                try:
                    if not recorded and self._trainer_gone():
                        self._leases.leave(self._rank, self._trainer, done=False)
                        recorded = True
                    if time.monotonic() - renewed >= (STORE_RENEW_S if lock.take() else 2 * STORE_RENEW_S):
                        renewed = time.monotonic()
                        if not self._leases.has_claim():
                            return  # there are later owners, one of which has removed what this one had
                        self._leases.renew()
                except (OSError, ValueError, StorageError):  # ValueError: the socket is closed, the process ends
                    continue
        finally:
            lock.release()
