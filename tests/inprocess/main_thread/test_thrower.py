"""Exceptions thrown into the main thread at every place where CPython could raise them, in code that must not be torn.

A profiler stops the program at each of these places in turn, and throws there.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from inprocess import torn_locks
from inprocess.main_thread.atomic import AtomicLock
from inprocess.main_thread.thrower import MainThreadThrower, discard_imports, failed_imports
from inprocess.modes import Modes
from inprocess.torn_locks import release_torn_locks, used_locks
from tests.support import LeakCheck

_LONG_S = 60.0


class Thrown(BaseException):
    pass


@pytest.fixture
def thrower(leak_check: LeakCheck) -> Iterator[MainThreadThrower]:
    with MainThreadThrower() as thrower:
        assert thrower.interrupter.enabled
        yield thrower


class _Walk:
    """Runs a function, and throws at the place with a number among those where CPython handles signals.

    These are the beginnings of functions, and the ends of calls of C functions: where a profiler is called, too.
    """

    def __init__(self, thrower: MainThreadThrower, limit_s: float = _LONG_S) -> None:
        self._thrower = thrower
        self._limit_s = limit_s
        thrower.waits_after_s = _LONG_S  # the signals come from this thread, always from the same instruction
        self._place = 0
        self._seen = 0
        self.raised: Thrown | None = None

    def count(self, function: Callable[[], object]) -> int:
        """Return how many places the function has."""
        self.throws_at(1 << 60, function)
        return self._seen

    def throws_at(self, place: int, function: Callable[[], object]) -> bool:
        """Return whether the function has a place of this number; what was thrown there came out of it, or was late."""
        self._place, self._seen, self.raised = place, 0, None
        sys.setprofile(self._pass)
        try:
            function()
            self._thrower.disarm()
        except Thrown as error:
            self.raised = error
            return True
        finally:
            sys.setprofile(None)
            self._thrower.disarm()
        return self._seen > place

    def _pass(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return"):
            return
        if self._seen == self._place:
            self._thrower.throw(Thrown, self._limit_s)
        elif self._seen > self._place:
            self._thrower.again()
        self._seen += 1


def _no_grad() -> None:
    with torch.no_grad():
        torch.ones(1)


def _inference_mode() -> None:
    with torch.inference_mode():
        torch.ones(1)


def _autocast() -> None:
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        torch.ones(1)


@torch.no_grad()
def _decorated() -> None:
    torch.ones(1)


def _other_modes() -> None:
    with torch.device("meta"):
        torch.ones(1)
    with torch.autograd.graph.save_on_cpu(), torch.backends.cudnn.flags(enabled=False):
        torch.ones(1)


def _attention() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.ones(1)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _generator() -> None:
    with _default_dtype():
        torch.ones(1)


def _exit_stack() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_default_dtype())


@pytest.mark.parametrize(
    "function",
    [_no_grad, _inference_mode, _autocast, _decorated, _other_modes, _attention, _generator, _exit_stack],
    ids=lambda function: function.__name__,
)
def test_no_mode_is_left_wherever_it_is_thrown(thrower: MainThreadThrower, function: Callable[[], None]) -> None:
    function()  # what is imported or made once
    modes = Modes()
    modes.record()
    walk, place = _Walk(thrower), 0
    while walk.throws_at(place, function):
        assert modes.restore() == [], f"place {place}"
        place += 1
    assert place > 4


def test_no_lock_is_left_wherever_it_is_thrown(thrower: MainThreadThrower) -> None:
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.Logger("of the test")
    logger.addHandler(handler)
    items: queue.Queue[int] = queue.Queue(1)
    event, semaphore = threading.Event(), threading.Semaphore(2)
    kept: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def function() -> None:
        logger.warning("a message of %s", "the function")
        items.put(1)
        items.get_nowait()
        event.set()
        event.clear()
        semaphore.acquire()
        semaphore.release()
        held = threading.local()
        kept["held"] = held
        weakref.finalize(held, int)

    function()
    walk, place = _Walk(thrower), 0
    while walk.throws_at(place, function):
        while not items.empty():
            items.get_nowait()
        assert handler.lock is not None
        assert not handler.lock._is_owned(), place  # type: ignore[attr-defined]
        assert not logging._lock._is_owned(), place  # type: ignore[attr-defined]
        for lock in (items.mutex, event._cond._lock, semaphore._cond._lock):  # type: ignore[attr-defined]
            assert lock.acquire(blocking=False), place
            lock.release()
        place += 1
    assert place > 20


def test_locks_that_are_torn_all_the_same_are_released(
    thrower: MainThreadThrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its limit the exception is raised in `queue` and `threading`, too."""
    monkeypatch.setattr(torn_locks, "_PATIENCE_S", 0.1)  # for each lock; no other thread holds one
    items: queue.Queue[int] = queue.Queue(2)
    event, semaphore = threading.Event(), threading.Semaphore(2)

    def function() -> None:
        items.put(1)
        items.get_nowait()
        event.set()
        semaphore.release()

    function()
    walk, place, torn = _Walk(thrower, limit_s=0.0), 0, 0
    while walk.throws_at(place, function):
        locks = (items.mutex, event._cond._lock, semaphore._cond._lock)  # type: ignore[attr-defined]
        torn += any(lock.locked() for lock in locks)
        if walk.raised is not None:
            release_torn_locks(used_locks(walk.raised))
        for lock in locks:
            assert lock.acquire(blocking=False), place
            lock.release()
        while not items.empty():
            items.get_nowait()
        place += 1
    assert place > 20
    assert torn > 0


