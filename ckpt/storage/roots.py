"""Open a checkpoint root by its path or URL, and note the roots whose steps this process has seen.

Seen are steps that it restored, loaded or saved, and that there were none when it restored. A job that goes on in a
root without a restore of its own is told from one that was started in a used root by mistake: see
`ckpt.saving.root_claim`. The set belongs to the whole process, as any part of a program may load what another part goes
on to save.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from dataclasses import replace

from ckpt.errors import StorageError
from ckpt.storage.documents import step_around
from ckpt.storage.files import exists
from ckpt.storage.interface import Root
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions

_LOOK_S = 5.0
_TIMEOUT_S = 60.0  # for requests that a storage does not answer
_OBJECT_SCHEMES = ("s3://", "s3a://", "gs://", "az://", "azure://", "directory://", "memory://", "sftp://")
_SAME_SCHEMES = (("s3a://", "s3://"), ("azure://", "az://"))
_BUCKET = re.compile(r"[A-Za-z0-9._-]*")
_SERVER = re.compile(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9._-]+(:(?P<port>\d{1,5}))?")
_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/:@]*):(?!\d+(/|$)).*@")  # which may have slashes; not a port
_NAMED_STEP = re.compile(r"(?<=[^/])/step_\d{8,18}(?=/|$)")
_IN_SAVE = re.compile(r"(?P<root>.*?)/saves/step_\d{8,18}-o\d+-[0-9a-f]{16}(/.*)?")


def is_object_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of a store: of a bucket, or of another one with the same layout."""
    return os.fspath(path).startswith(_OBJECT_SCHEMES)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory, or the URL of an object store as its root has it.

    StorageError for a URL that is not supported.
    """
    return _checked_url(os.fspath(path)) if is_object_url(path) else local_path(path)


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path that a path, also one with ``~``, or a ``file://`` URL names.

    StorageError for other URLs, and for one with a part that is not of the path.
    """
    text = os.fspath(path)
    if not text.strip():
        raise StorageError(
            "the path of a checkpoint root is empty: is a variable not set? '.' is the current directory"
        )
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    url = urllib.parse.urlsplit(text)
    if url.scheme == "file" and ("?" in text or "#" in text):
        raise StorageError(f"{text}: in a file:// URL, write %3F for '?' and %23 for '#', or give the path")
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        place = text.rpartition("@")[2] if url.scheme == "file" else f"{url.scheme}://..."  # no password
        raise StorageError(f"{place}: a root is a local path, or a file://, s3://, gs://, az:// or sftp:// URL")
    return os.path.abspath(urllib.parse.unquote(url.path))


def _checked_url(url: str) -> str:
    """Return the URL of a place in an object store. StorageError if another URL would name the same place.

    The parts of a URL that libraries leave out, decode or resolve are refused, so that each place has one spelling.
    """
    for scheme, same in _SAME_SCHEMES:
        url = same + url.removeprefix(scheme) if url.startswith(scheme) else url
    if (shown := _PASSWORD.sub(r"\g<user>:***@", url)) != url:
        raise StorageError(f"{shown}: the URL of a root has no password; give it in storage_options")
    scheme, _, place = url.rstrip("/").partition("://")
    bucket, *names = place.split("/")
    found = sorted({character for character in place if character in "#?%\\" or not character.isprintable()})
    if found:
        raise StorageError(f"{url}: the URL of a root has no {', '.join(map(repr, found))}; choose another prefix")
    if scheme == "directory" and bucket:
        raise StorageError(f"{url}: give the absolute path, directory:///{place}")
    if place != place.strip() or any(name in ("", ".", "..") for name in names) or not _is_place(scheme, bucket):
        form = "sftp://USER@HOST:PORT/PATH" if scheme == "sftp" else "SCHEME://BUCKET/PREFIX"
        raise StorageError(f"{url}: the URL of a root is {form}, without empty parts, '.', '..' or spaces around it")
    return f"{scheme}://{place}"


