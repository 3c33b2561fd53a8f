"""What a standby server does in threads of its own: follow the active server, and look who is still alive."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from inprocess.coordination.connection import Connection, Greeting, Purpose, Refused
from inprocess.coordination.wire import Host, Op, encode

__all__ = ["Scout"]

_log = logging.getLogger(__name__)
_STEP_DOWN_S = 0.2
_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0


class Scout:
    """Does for a standby what takes time, so that the thread of its server always answers at once.

    `hand_over` gets a connection on which the active server sends its contents; it is called in the thread that
    follows. `upstream_lost` must be called when that connection ends.
    """

    def __init__(self, session: str, name: str, hand_over: Callable[[Connection], None]) -> None:
        self._session = session
        self._name = name
        self._hand_over = hand_over
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._threads: list[threading.Thread] = []

    def follow(self, earlier: Callable[[], Sequence[Host]]) -> None:
        """Keep a connection to the active one of the earlier hosts, from now until `stop`."""
        self._lost.set()
        self._run("follow", lambda: self._follow(earlier))

    def upstream_lost(self) -> None:
        self._lost.set()

    def look(self, earlier: Sequence[Host], verdict: Callable[[Host | None], None]) -> None:
        """Find out whether one of these hosts lives, and tell `verdict`, in another thread: a living one, or None.

        With None every host that did not answer has been told to step down: one that was only stopped reads this
        before anything a client sends it later, and serves nobody any more.
        """
        self._run("look", lambda: verdict(self._find_living(earlier)))

    def stop(self) -> None:
        """End all threads; a dial that hangs delays this by about a second. Not from one of these threads."""
        self._stop.set()
        self._lost.set()
        for thread in self._threads:
            thread.join()

    def _run(self, what: str, job: Callable[[], None]) -> None:
        if self._stop.is_set():
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=job, name=f"inprocess-store-{what}-{self._name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, earlier: Callable[[], Sequence[Host]]) -> None:
        pause = _RETRY_S
        while not self._stop.is_set():
            self._lost.wait()
            if self._stop.is_set():
                return
            self._lost.clear()
            if self._connect_upstream(earlier()):
                pause = _RETRY_S
                continue
            self._lost.set()
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_RETRY_S)

    def _connect_upstream(self, hosts: Sequence[Host]) -> bool:
        for at, host in enumerate(hosts):
            with contextlib.suppress(OSError):
                connection = Connection(host)
                try:
                    connection.greet(self._greeting(Purpose.MIRROR, hosts[:at]))
                except BaseException:
                    connection.close()
                    raise
                self._hand_over(connection)
                return True
        return False

    def _find_living(self, hosts: Sequence[Host]) -> Host | None:
        silent: list[Connection] = []
        try:
            for host in hosts:
                if self._lives(host, silent):
                    return host
            for connection in silent:
                # Still open on purpose: whatever wakes up there finds these two frames one after the other.
                with contextlib.suppress(OSError):
                    connection.send([encode(Op.STEP_DOWN)], _STEP_DOWN_S)
                    _log.warning("%s did not answer and has been told to step down", connection.host)
            return None
        finally:
            for connection in silent:
                connection.close()

    def _lives(self, host: Host, silent: list[Connection]) -> bool:
        """Whether a server of our session answers. One that accepts connections and is silent joins `silent`."""
        try:
            connection = Connection(host)
        except OSError:
            return False
        try:
            connection.greet(self._greeting(Purpose.PROBE))
        except TimeoutError:
            silent.append(connection)
            return False
        except Refused as refused:
            connection.close()
            return refused.why in (Op.NOT_ACTIVE, Op.CHECKING)
        except OSError:
            connection.close()
            return False
        connection.close()
        return True

    def _greeting(self, purpose: Purpose, earlier: Sequence[Host] = ()) -> Greeting:
        return Greeting(self._session, self._name.encode(), purpose, tuple(earlier))
