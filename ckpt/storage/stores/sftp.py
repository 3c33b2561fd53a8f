"""A directory of an SSH server as a store, by SFTP: ``sftp://user@host/data/run7``.

paramiko does the connection. The layout is that of `directory`: a file is written and synced in `.incomplete`, and gets
its name when it is whole, by link(2) of the server, which replaces nothing, or by rename(2). For these the server needs
the extensions hardlink, posix-rename and fsync, which OpenSSH has. There is none to sync a folder: that a name survives
a loss of power is up to the file system of the server.

The user is that of the URL, or the option `username`; it is known by a key, from the file `private_key`, the SSH agent
or ``~/.ssh``, or by `password`. The host must be in ``~/.ssh/known_hosts``, or in the file `known_hosts`. Links are
left out of lists and not read; but the server resolves paths, so folders that are links are followed there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ckpt.errors import StorageError
from ckpt.storage.stores.interface import About, StorageOptions, Store, StoreClock, is_key

_Answer = TypeVar("_Answer")

_OPTIONS = ("username", "password", "private_key", "known_hosts")
_INCOMPLETE = ".incomplete"
_INCOMPLETE_S = 3600.0  # older files there are of processes that have ended
_SWEEP_S = 600.0
_CHANNELS = 4  # at once; servers allow ten for each connection
_CONNECT_S, _REQUEST_S, _LEAST_REQUEST_S = 15.0, 60.0, 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_PIECE_BYTES = 1 << 20
_FOLDER_ATTEMPTS = 20
_EXTENDED = 200  # the number of requests that are extensions


def open_sftp(url: str, options: StorageOptions) -> SftpStore:
    """Return the store of a URL, without connecting. StorageError if the options are not those of SFTP."""
    try:
        import paramiko  # noqa: F401
    except ImportError:
        raise StorageError(f"{url} needs paramiko: pip install 'ckpt-inprocess[sftp]'") from None
    given = dict(options.given)
    if unknown := sorted(given.keys() - set(_OPTIONS)):
        raise StorageError(f"{url}: SFTP has no option {unknown[0]!r}; storage_options has {', '.join(_OPTIONS)}")
    return SftpStore(url, given, options.timeout_s)


class SftpStore(Store):
    """The files below a directory of a server. A lost connection is made again, and the operation repeated."""

    def __init__(self, url: str, options: dict[str, str], timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port or 22
        self._user = parts.username or options.get("username")
        self._path = parts.path or "/"
        self._options = options
        self._timeout_s = timeout_s
        self._request_s = min(_REQUEST_S, max(_LEAST_REQUEST_S, 2 * timeout_s))
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(_CHANNELS)
        self._connection: Any = None
        self._idle: list[Any] = []  # channels; each serves one thread at a time
        self._clock = StoreClock()
        self._swept = time.monotonic()

    def create(self, key: str, data: bytes) -> About | None:
        """See `Store.create`."""

        def create(sftp: Any) -> About | None:
            def link(temporary: str) -> bool:
                try:
                    sftp._request(
                        _EXTENDED, "hardlink@openssh.com", os.fsencode(temporary), os.fsencode(self._file(key))
                    )
                except FileNotFoundError:
                    raise
                except OSError:  # a failure without a number; that the name exists, most times
                    found = _read(sftp, self._file(key), 0, len(data) + 1)
                    if found is None:
                        raise
                    return found == data
                return True

            return self._status(sftp, key) if self._written(sftp, key, data, link) else None

        return self._ask("create", key, create)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Store.put`."""

        def put(sftp: Any) -> None:
            def rename(temporary: str) -> bool:
                sftp.posix_rename(temporary, self._file(key))
                return True

            self._written(sftp, key, data, rename)

        self._ask("write", key, put)

    def read(self, key: str, offset: int, nbytes: int) -> memoryview | None:
        """See `Store.read`."""
        found = self._ask("read", key, lambda sftp: _read(sftp, self._file(key), offset, nbytes))
        return None if found is None else memoryview(found)

    def about(self, key: str) -> About | None:
        """See `Store.about`."""
        return self._ask("find", key, lambda sftp: self._status(sftp, key))

    def below(self, prefix: str) -> Iterator[About]:
        """See `Store.below`."""

        def walk(sftp: Any, prefix: str) -> list[About]:
            folders, objects = self._scan(sftp, prefix)
            return objects + [each for name in folders for each in walk(sftp, f"{prefix}{name}/")]

        return iter(self._ask("list", prefix, lambda sftp: walk(sftp, prefix)))

    def names(self, prefix: str) -> tuple[list[str], list[About]]:
        """See `Store.names`."""

        def has_objects(sftp: Any, prefix: str) -> bool:
            folders, objects = self._scan(sftp, prefix)
            return bool(objects) or any(has_objects(sftp, f"{prefix}{name}/") for name in folders)

        def names(sftp: Any) -> tuple[list[str], list[About]]:
            folders, objects = self._scan(sftp, prefix)
            return [name for name in folders if has_objects(sftp, f"{prefix}{name}/")], objects

        return self._ask("list", prefix, names)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`. Folders in which nothing is left go with them."""

        def delete(sftp: Any) -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    sftp.remove(self._file(key))
            for folder in dict.fromkeys(key.rpartition("/")[0] for key in keys):
                self._prune(sftp, folder)

        self._ask("delete", keys[0] if keys else "", delete)
        if time.monotonic() - self._swept > _SWEEP_S:
            self._swept = time.monotonic()
            with contextlib.suppress(StorageError):  # the keys are deleted
                self.sweep()

    def now(self) -> float:
        """See `Store.now`."""
        return self._clock.now(self)

    def sweep(self) -> None:
        """Delete files that dead processes have not completed."""
        before = self.now() - _INCOMPLETE_S

        def sweep(sftp: Any) -> None:
            folder = f"{self._path}/{_INCOMPLETE}"
            with contextlib.suppress(FileNotFoundError):
                for each in sftp.listdir_attr(folder):
                    if each.st_mtime < before:
                        sftp.remove(f"{folder}/{each.filename}")

        self._ask("clean up", "", sweep)

    # -- files -------------------------------------------------------------------------------------------------------

    def _file(self, key: str) -> str:
        if not is_key(key) or any(part.startswith(".") for part in key.split("/")):
            raise StorageError(f"{key!r} is not a key of {self.url}; the checkpoint or the plan is damaged")
        return f"{self._path}/{key}"

    def _written(self, sftp: Any, key: str, data: bytes | memoryview, name: Callable[[str], bool]) -> bool:
        """Write a file, durably, have `name` give it its name, and return what that returns."""
        self._file(key)
        temporary = f"{self._path}/{_INCOMPLETE}/{secrets.token_hex(8)}"
        _make_folders(sftp, temporary.rpartition("/")[0])
        try:
            with sftp.open(temporary, "wx") as file:
                view = memoryview(data)
                for start in range(0, len(view), _PIECE_BYTES):  # not pipelined: paramiko drops errors of such writes
                    file.write(bytes(view[start : start + _PIECE_BYTES]))
                sftp._request(_EXTENDED, "fsync@openssh.com", file.handle)
            for attempt in range(_FOLDER_ATTEMPTS):
                _make_folders(sftp, self._file(key).rpartition("/")[0])
                try:
                    return name(temporary)
                except FileNotFoundError:  # the folder was empty, and was removed just now
                    if attempt == _FOLDER_ATTEMPTS - 1:
                        raise
            raise AssertionError
        finally:
            with contextlib.suppress(OSError, EOFError):
                sftp.remove(temporary)

    def _status(self, sftp: Any, key: str) -> About | None:
        try:
            status = sftp.lstat(self._file(key))
        except FileNotFoundError:
            return None
        return _about(key, status) if stat.S_ISREG(status.st_mode) else None

    def _scan(self, sftp: Any, prefix: str) -> tuple[list[str], list[About]]:
        """Return the names of the folders in a folder, also of those that are empty, and the objects there. Sorted."""
        folder = self._file(prefix.removesuffix("/")) if prefix else self._path
        try:
            entries = [each for each in sftp.listdir_attr(folder) if not each.filename.startswith(".")]
        except FileNotFoundError:
            return [], []
        objects = [_about(f"{prefix}{each.filename}", each) for each in entries if stat.S_ISREG(each.st_mode)]
        folders = sorted(each.filename for each in entries if stat.S_ISDIR(each.st_mode))
        return folders, sorted(objects, key=lambda each: each.key)

    def _prune(self, sftp: Any, folder: str) -> None:
        """Remove a folder, and those that it is in, as far as they are empty."""
        while folder:
            try:
                sftp.rmdir(self._file(folder))
            except FileNotFoundError:
                pass
            except OSError:
                return  # it is not empty
            folder = folder.rpartition("/")[0]

    # -- connections -------------------------------------------------------------------------------------------------

    def _ask(self, action: str, key: str, request: Callable[[Any], _Answer]) -> _Answer:
        """Call `request` with a channel, again with new ones for `timeout_s` while the connection fails."""
        import paramiko

        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        with self._slots:
            while True:
                sftp = None
                try:
                    sftp = self._channel()
                    answer = request(sftp)
                except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError) as error:
                    is_lost = sftp is None or sftp.get_channel().closed or not isinstance(error, OSError)
                    is_lost = is_lost or isinstance(error, TimeoutError)
                    if not is_lost:
                        self._give_back(sftp)
                    elif sftp is not None:
                        sftp.close()
                    refused = sftp is None and _is_refusal(error)
                    if refused or not is_lost or time.monotonic() + pause_s > deadline:
                        raise self._error(action, key, error, refused=refused) from _cause(error, refused=refused)
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                except StorageError:
                    self._give_back(sftp)
                    raise
                except BaseException:  # an interrupt, perhaps in the middle of an answer; the rest is not for others
                    if sftp is not None:
                        sftp.close()
                    raise
                else:
                    self._give_back(sftp)
                    return answer

    def _give_back(self, sftp: Any) -> None:
        if sftp is not None:
            with self._lock:
                self._idle.append(sftp)

    def _channel(self) -> Any:
        with self._lock:
            while self._idle:
                sftp = self._idle.pop()
                if not sftp.get_channel().closed:
                    return sftp
            if self._connection is None or not self._connection.get_transport().is_active():
                self._connection = self._connected()
            # paramiko waits without a limit for the answers that a new channel needs, unless the connection ends.
            limit = threading.Timer(self._request_s, self._connection.get_transport().close)
            limit.daemon = True
            limit.start()
            try:
                sftp = self._connection.open_sftp()
            finally:
                limit.cancel()
            sftp.get_channel().settimeout(self._request_s)
            return sftp

    def _connected(self) -> Any:
        import paramiko

        class Refusal:  # a policy of paramiko for hosts that are not known
            def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
                raise paramiko.AuthenticationException(f"the server {hostname} is not in known_hosts")

        client = paramiko.SSHClient()
        if "known_hosts" in self._options:
            client.load_host_keys(self._options["known_hosts"])
        else:
            client.load_system_host_keys()
        client.set_missing_host_key_policy(Refusal())
        try:
            client.connect(
                self._host,
                self._port,
                self._user,
                self._options.get("password"),
                key_filename=self._options.get("private_key"),
                timeout=_CONNECT_S,
                banner_timeout=_CONNECT_S,
                auth_timeout=_CONNECT_S,
            )
        except paramiko.AuthenticationException as error:
            transport = client.get_transport()
            is_lost = transport is None or not transport.is_active() or str(error).startswith("Authentication timeout")
            client.close()
            if is_lost:  # paramiko has one error for that, and for a key that the server refuses
                raise paramiko.SSHException(f"{error} (while the server checked the user)") from error
            raise
        except BaseException:
            client.close()  # else its thread keeps the connection, and servers admit few that are not authenticated
            raise
        return client

    def _error(self, action: str, key: str, error: BaseException, *, refused: bool) -> StorageError:
        text = str(error) or type(error).__name__
        hint = "check the path and the permissions on the server"
        if refused:
            hint = "check username, private_key and known_hosts in storage_options"
        elif not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError):
            hint = "it was tried until the timeout; check the server and the net"
        return StorageError(f"cannot {action} {self.place(key)}: {text} ({hint})")


def _is_refusal(error: BaseException) -> bool:
    """Return whether a connection failed for a reason that stays: a key, or a file with keys that cannot be read."""
    import paramiko

    if isinstance(error, OSError):
        return error.filename is not None
    has_no_key = str(error).startswith("No authentication methods available")
    return has_no_key or isinstance(error, paramiko.AuthenticationException | paramiko.BadHostKeyException)


def _cause(error: BaseException, *, refused: bool) -> OSError:
    if isinstance(error, OSError) and not refused:
        return error
    return OSError(errno.EACCES if refused else errno.EIO, str(error) or type(error).__name__)


def _read(sftp: Any, path: str, offset: int, nbytes: int) -> bytes | None:
    try:
        status = sftp.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            raise StorageError(f"{path} of the server is a symbolic link; remove it")
        if not stat.S_ISREG(status.st_mode):
            return None
        with sftp.open(path, "rb") as file:
            nbytes = max(0, min(nbytes, file.stat().st_size - offset))
            return b"".join(file.readv([(offset, nbytes)])) if nbytes else b""
    except FileNotFoundError:
        return None


def _make_folders(sftp: Any, path: str) -> None:
    """Make a folder, and those that it is in, unless they are there."""
    try:
        sftp.stat(path)
    except FileNotFoundError:
        if parent := os.path.dirname(path.rstrip("/")):
            _make_folders(sftp, parent)
        with contextlib.suppress(OSError):  # another process makes it; else the file in it tells
            sftp.mkdir(path)


def _about(key: str, status: Any) -> About:
    return About(key, status.st_size, float(status.st_mtime), f"{status.st_size:x}-{status.st_mtime:x}")
