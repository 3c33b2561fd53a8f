"""The connections of one client, and its journal: who holds which, and the way from one server to the next."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from inprocess.coordination.connection import Connection, Greeting, Purpose, Refused
from inprocess.coordination.journal import Entry, Journal
from inprocess.coordination.wire import HOSTS_KEY, MAX_CHANGE, Frame, Host, Op, body_of, encode, pack_number
from inprocess.exception import StoreError

__all__ = ["Links"]

_log = logging.getLogger(__name__)
_NO_THREAD = -1
_MOST_IDLE = 4
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_REPLAY_S = 30.0


class Links:
    """Connections, each used by one thread at a time, and the changes that a new server would need.

    An exception may hit a thread at any bytecode, so nothing relies on a `finally` being reached:

    * No lock is held while anything blocks. Threads that find the server gone look for the next one independently;
      all of them may replay the journal there, because a server applies each change once.
    * A connection belongs to the thread whose ident stands in `owner`. What a thread finds owned by itself when it
      begins a request is left over from one that did not end, and is closed.
    * A change that is under way stands under its thread, whose next change takes its place.
    """

    def __init__(self, hosts: Iterable[Host], session: str, client: bytes, patience: float) -> None:
        self._session = session
        self._patience = patience
        self._client = client
        self._lock = threading.RLock()
        self._watcher = threading.Thread(target=self._watch, name="inprocess-store-watch", daemon=True)
        # Under the lock:
        self._hosts = tuple(sorted(set(hosts)))
        self._current = self._hosts[0]  # only ever moves to higher positions
        self._connected = False  # whether `_current` has the journal
        self._embedded = False
        self._closed = False
        self._links: list[Connection] = []
        self._journal = Journal()
        self._sequence = 0
        self._under_way: dict[int, int] = {}  # thread -> sequence number

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self._hosts

    @property
    def current(self) -> Host:
        return self._current

    @property
    def embedded(self) -> bool:
        return self._embedded

    def add_hosts(self, hosts: Iterable[Host]) -> None:
        """Take in more hosts; the order is that of their positions, whoever names them first."""
        with self._lock:
            taken = {host.position for host in self._hosts}
            self._hosts = tuple(sorted({*self._hosts, *(host for host in hosts if host.position not in taken)}))

    def local_name(self) -> str:
        """Return how other machines reach this one, judged by a connection."""
        link = self.take()
        name = str(link.socket.getsockname()[0]).removeprefix("::ffff:")
        with self._lock:
            link.owner = None
        # Over loopback we see the server of our own machine, whose name others know.
        return self._current.name if name == "::1" or name.startswith("127.") else name

    def connect(self, timeout: float) -> None:
        """Make the first connection. StoreError if no host accepts us in time."""
        try:
            link = self._open(timeout)
            self._watched = self._open(self._patience)
            with self._lock:
                link.owner, self._watched.owner = None, _NO_THREAD
            self._watcher.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = self._links, []
        for link in links:
            link.close()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _watch(self) -> None:
        """Go over to the next server when this one ends, although nobody asks for anything at the moment.

        Others may be waiting there for what this client has changed. Ends with `close`, or when there is no server any
        more: that is for the next request to report.
        """
        with contextlib.suppress(StoreError):
            while True:
                try:
                    self._watched.watch()
                except OSError as error:
                    _log.debug("store server %s is gone: %s", self._watched.host, error)
                self.drop(self._watched)
                self._watched = self._open(self._patience)

    # Changes

    def begin(self, op: Op, arguments: tuple[bytes, ...]) -> Entry:
        """Number a change and write it down, before anything of it is sent. ValueError if it is too large."""
        size = sum(map(len, arguments))
        if size > MAX_CHANGE:
            raise ValueError(f"{op.name} of {arguments[0][:100]!r} with {size} bytes; the limit is {MAX_CHANGE}")
        with self._lock:
            self._sequence += 1
            entry = Entry(self._sequence, op, arguments)
            self._under_way[threading.get_ident()] = entry.sequence
            self._journal.record(entry)
        return entry

    def frame(self, entry: Entry) -> bytes:
        with self._lock:
            floor = min(self._under_way.values(), default=entry.sequence)
        return encode(entry.op, pack_number(entry.sequence), pack_number(floor), *entry.arguments)

    def abandon(self, entry: Entry) -> None:
        """Nobody waits for the answer to this change any more."""
        me = threading.get_ident()
        with self._lock:
            if self._under_way.get(me) == entry.sequence:
                del self._under_way[me]

    def forget(self, prefix: bytes) -> None:
        """Drop such changes, except for the list of hosts."""
        with self._lock:
            kept = [entry for entry in self._journal.since(0) if entry.arguments[0] == HOSTS_KEY.encode()]
            self._journal.forget(prefix)
            for entry in kept if HOSTS_KEY.encode().startswith(prefix) else ():
                self._journal.record(entry)

    # Connections

    def take(self) -> Connection:
        """Return a connection to the current server for this thread. StoreError if there is no server."""
        me = threading.get_ident()
        with self._lock:
            if self._closed:
                raise StoreError("this client of the coordination store is closed")
            stale = [link for link in self._links if link.owner == me or self._is_stale(link)]
            self._links = [link for link in self._links if link not in stale]
            found = next((link for link in self._links if link.owner is None), None)
            if found is not None:
                found.owner = me
        for link in stale:
            link.close()
        return found or self._open(self._patience)

    def drop(self, link: Connection) -> None:
        """Close a connection that did not end its request. Idle ones to the same server are likely as dead."""
        with self._lock:
            dead = [other for other in self._links if other is link or other.owner is None]
            self._links = [other for other in self._links if other not in dead]
        link.close()
        for other in dead:
            other.close()

    def settle(self, link: Connection, entry: Entry | None, answer: Frame) -> bool:
        """End a request. False if the client has left that server meanwhile: then ask again, on the new one.

        Under one lock with the end of a replay (see `_adopt`): a change is either in the journal that was replayed, or
        is asked again.
        """
        with self._lock:
            if link.host.position < self._current.position:
                stale = True
            else:
                stale = False
                if entry is not None:
                    self._end(entry, answer)
                link.owner = None
            idle = [other for other in self._links if other.owner is None]
            surplus = [link] if stale else idle[_MOST_IDLE:]
            self._links = [other for other in self._links if other not in surplus]
        for other in surplus:
            other.close()
        return not stale

    def _end(self, entry: Entry, answer: Frame) -> None:
        self.abandon(entry)
        if entry.op is Op.COMPARE_SET and answer.op is Op.OK:
            self._journal.settle_compare_set(entry, won=answer.fields[0] == entry.arguments[2])

    def _is_stale(self, link: Connection) -> bool:
        return link.owner is None and link.host.position < self._current.position

    def _open(self, timeout: float) -> Connection:
        """Connect to the current host, or the next one that serves us."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE_S
        while True:
            reports: list[str] = []
            for host in [host for host in self._hosts if host.position >= self._current.position]:
                try:
                    return self._go_to(host)
                except OSError as error:
                    reports.append(f"{host.name}:{host.port} ({error})")
                    if isinstance(error, Refused) and error.why is Op.NOT_ACTIVE:
                        break  # an earlier host lives, and so we must try again there
            if self._closed or time.monotonic() > deadline:
                raise StoreError(f"no host of the coordination store can be reached: {', '.join(reports)}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _go_to(self, host: Host) -> Connection:
        """Return a connection to this host, which is the current one from here on. OSError if it does not serve us."""
        earlier = tuple(other for other in self._hosts if other.position < host.position)
        link = Connection(host)
        try:
            link.greet(Greeting(self._session, self._client, Purpose.CLIENT, earlier))
            self._adopt(link)
        except BaseException:
            link.close()
            raise
        return link

    def _adopt(self, link: Connection) -> None:
        """Replay the journal until nothing new is in it; at that moment the server of this connection is current."""
        replayed = 0
        while True:
            with self._lock:
                if self._closed or link.host.position < self._current.position:
                    raise ConnectionAbortedError("another thread has left this host meanwhile")
                known = self._connected and link.host == self._current
                entries = [] if known else self._journal.since(replayed)
                if not entries:
                    if self._connected and not known:
                        _log.warning("coordination store: going on with %s:%d", link.host.name, link.host.port)
                    self._current, self._connected, self._embedded = link.host, True, link.embedded
                    link.owner = threading.get_ident()
                    self._links.append(link)
                    return
            _replay(link, entries)
            replayed = entries[-1].sequence


def _replay(link: Connection, entries: Sequence[Entry]) -> None:
    """Send changes that the server may or may not know. Floor 0: it must not forget any of them."""
    nothing = pack_number(0)
    frames = (encode(entry.op, pack_number(entry.sequence), nothing, *entry.arguments) for entry in entries)
    link.send((encode(Op.REPLAY, body_of(frame)) for frame in frames), _REPLAY_S)
    link.ask(encode(Op.SYNC), _REPLAY_S)
