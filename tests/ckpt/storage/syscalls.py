"""The system calls by which saves and restores change a root, for tests that watch them or have them fail.

`Syscalls` replaces `os` in the storage modules, so it sees every call. It runs the saves of a test in one thread, so
that the n-th call is the same one each time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

_CALLS = ["fsync", "ftruncate", "link", "listdir", "lstat", "mkdir", "open", "pwrite", "rename", "rmdir", "scandir"]
_CALLS += ["stat", "fstat", "unlink", "utime", "write"]
_PACKAGES = ("ckpt.storage.", "ckpt.saving.")


@dataclass(frozen=True)
class Call:
    """One system call: its name and arguments."""

    name: str
    args: tuple[Any, ...]

    @property
    def path(self) -> str:
        """The path that it is about, if that is its first argument."""
        return self.args[0] if self.args and isinstance(self.args[0], str) else ""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(_short(arg) for arg in self.args)})"


Hook = Callable[[Call, Callable[..., Any]], Any]
"""Called in place of a system call; its second argument makes the call, with the arguments it is given."""


_LOOKS = {"listdir", "lstat", "open", "scandir", "stat"}


class FailingLooks:
    """A hook that has looks at the storage fail with an error: those at a path that contains `at_path`, or number `at`.

    Syncs are skipped: power is not lost here. `looks` are all that were made.
    """

    def __init__(self, number: int, at_path: str | None = None, *, at: int = -1) -> None:
        self.looks: list[Call] = []
        self.at_path = at_path
        self._errno = number
        self._at = at

    def __call__(self, call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "fsync":
            return None
        is_look = call.name in _LOOKS and not (call.name == "open" and call.args[1] & (os.O_WRONLY | os.O_RDWR))
        if is_look and ".probe." not in call.path:
            self.looks.append(call)
            if len(self.looks) - 1 == self._at or (self.at_path is not None and self.at_path in call.path):
                raise OSError(self._errno, os.strerror(self._errno))
        return perform(*call.args)


class Syscalls:
    """Intercepts the calls of the storage modules in the thread that makes this object."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._hook: Hook | None = None
        self._errno = 0

    @contextmanager
    def hooked(self, hook: Hook) -> Iterator[None]:
        """Have `hook` called in place of every system call."""
        self._hook = hook
        try:
            with self._installed():
                yield
        finally:
            self._hook = None

    @contextmanager
    def _installed(self) -> Iterator[None]:
        proxy = _Os({name: self._wrapped(name) for name in _CALLS})
        replacements = {
            "os": proxy,
            "shutil": SimpleNamespace(rmtree=lambda path: _remove_tree(proxy, path)),
            "ctypes": SimpleNamespace(CDLL=lambda *_, **__: self._libc(), get_errno=lambda: self._errno),
            "ThreadPoolExecutor": _InThisThread,
        }
        replaced = []
        for name, module in list(sys.modules.items()):
            if name.startswith(_PACKAGES):
                for attribute in replacements.keys() & vars(module).keys():
                    replaced.append((module, attribute, getattr(module, attribute)))
                    setattr(module, attribute, replacements[attribute])
        try:
            yield
        finally:
            for module, attribute, value in replaced:
                setattr(module, attribute, value)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._hook is None or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            call = Call(name, _with_directories(args, kwargs))
            return self._hook(call, lambda *given: function(*(args if given == call.args else given), **kwargs))

        return call

    def _libc(self) -> Any:
        libc = ctypes.CDLL(None, use_errno=True)

        def really(source: str, target: str, flags: int) -> None:
            if libc.renameat2(-100, os.fsencode(source), -100, os.fsencode(target), flags) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))

        def renameat2(_: int, source: bytes, __: int, target: bytes, flags: int) -> int:
            call = Call("renameat2", (os.fsdecode(source), os.fsdecode(target), flags))
            try:
                if self._hook is None or threading.get_ident() != self._thread:
                    really(*call.args)
                else:
                    self._hook(call, really)
            except OSError as error:
                self._errno = error.errno or errno.EIO
                return -1
            return 0

        return SimpleNamespace(renameat2=renameat2)


class _Os:
    """The module `os` with some functions replaced."""

    def __init__(self, replaced: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _InThisThread:
    """An executor that runs everything at once in the calling thread."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> _InThisThread:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[..., Any], *values: Iterable[Any]) -> Iterable[Any]:
        return [function(*args) for args in zip(*values, strict=False)]

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_: object, **__: object) -> None:
        pass


def _with_directories(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call with whole paths in place of those relative to a descriptor."""
    folders = [kwargs.get("src_dir_fd", kwargs.get("dir_fd")), kwargs.get("dst_dir_fd")]
    whole = list(args)
    for position, folder in enumerate(folders):
        if folder is not None:
            whole[position] = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), args[position])
    return tuple(whole)


def _remove_tree(proxy: Any, path: str) -> None:
    """As shutil.rmtree, by intercepted calls."""
    with proxy.scandir(path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(proxy, entry.path)
        else:
            proxy.unlink(entry.path)
    proxy.rmdir(path)


def _short(value: Any) -> str:
    if isinstance(value, (bytes, memoryview)):
        return f"<{len(value)} bytes>"
    return repr(value) if not isinstance(value, str) else "/".join(value.split("/")[-3:])
