"""Guarantees of every store: one suite for all backends. A new one is a parameter here and in `test_conformance`."""

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import StorageError
from ckpt.storage import files, stores
from ckpt.storage.stores import open_store, sftp
from ckpt.storage.stores.directory import DirectoryStore
from ckpt.storage.stores.interface import StorageOptions, Store, StoreClock, check_create, is_denied
from ckpt.storage.stores.memory import MemoryStore
from tests.support.selection import FULL
from tests.support.sftp_server import SftpServer

_KINDS = ["memory", "directory", "sftp", "moto", "ceph"]


@pytest.fixture(params=_KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "memory":
            url = f"memory:///{tmp_path.name}"
        case "directory":
            url = f"directory://{tmp_path}/store"
        case "sftp":
            server = request.getfixturevalue("sftp_server")
            return open_store(server.url(tmp_path / "store"), StorageOptions.of(server.options, 20.0))
        case "moto":
            url = request.getfixturevalue("bucket").url
        case _:
            url = request.getfixturevalue("ceph_bucket").url
    return open_store(url, StorageOptions.of(None, 20.0))


def test_a_backend_is_one_small_file() -> None:
    assert len(Store.__abstractmethods__) <= 8
    files = [path for path in Path(stores.__path__[0]).glob("*.py") if path.name != "__init__.py"]
    assert {path.stem for path in files} >= {"bucket", "directory", "interface", "memory", "sftp"}
    for path in files:
        assert len(path.read_text().splitlines()) <= 450, path


def _keys(store: Store, prefix: str = "") -> list[str]:
    return sorted(about.key for about in store.below(prefix))


def test_nothing_is_there_at_first(store: Store) -> None:
    assert store.read("a/b", 0, 10) is None
    assert store.get("a/b", 10) is None
    assert store.about("a/b") is None
    assert _keys(store) == _keys(store, "a/") == []
    assert store.names("") == store.names("a/") == ([], [])
    store.delete(["a/b", "c"])


def test_an_object_is_created_once(store: Store) -> None:
    made = store.create("a/b", b"first")
    assert made is not None
    assert (made.key, made.nbytes) == ("a/b", 5)
    assert store.create("a/b", b"second") is None
    assert store.get("a/b", 5) == b"first"
    found = store.about("a/b")
    assert found is not None
    assert (found.key, found.nbytes, found.tag) == ("a/b", 5, made.tag)
    assert abs(found.modified_s - store.now()) < 30
    assert abs(store.now() - time.time()) < 5
    store.delete(["a/b"])
    again = store.create("a/b", b"the third")
    assert again is not None
    assert again.tag != made.tag


def test_an_object_is_put_and_replaced(store: Store) -> None:
    store.put("x", b"1234")
    store.put("x", memoryview(b"_567_")[1:4])
    assert store.get("x", 3) == b"567"
    store.put("empty", b"")
    assert store.get("empty", 0) == b""
    about = store.about("empty")
    assert about is not None
    assert about.nbytes == 0


def test_ranges_are_read(store: Store) -> None:
    data = bytes(range(256)) * 1000
    store.put("packs/000/rank_00000_000", data)

    def read(offset: int, nbytes: int) -> memoryview | None:
        return store.read("packs/000/rank_00000_000", offset, nbytes)

    assert read(0, len(data)) == data
    assert read(1000, 500) == data[1000:1500]
    assert read(len(data) - 10, 100) == data[-10:], "fewer bytes at the end"
    assert read(len(data), 5) == b""
    assert read(len(data) + 7, 5) == b""
    assert read(5, 0) == b""
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        store.get("packs/000/rank_00000_000", 1000)


def test_lists(store: Store) -> None:
    keys = ["records/s1/000.json", "records/s1/001.json", "records/s10/000.json", "saves/s1/packs/000/p", "top"]
    for key in keys:
        store.put(key, key.encode())
    assert _keys(store) == sorted(keys)
    assert _keys(store, "records/") == keys[:3]
    assert _keys(store, "records/s1/") == keys[:2], "a prefix ends at a slash"
    assert {about.key: about.nbytes for about in store.below("records/s1/")} == {key: len(key) for key in keys[:2]}
    folders, objects = store.names("")
    assert (folders, [about.key for about in objects]) == (["records", "saves"], ["top"])
    folders, objects = store.names("records/")
    assert (folders, objects) == (["s1", "s10"], [])
    folders, objects = store.names("records/s1/")
    assert (folders, [about.key for about in objects]) == ([], keys[:2])
    tags = {about.key: about.tag for about in store.below("")}
    assert objects[0].tag == tags[objects[0].key]


def test_a_folder_ends_with_its_last_object(store: Store) -> None:
    store.put("saves/s1/packs/000/p", b"1")
    store.put("saves/s2/intent.json", b"2")
    store.delete(["saves/s1/packs/000/p", "saves/s1/absent"])
    assert store.names("saves/")[0] == ["s2"]
    assert _keys(store) == ["saves/s2/intent.json"]
    store.put("saves/s1/packs/000/p", b"again")
    assert store.names("saves/")[0] == ["s1", "s2"]


def test_many_are_deleted(store: Store) -> None:
    keys = [f"saves/s/{number:04d}" for number in range(30)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    assert _keys(store) == keys
    store.delete(keys[:29])
    assert _keys(store) == keys[29:]


@pytest.mark.parametrize("number", range(3 if FULL else 1))
def test_of_many_creates_one_succeeds(store: Store, number: int) -> None:
    """Beside others that delete what is next to it, so that its folder comes and goes."""
    start = threading.Barrier(8)

    def create(writer: int) -> int | None:
        start.wait(20)
        for other in range(5):
            store.put(f"one/{writer}", b"x")
            store.delete([f"one/{writer}"])
            if other == 2 and store.create("one/key", b"%d" % writer) is not None:
                return writer
        return None

    with ThreadPoolExecutor(8) as pool:
        won = [writer for writer in pool.map(create, range(8)) if writer is not None]
    found = store.get("one/key", 100)
    assert found is not None
    assert won == [int(found)]
    assert _keys(store) == ["one/key"]


def test_no_reader_sees_a_part(store: Store) -> None:
    contents = [bytes([number]) * 200_000 for number in range(2)]
    store.put("key", contents[0])
    done = threading.Event()

    def write() -> None:
        for number in range(20):
            store.put("key", contents[number % 2])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not done.is_set() and not writing.done():
            assert store.get("key", 1 << 20) in contents
            assert _keys(store) == ["key"]
        writing.result(60)


def test_the_check_leaves_nothing(store: Store) -> None:
    check_create(store, "owner")
    assert _keys(store) == []


def test_a_store_that_replaces_what_exists_is_refused(tmp_path: Path) -> None:
    class Careless(DirectoryStore):
        def create(self, key: str, data: bytes) -> None:
            self.put(key, data)

    with pytest.raises(StorageError, match="two jobs could both publish"):
        check_create(Careless(str(tmp_path)), "owner")


def test_the_clock_of_a_store_that_has_none() -> None:
    store = open_store("memory:///clock", StorageOptions())
    assert abs(StoreClock().now(store) - time.time()) < 5
    assert _keys(store) == []


def test_a_put_that_took_long_puts_no_clock_forward() -> None:
    """By a clock that is ahead, live processes of other hosts would seem to be dead."""

    class Slow(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            time.sleep(1)  # as while requests are repeated
            super().put(key, data)

    clock, store = StoreClock(), Slow("memory:///slow")
    clock.now(store)
    before = clock.now(store)
    assert before <= time.time()


def test_an_empty_credential_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs set variables to nothing. Each text has that between its characters, where a secret would be hidden."""
    pytest.importorskip("obstore", reason="needs obstore")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")
    with pytest.raises(StorageError, match="'nonsense' is not valid"):
        open_store("s3://bucket/run7", StorageOptions.of({"nonsense": "1"}, 1.0))


# -- SSH servers -------------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_made_again(sftp_server: SftpServer, tmp_path: Path) -> None:
    store = open_store(sftp_server.url(tmp_path / "store"), StorageOptions.of(sftp_server.options, 30.0))
    store.put("a", b"first")
    sftp_server.close()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get, "a", 100)
        sftp_server.start()
        assert reading.result(40) == b"first"
    assert store.create("b", b"x") is not None


def test_a_server_that_is_not_known_is_refused(sftp_server: SftpServer, tmp_path: Path) -> None:
    (tmp_path / "known").touch()
    options = sftp_server.options | {"known_hosts": str(tmp_path / "known")}
    store = open_store(sftp_server.url(tmp_path / "store"), StorageOptions.of(options, 1.0))
    with pytest.raises(StorageError, match="known_hosts"):
        store.put("a", b"x")
    with pytest.raises(StorageError, match="SFTP has no option 'region'"):
        open_store(sftp_server.url(tmp_path), StorageOptions.of({"region": "x"}, 1.0))


@pytest.mark.parametrize("wrong", ["known_hosts", "absent known_hosts", "private_key", "absent private_key"])
def test_a_refused_connection_is_not_tried_again(sftp_server: SftpServer, tmp_path: Path, wrong: str) -> None:
    """And is closed: a server admits few connections that are not authenticated, which are also those of others."""
    option = wrong.rpartition(" ")[2]
    if "absent" not in wrong:
        (tmp_path / "file").touch()
    if wrong == "private_key":
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"]
        subprocess.run(command, check=True)
        (tmp_path / "key").rename(tmp_path / "file")
    options = sftp_server.options | {option: str(tmp_path / "file")}
    store = open_store(sftp_server.url(tmp_path / "store"), StorageOptions.of(options, 60.0))
    begin, threads = time.monotonic(), threading.enumerate()
    with pytest.raises(StorageError, match="check username, private_key and known_hosts") as raised:
        store.put("a", b"x")
    assert time.monotonic() - begin < 40
    assert wrong != "known_hosts" or "is not in known_hosts" in str(raised.value)
    left = [each for each in threading.enumerate() if each not in threads]
    for each in left:
        each.join(20)
    assert not any(each.is_alive() for each in left), left


@pytest.mark.parametrize("fault", ["the connection ends", "no answer comes"])
def test_a_connection_that_is_lost_while_the_user_is_checked_is_made_again(
    sftp_server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """paramiko raises what it raises for a key that is refused."""
    from paramiko.auth_handler import AuthHandler

    wait, calls = AuthHandler.wait_for_response, []

    def interrupted(handler: Any, event: threading.Event) -> Any:
        calls.append(handler)
        if len(calls) > 1:
            return wait(handler, event)
        if fault == "the connection ends":
            event.wait(20)  # for the answer, which is not looked at
            handler.authenticated = False
            handler.transport.sock.shutdown(socket.SHUT_RDWR)
            handler.transport.join(20)
            return wait(handler, event)
        event.wait(20)
        event.clear()
        handler.transport.auth_timeout = 0.5
        return wait(handler, event)

    monkeypatch.setattr(AuthHandler, "wait_for_response", interrupted)
    store = sftp.open_sftp(sftp_server.url(tmp_path / "store"), StorageOptions.of(sftp_server.options, 60.0))
    store.put("a", b"x")
    assert len(calls) == 2
    assert store.get("a", 100) == b"x"


@pytest.mark.parametrize("has_channel", [True, False])
def test_a_server_that_is_stopped(
    sftp_server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_channel: bool
) -> None:
    """It takes connections and data, and never answers: neither a request, nor one for another channel."""
    options = StorageOptions.of(sftp_server.options, 30.0)
    store = sftp.open_sftp(sftp_server.url(tmp_path / "store"), options)
    store.put("a", b"x")
    with monkeypatch.context() as patch, sftp_server.stopped(), ThreadPoolExecutor(1) as pool:
        patch.setattr(sftp, "_CONNECT_S", 1.0)
        patch.setattr(store, "_timeout_s", 0.5)
        patch.setattr(store, "_request_s", 1.0)
        for channel in store._idle:
            channel.get_channel().settimeout(1.0)
        if not has_channel:
            store._idle.clear()
        reading = pool.submit(store.get, "a", 100)
        with pytest.raises(StorageError, match="until the timeout"):
            reading.result(40)
    assert store.get("a", 100) == b"x"


def test_a_request_that_is_interrupted_leaves_no_channel(sftp_server: SftpServer, tmp_path: Path) -> None:
    store = open_store(sftp_server.url(tmp_path / "store"), StorageOptions.of(sftp_server.options, 30.0))
    store.put("a", b"x")

    def interrupted(channel: Any) -> None:
        channel._async_request(type(None), 7, b"/")  # LSTAT
        channel.sock.recv(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store._ask("look at", "a", interrupted)  # type: ignore[attr-defined]
    assert store.get("a", 100) == b"x"


def test_a_job_on_an_ssh_server(sftp_server: SftpServer, tmp_path: Path) -> None:
    """Writers are other processes: they get the options with the task."""
    url = sftp_server.url(tmp_path / "root")
    state = {"w": torch.arange(300_000.0), "n": 0}
    with ckpt.Checkpointer(url, keep=2, storage_options=sftp_server.options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state | {"n": step}, step)
        assert checkpointer.all_steps() == [2, 3]
    restored = {"w": torch.zeros(300_000), "n": 0}
    with ckpt.Checkpointer(url, storage_options=sftp_server.options) as checkpointer:
        assert checkpointer.restore(restored) == 3
    assert torch.equal(restored["w"], state["w"])
    assert ckpt.load(f"directory://{tmp_path}/root", 2)["n"] == 2, "the layout is the same"


# -- directories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "..", "../x", "a/../../x", "/etc/x", "a//b", "a/./b", ".hidden", "a/.b", "a\0b"])
def test_names_outside_of_a_directory_are_refused(tmp_path: Path, key: str) -> None:
    store = DirectoryStore(str(tmp_path / "root"))
    for act in (
        lambda: store.create(key, b"x"),
        lambda: store.put(key, b"x"),
        lambda: store.read(key, 0, 1),
        lambda: store.about(key),
    ):
        with pytest.raises(StorageError, match="is not a key"):
            act()
    store.put("a/there", b"x")
    (tmp_path / "x").write_bytes(b"outside")
    with pytest.raises(StorageError, match="is not a"):
        store.delete([key])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "x"]


def test_nothing_is_done_through_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    store = DirectoryStore(str(tmp_path / "root"))
    store.put("saves/a", b"mine")
    (tmp_path / "root/records").symlink_to(outside)
    (tmp_path / "root/saves/link").symlink_to(outside / "file")
    for act in (
        lambda: store.create("records/new", b"x"),
        lambda: store.put("records/file", b"x"),
        lambda: store.read("records/file", 0, 10),
        lambda: store.about("records/file"),
        lambda: store.names("records/"),
        lambda: list(store.below("records/")),
        lambda: store.delete(["records/file"]),
        lambda: store.read("saves/link", 0, 10),
        lambda: store.create("saves/link", b"x"),
    ):
        with pytest.raises(StorageError, match="link"):
            act()
    assert _keys(store) == ["saves/a"], "they are no objects"
    assert store.names("")[0] == ["saves"]
    store.put("saves/link", b"mine")
    store.delete(["saves/link"])
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_bytes() == b"secret"


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = DirectoryStore(str(tmp_path / "link"))
    assert store.create("a/b", b"x") is not None
    assert (tmp_path / "real/a/b").read_bytes() == b"x"
    assert _keys(store) == ["a/b"]


def test_what_is_no_file_is_no_object(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert store.about("folder") is None
    assert store.names("") == ([], [])
    with pytest.raises(StorageError, match="not a regular file"):
        store.read("pipe", 0, 1)
    with pytest.raises(StorageError, match="a part of the path is a file"):
        store.put("pipe/x", b"")


def test_a_directory_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    store = DirectoryStore(str(tmp_path))
    store.put("a/b", b"x")
    (tmp_path / "a").chmod(0o500)
    try:
        with pytest.raises(StorageError, match="check the permissions") as raised:
            store.put("a/c", b"x")
        assert is_denied(raised.value)
        assert _keys(store) == ["a/b"]
    finally:
        (tmp_path / "a").chmod(0o700)


def _hook_syncs(monkeypatch: pytest.MonkeyPatch, sync: Callable[[str], None]) -> None:
    """Have `sync` called with the path before each sync. No power is lost here, so nothing is synced."""
    monkeypatch.setattr(os, "fsync", lambda fd: sync(os.readlink(f"/proc/self/fd/{fd}")))


def test_what_another_process_has_just_made_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process has not synced it yet: a loss of power takes it away, and not what was done because of it."""
    store = DirectoryStore(str(tmp_path))
    synced: list[str] = []
    _hook_syncs(monkeypatch, synced.append)
    (tmp_path / "records/s").mkdir(parents=True)
    (tmp_path / "records/s/000.json").write_bytes(b"theirs")
    folders = [f"{tmp_path}", f"{tmp_path}/records", f"{tmp_path}/records/s"]
    assert store.create("records/s/000.json", b"mine") is None
    assert set(folders) <= set(synced)
    synced.clear()
    store.sync("records/s/000.json")
    assert sorted(synced) == folders
    synced.clear()
    assert files.create_exclusive(f"{tmp_path}/records/s/000.json", b"mine") is False
    assert folders[-1] in synced


def test_a_file_system_that_cannot_sync_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may refuse, and does it by itself. An error of another kind is one, and that of a file."""

    def refuse_directories(path: str) -> None:
        if Path(path).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")

    def refuse_files(path: str) -> None:
        if not Path(path).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")

    def fail(path: str) -> None:
        if Path(path).is_dir():
            raise OSError(errno.EIO, "Input/output error")

    store = DirectoryStore(str(tmp_path))
    _hook_syncs(monkeypatch, refuse_directories)
    assert store.create("a/b", b"x") is not None
    assert store.create("a/b", b"y") is None
    store.put("a/c", b"z")
    store.sync("a/c")
    store.delete(["a/b"])
    files.write_durable(f"{tmp_path}/a/d", b"x")
    assert _keys(store) == ["a/c", "a/d"]
    for sync in (refuse_files, fail):
        _hook_syncs(monkeypatch, sync)
        for act in (lambda: store.put("a/c", b"y"), lambda: store.create("a/e", b"y")):
            with pytest.raises(StorageError, match=r"check the file system|the device failed"):
                act()


def test_files_of_dead_processes_are_deleted_after_an_hour(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    store.put("a/b", b"x")
    left = tmp_path / ".incomplete"
    assert list(left.iterdir()) == []
    for name, age_s in (("old", 7200), ("new", 60)):
        (left / name).write_bytes(b"a part")
        os.utime(left / name, (time.time() - age_s, time.time() - age_s))
    store.sweep()
    assert [path.name for path in left.iterdir()] == ["new"]
    assert _keys(store) == ["a/b"]


def test_a_deletion_succeeds_whatever_dead_processes_have_left(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    store.put("saves/s/packs/a", b"x")
    store.put("saves/t/b", b"x")
    (tmp_path / "saves/s/packs/.probe.0123456789abcdef.tmp").touch()  # as if in the middle of a list
    old = time.time() - 7200
    for name in ("a folder", "b file"):
        (tmp_path / ".incomplete" / name).mkdir() if "folder" in name else (tmp_path / ".incomplete" / name).touch()
        os.utime(tmp_path / ".incomplete" / name, (old, old))
    store._swept = -1e9
    store.delete(["saves/s/packs/a"])
    assert [path.name for path in (tmp_path / ".incomplete").iterdir()] == ["a folder"]
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["t"]
    (tmp_path / "saves/t/.other").touch()
    store.delete(["saves/t/b"])
    assert [path.name for path in (tmp_path / "saves/t").iterdir()] == [".other"]
