import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inprocess.main_thread import async_raise as module
from inprocess.main_thread.async_raise import async_raise, clear_async_raise, reraise_if_unraisable
from tests.support import LeakCheck


class Thrown(BaseException):
    pass


class OnDelete:
    """Calls something in its destructor."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def __del__(self) -> None:
        self._action()


@pytest.fixture
def unraisables(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type]]:
    """What reached the hook that was there before."""
    seen: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    yield seen
    clear_async_raise(threading.get_ident())


def run_bytecode(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def drop(action: Callable[[], object], times: int = 1) -> None:
    """Let objects die, whose destructor calls `action`, and go on."""
    for _ in range(times):
        OnDelete(action)
    run_bytecode(20)


def throw_here() -> None:
    async_raise(threading.get_ident(), Thrown)


class TestAsyncRaise:
    def test_raises_in_the_thread(self) -> None:
        caught: list[type] = []
        entered = threading.Event()

        def run() -> None:
            try:
                entered.set()
                run_bytecode(20)
            except Thrown as error:
                caught.append(type(error))

        thread = threading.Thread(target=run)
        thread.start()
        entered.wait()
        assert thread.ident is not None
        async_raise(thread.ident, Thrown)
        thread.join(20)
        assert caught == [Thrown]

    def test_raises_in_the_calling_thread(self) -> None:
        with pytest.raises(Thrown):
            throw_here()

    def test_no_such_thread(self) -> None:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        assert thread.ident is not None
        with pytest.raises(RuntimeError, match="no thread"):
            async_raise(thread.ident, Thrown)

    @pytest.mark.parametrize("wrong", [Thrown(), int, "Thrown"])
    def test_only_exception_classes(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="exception classes"):
            async_raise(threading.get_ident(), wrong)

    def test_more_than_one_thread_is_taken_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []

        def pretend(thread_id: int, exception: Any) -> int:
            calls.append(exception)
            return 2

        monkeypatch.setattr(module, "_set_async_exc", pretend)
        with pytest.raises(RuntimeError, match="2 threads"):
            async_raise(1, Thrown)
        assert calls[0].value is Thrown
        assert not calls[1]  # NULL

    def test_skipped_while_python_shuts_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "is_finalizing", lambda: True)
        async_raise(-1, Thrown)
        clear_async_raise(threading.get_ident())

    def test_clear_takes_back(self) -> None:
        """The exception is thrown by C code, after which the thread looks for it only inside `clear_async_raise`."""
        ident, results = threading.get_ident(), []
        for _ in range(3):
            try:
                clear_async_raise(ident)
                results.append("went on")
            except Thrown:
                results.append("raised")
        run_bytecode(0.01)
        assert results == ["went on"] * 3

    def test_clear_replaces_one_that_is_pending(self) -> None:
        in_c, results = threading.Lock(), []
        in_c.acquire()
        entered, thrown = threading.Event(), threading.Event()

        def run() -> None:
            entered.set()
            try:
                in_c.acquire()
                results.append("not raised")
            except Thrown:
                clear_async_raise(threading.get_ident())
                run_bytecode(0.01)
                results.append("raised once")

        thread = threading.Thread(target=run)
        thread.start()
        entered.wait()
        assert thread.ident is not None
        async_raise(thread.ident, Thrown)
        async_raise(thread.ident, Thrown)
        thrown.set()
        in_c.release()
        thread.join(20)
        assert results == ["raised once"]

    def test_only_the_own_can_be_cleared(self) -> None:
        with pytest.raises(RuntimeError, match="itself"):
            clear_async_raise(threading.get_ident() + 1)

    def test_traced_code_runs_after_clear(self) -> None:
        clear_async_raise(threading.get_ident())
        previous = sys.gettrace()
        events: list[str] = []

        def trace(frame: Any, event: str, arg: object) -> Any:
            events.append(event)
            return trace

        sys.settrace(trace)
        try:
            (lambda: None)()
        finally:
            sys.settrace(previous)
        assert "call" in events

    def test_types_of_others_who_use_the_function_are_left_alone(self) -> None:
        clear_async_raise(threading.get_ident())
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc.argtypes is None


class TestReraise:
    def test_thrown_again_out_of_a_destructor(self, unraisables: list[type], leak_check: LeakCheck) -> None:
        with pytest.raises(Thrown), reraise_if_unraisable(Thrown):
            drop(throw_here)
        assert not unraisables

    def test_keeps_the_subclass(self, unraisables: list[type]) -> None:
        class Special(Thrown):
            pass

        with pytest.raises(Special), reraise_if_unraisable(Thrown):
            drop(lambda: async_raise(threading.get_ident(), Special))

    def test_again_and_again(self, unraisables: list[type], leak_check: LeakCheck) -> None:
        for _ in range(200):
            with pytest.raises(Thrown), reraise_if_unraisable(Thrown):
                drop(throw_here)

    def test_swallowed_by_several_destructors(self, unraisables: list[type]) -> None:
        swallowed = []

        def swallow() -> None:
            swallowed.append(1)
            throw_here()

        with pytest.raises(Thrown), reraise_if_unraisable(Thrown):
            drop(swallow, times=5)
        assert swallowed

    def test_in_another_thread(self, unraisables: list[type]) -> None:
        caught = []

        def run() -> None:
            try:
                drop(throw_here)
            except Thrown:
                caught.append(1)

        with reraise_if_unraisable(Thrown):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(20)
        assert caught

    def test_comes_up_in_the_previous_hook(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: throw_here())
        with pytest.raises(Thrown), reraise_if_unraisable(Thrown):
            drop(lambda: 1 / 0)

    def test_other_exceptions_go_to_the_previous_hook(self, unraisables: list[type]) -> None:
        with reraise_if_unraisable(Thrown):
            OnDelete(lambda: 1 / 0)
            run_bytecode(0.01)
        assert unraisables == [ZeroDivisionError]

    @pytest.mark.parametrize("error", [None, ValueError, Thrown, KeyboardInterrupt])
    def test_hook_is_put_back(self, error: type[BaseException] | None, unraisables: list[type]) -> None:
        before = sys.unraisablehook

        @reraise_if_unraisable(Thrown)
        def function() -> str:
            assert sys.unraisablehook is not before
            if error is not None:
                raise error
            return "result"

        for _ in range(2):
            if error is None:
                assert function() == "result"
            else:
                with pytest.raises(error):
                    function()
            assert sys.unraisablehook is before

    def test_hook_of_somebody_else_stays(self, unraisables: list[type]) -> None:
        with reraise_if_unraisable(Thrown):
            ours = sys.unraisablehook
            theirs = lambda unraisable: ours(unraisable)  # noqa: E731
            sys.unraisablehook = theirs
        assert sys.unraisablehook is theirs
        OnDelete(lambda: 1 / 0)
        assert unraisables == [ZeroDivisionError]

    def test_nothing_is_thrown_afterwards(self, unraisables: list[type]) -> None:
        with reraise_if_unraisable(Thrown):
            hook = sys.unraisablehook
        sys.unraisablehook = hook
        OnDelete(throw_here)
        run_bytecode(0.05)