def _package(folder: Path) -> None:
    """Write a package whose modules need each other, as large ones do."""
    package = folder / "torn_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from torn_package import first, second\nvalue = second.value\n")
    (package / "first.py").write_text("import torn_package.inner\nvalue = 1\n")
    (package / "second.py").write_text("from torn_package.first import value\n")
    (package / "inner" / "__init__.py").write_text("from torn_package.inner import deep\n")
    (package / "inner" / "deep.py").write_text("value = sum(n for n in range(3))\n")


def _import() -> None:
    importlib.import_module("torn_package")


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torn_package"]:
        del sys.modules[name]


def _use() -> int:
    package: Any = importlib.import_module("torn_package")
    return int(package.first.value + package.second.value + package.inner.deep.value + package.value)


def test_no_import_is_torn(thrower: MainThreadThrower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    walk = _Walk(thrower)
    places = walk.count(_import)
    _forget()
    for place in range(0, places, places // 40):
        walk.throws_at(place, _import)
        assert _use() == 6, place
        _forget()


# Callbacks of weak references, among them one of the import system, cannot pass an exception on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_torn_import_leaves_is_discarded(
    thrower: MainThreadThrower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its limit the exception is raised in imports, too, as they may hang."""
    _package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    walk, torn = _Walk(thrower, limit_s=0.0), 0
    places = walk.count(_import)
    _forget()
    for place in range(0, places, places // 40):
        walk.throws_at(place, _import)
        imports, thrower.interrupted_imports = thrower.interrupted_imports, []
        torn += bool(imports)
        discard_imports(imports)
        assert _use() == 6, place
        _forget()
    assert torn > 20
    assert thrower.forced_at is not None


def test_what_the_exception_of_a_signal_handler_leaves_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs raise in handlers; PyTorch does so when a worker of a DataLoader was killed."""
    _package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torn_package" / "second.py").write_text("import signal\nsignal.raise_signal(signal.SIGUSR1)\n")

    def fails(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("a worker was killed")

    before = signal.signal(signal.SIGUSR1, fails)
    try:
        with pytest.raises(RuntimeError, match="a worker was killed") as raised:
            _import()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "torn_package.first" in sys.modules
    assert failed_imports(raised.value) == ["torn_package", "torn_package.second"]
    discard_imports(failed_imports(raised.value))
    (tmp_path / "torn_package" / "second.py").write_text("from torn_package.first import value\n")
    importlib.invalidate_caches()
    assert _use() == 6
    _forget()


_REGISTERING = """
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory

@CacheArtifactFactory.register
class Artifact(CacheArtifact):
    def populate_cache(self):
        pass

    @staticmethod
    def type():
        return "of_the_test"
"""


def test_what_a_discarded_module_has_registered_in_torch_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses it a second time, and `torch._dynamo` could not be imported any more."""
    from torch.compiler._cache import CacheArtifactFactory

    (tmp_path / "torn_package").mkdir()
    (tmp_path / "torn_package" / "__init__.py").write_text("import torn_package.inner\nraise ValueError('once')\n")
    (tmp_path / "torn_package" / "inner.py").write_text(_REGISTERING)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="once") as raised:
            _import()
        assert "of_the_test" in CacheArtifactFactory._artifact_types
        assert discard_imports(failed_imports(raised.value)) == ["torn_package.inner"]
    assert "of_the_test" not in CacheArtifactFactory._artifact_types


def test_code_that_is_executed_in_a_module_is_no_import() -> None:
    with pytest.raises(ValueError, match="of the code") as raised:
        exec("raise ValueError('of the code')", {"__name__": "inprocess.modes"})
    assert failed_imports(raised.value) == []


def _throw_from_a_thread(thrower: MainThreadThrower, limit_s: float, begin: threading.Event) -> threading.Thread:
    def run() -> None:
        begin.wait(_LONG_S)
        thrower.throw(Thrown, limit_s)
        while thrower.is_pending:
            time.sleep(0.001)
            thrower.again()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_wait_in_a_protected_module_is_ended(thrower: MainThreadThrower) -> None:
    begin, never = threading.Event(), threading.Event()
    thread = _throw_from_a_thread(thrower, _LONG_S, begin)
    with pytest.raises(Thrown):  # noqa: PT012
        begin.set()
        never.wait(_LONG_S)
    thread.join()
    assert thrower.forced_at is None


def test_a_destructor_that_waits_is_left_alone_until_the_limit(thrower: MainThreadThrower) -> None:
    """Python would drop the exception."""
    begin, over = threading.Event(), threading.Event()
    thread = _throw_from_a_thread(thrower, _LONG_S, begin)

    class Slow:
        def __del__(self) -> None:
            begin.set()
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                pass
            over.set()

    with pytest.raises(Thrown):  # noqa: PT012
        slow = Slow()
        del slow
        time.sleep(_LONG_S)
    thread.join()
    assert over.is_set()


def test_an_import_that_hangs_is_interrupted_after_the_limit(
    thrower: MainThreadThrower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging_module.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    begin = threading.Event()
    thread = _throw_from_a_thread(thrower, 0.2, begin)
    with pytest.raises(Thrown):  # noqa: PT012
        begin.set()
        importlib.import_module("hanging_module")
    thread.join()
    assert "threading.py" in (thrower.forced_at or "") or "importlib" in (thrower.forced_at or "")
    assert thrower.interrupted_imports == ["hanging_module"]


def test_nothing_is_raised_in_an_atomic_section(leak_check: LeakCheck) -> None:
    lock = AtomicLock()
    with MainThreadThrower(lock.is_held_here) as thrower:
        with pytest.raises(Thrown):  # noqa: PT012
            with lock.atomic():
                thrower.throw(Thrown, 0.0)
                thrower.again()
                passed = True
            thrower.again()
            signal.pause()
        assert passed


def test_modules_of_the_user_are_protected(leak_check: LeakCheck) -> None:
    with MainThreadThrower(modules=("tests.inprocess",)) as thrower:
        thrower.throw(Thrown, _LONG_S)
        thrower.again()  # this function is protected
        thrower.disarm()
        thrower.again()
    with MainThreadThrower(modules=("tests.in",)) as thrower, pytest.raises(Thrown):
        thrower.throw(Thrown, _LONG_S)


def test_a_main_thread_that_blocks_the_signal_gets_the_exception_all_the_same(thrower: MainThreadThrower) -> None:
    number = thrower.interrupter.signal_number
    assert number is not None
    begin = threading.Event()
    thread = _throw_from_a_thread(thrower, _LONG_S, begin)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        with pytest.raises(Thrown):  # noqa: PT012
            begin.set()
            until = time.monotonic() + _LONG_S
            while time.monotonic() < until:
                time.sleep(0.001)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    thread.join()


def test_without_a_signal_no_lock_is_left_either(thrower: MainThreadThrower) -> None:
    """The exception is set by another thread then, which looks at the stack before."""
    number = thrower.interrupter.signal_number
    assert number is not None
    items: queue.Queue[int] = queue.Queue()

    class Slow:
        """Put into the queue, it keeps the main thread in a function of `queue`."""

        def __enter__(self) -> None:
            begin.set()
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                pass
            over.append(True)

        def __exit__(self, *error: object) -> None: ...

    over: list[bool] = []
    begin = threading.Event()
    thread = _throw_from_a_thread(thrower, _LONG_S, begin)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        with pytest.raises(Thrown), Slow():  # noqa: PT012
            until = time.monotonic() + _LONG_S
            while time.monotonic() < until:
                items.put(1)
                items.get()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    thread.join()
    assert over == [True]


def test_nothing_is_raised_after_it_was_disarmed(thrower: MainThreadThrower) -> None:
    for _ in range(200):
        thread = threading.Thread(target=thrower.throw, args=(Thrown, 0.0))
        try:
            thread.start()
            thrower.disarm()
        except Thrown:
            thrower.disarm()
        thread.join()
        with contextlib.suppress(Thrown):
            thrower.disarm()
        time.sleep(0)