def _is_place(scheme: str, name: str) -> bool:
    """Return whether a name is one of a bucket, or of a server."""
    if scheme != "sftp":
        return _BUCKET.fullmatch(name) is not None
    match = _SERVER.fullmatch(name)
    return match is not None and 1 <= int(match["port"] or 22) <= 65535


def open_root(path: str | os.PathLike[str], options: StorageOptions | None = None) -> Root:
    """Return the root at a path or URL, without looking whether it is there.

    The options of the environment are taken if there are none. StorageError for a URL that is not supported, ValueError
    for options that a place does not have.
    """
    if options is not None and options.given and _has_no_options(path):
        raise ValueError(
            f"storage_options are for a store such as s3:// or sftp://, and {absolute(path)} has none: leave out "
            f"{', '.join(name for name, _ in options.given)}, or give the URL of the store"
        )
    if not is_object_url(path):
        return CheckpointRoot(local_path(path))
    from ckpt.storage.store_root import store_root

    return store_root(absolute(path), options or StorageOptions.of(None, _TIMEOUT_S))


def _has_no_options(path: str | os.PathLike[str]) -> bool:
    return not is_object_url(path) or os.fspath(path).startswith(("directory://", "memory://"))


def own_root(path: str | os.PathLike[str], options: StorageOptions | None = None) -> Root:
    """Return the root at a path or URL, as `open_root` does, for a job that saves or restores there.

    StorageError also if it is a step, or inside of one: what is saved there would damage the step, and end with it; and
    for the memory of a process: writers, which are others, would lose what they save.
    """
    where = absolute(path)
    if where.startswith("memory://"):
        raise StorageError(f"{where} is the memory of one process, and no root of a job; give a directory")
    if not is_object_url(path):
        own_directory(where, "a checkpoint root")
    elif (match := _IN_SAVE.fullmatch(where)) is not None:
        raise StorageError(f"{where} is a step, or inside of one, and not a checkpoint root; give {match['root']}")
    else:
        _refuse_named_step(where, options or StorageOptions.of(None, _TIMEOUT_S))
        if where.startswith("directory://"):
            _refuse_plain_root(where)
    return open_root(path, options)


def _refuse_named_step(url: str, options: StorageOptions) -> None:
    """Raise StorageError for the name of a step in a root in a store, as `own_directory` does in a directory.

    Only a URL with such a name costs a request. If it fails, the first use of the root does, too: an error here would
    reach one rank alone, before ranks can agree.
    """
    for match in _NAMED_STEP.finditer(url):
        root = url[: match.start()]
        with contextlib.suppress(StorageError):
            folders, _ = open_store(root, replace(options, timeout_s=min(options.timeout_s, _LOOK_S))).names("")
            if "records" in folders or "owner" in folders:
                break
    else:
        return
    raise StorageError(f"{url} is a step, or inside of one, and not a checkpoint root; give {root}")


def _refuse_plain_root(url: str) -> None:
    """Raise StorageError for a ``directory://`` URL of a root that has a plain path, or of one of its steps."""
    path = url.removeprefix("directory://")
    own_directory(path, "a checkpoint root")
    if exists(os.path.join(path, ".owner")):
        raise StorageError(f"{url} is a root in a directory; give its path, {path}")


def own_directory(path: str, what: str) -> str:
    """Return the path of a directory to write to. StorageError if it is a step, or inside of one."""
    step = step_around(path)
    if step is not None:
        root = os.path.dirname(step)
        if step in (path, os.path.realpath(path)):
            raise StorageError(f"{path} is a step, not {what}; give the root that it is in, {root}")
        raise StorageError(f"{path} is inside the step {step}, which must stay as it is; give a path outside of {root}")
    return path


# -- roots that were seen ----------------------------------------------------------------------------------------------

_seen: set[str] = set()  # paths without links, and URLs; changed by atomic operations only


def note_seen(path: str) -> None:
    """Note that this process has seen the steps of the root at `path`, an absolute path or a URL."""
    _seen.add(_real(path))


def is_seen(path: str) -> bool:
    """Return whether this process has seen the steps of the root at `path`."""
    return _real(path) in _seen


def _real(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)
