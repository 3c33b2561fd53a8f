"""One set of tests for every store that the wrapper may get, then what is particular to ours."""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination import Access, CoordinationStore, Namespace, RestartIndex, StoreServer
from inprocess.exception import BarrierOverflow, BarrierTimeout, StoreError, StoreTimeoutError
from inprocess.store import EtcdStore, FileStore, PrefixStore, TCPStore
from tests.inprocess.etcd import Etcd, needs_etcd, running_etcd
from tests.support import LeakCheck, free_port, run_ranks

SOON = timedelta(milliseconds=50)
LONG = timedelta(seconds=20)
FIRST = InterruptionRecord(1, Interruption.EXCEPTION, "ValueError: a\nb", "trace")
SECOND = InterruptionRecord(2, Interruption.TERMINATED)

Connect = Callable[[], Any]


def _tcp(request: pytest.FixtureRequest) -> Connect:
    server = StoreServer(Access("127.0.0.1", 0))
    access = server.start()
    request.addfinalizer(server.close)

    def connect() -> TCPStore:
        store = TCPStore(timeout=LONG, wait_for_workers=False, access=access)
        request.addfinalizer(store.close)
        return store

    return connect


def _torch_free(request: pytest.FixtureRequest) -> Connect:
    server = StoreServer(Access("127.0.0.1", 0))
    access = server.start()
    request.addfinalizer(server.close)

    def connect() -> CoordinationStore:
        store = CoordinationStore(access, timeout=LONG)
        request.addfinalizer(store.close)
        return store

    return connect


def _etcd(request: pytest.FixtureRequest) -> Connect:
    etcd: Etcd = request.getfixturevalue("etcd")
    job = f"test {uuid.uuid4().hex}"

    def connect() -> EtcdStore:
        store = EtcdStore(etcd.endpoints, job=job, timeout=LONG)
        request.addfinalizer(store.close)
        return store

    return connect


def _etcd_client(request: pytest.FixtureRequest) -> Connect:
    connect = _etcd(request)
    return lambda: connect().client


def _file(request: pytest.FixtureRequest) -> Connect:
    path = request.getfixturevalue("tmp_path") / "store"
    return lambda: FileStore(str(path), -1)


MAKERS: dict[str, Callable[[pytest.FixtureRequest], Connect]] = {
    "tcp": _tcp,
    "file": _file,
    "torch-free": _torch_free,
    "etcd": _etcd,
    "prefix over etcd": lambda request: _under(PrefixStore, _etcd(request)),
    "namespace over etcd": lambda request: _under(Namespace, _etcd_client(request)),
    "prefix over tcp": lambda request: _under(PrefixStore, _tcp(request)),
    "namespace": lambda request: _under(Namespace, _torch_free(request)),
}


def _under(view: Callable[[int, Any], Any], connect: Connect) -> Connect:
    def under() -> Any:
        base = connect()
        base.set("restart_index", "3")
        return view(3, base)

    return under


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    check = LeakCheck()
    yield
    check.check()


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as etcd:
        yield etcd


ALL = [pytest.param(name, marks=needs_etcd) if "etcd" in name else name for name in MAKERS]


@pytest.fixture(params=ALL)
def connect(request: pytest.FixtureRequest) -> Connect:
    return MAKERS[request.param](request)


@pytest.fixture
def store(connect: Connect) -> Any:
    return connect()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class TestEveryStore:
    def test_values(self, store: Any) -> None:
        store.set("text", "ä")
        store.set("bytes", b"\0\xff")
        assert store.get("text") == "ä".encode()
        assert store.get("bytes") == b"\0\xff"
        store.set("text", "other")
        assert store.get("text") == b"other"
        assert store.check(["text", "bytes"])
        assert not store.check(["text", "absent"])

    def test_add_counts(self, store: Any) -> None:
        assert [store.add("n", 2), store.add("n", -5), store.add("n", 0)] == [2, -3, -3]
        assert store.get("n") == b"-3"

    def test_append(self, store: Any) -> None:
        store.append("log", "a")
        store.append("log", "bc")
        assert store.get("log") == b"abc"

    def test_compare_set(self, store: Any) -> None:
        assert store.compare_set("key", "", "first") == b"first"
        assert store.compare_set("key", "", "second") == b"first"
        assert store.compare_set("key", "first", "third") == b"third"
        assert store.get("key") == b"third"

    def test_delete(self, store: Any) -> None:
        store.set("key", "x")
        assert store.delete_key("key")
        assert not store.check(["key"])

    def test_several_at_once(self, store: Any) -> None:
        store.multi_set(["a", "b"], ["1", "2"])
        assert store.multi_get(["b", "a"]) == [b"2", b"1"]

    def test_wait_times_out(self, store: Any) -> None:
        store.set("there", "1")
        store.wait(["there"], timedelta(0))
        with pytest.raises(StoreTimeoutError, match="absent"):
            store.wait(["there", "absent"], SOON)
        with pytest.raises(TimeoutError):
            store.wait(["absent"], timedelta(0))

    def test_wait_ends_with_the_last_key(self, connect: Connect, pool: ThreadPoolExecutor) -> None:
        waiting = pool.submit(connect().wait, ["a", "b"], LONG)
        other = connect()
        other.set("a", "1")
        assert not waiting.done()
        other.set("b", "1")
        waiting.result(20)

    def test_sets(self, connect: Connect) -> None:
        store, other = connect(), connect()
        assert store.members("set") == frozenset()
        assert [store.arrive("set", "x"), other.arrive("set", "y"), other.arrive("set", "x")] == [1, 2, 2]
        assert store.members("set") == {"x", "y"}
        assert store.wait_size("set", 2, timedelta(0)) == 2
        with pytest.raises(StoreTimeoutError):
            store.wait_size("set", 3, SOON)

    def test_attending(self, connect: Connect) -> None:
        store, other = connect(), connect()
        assert [store.attend("set", "x"), other.attend("set", "y"), store.attend("set", "x")] == [1, 2, 2]
        assert other.arrive("set", "z") == 3
        assert store.members("set") == {"x", "y", "z"}

    def test_meeting(self, connect: Connect, pool: ThreadPoolExecutor) -> None:
        store, other = connect(), connect()
        with pytest.raises(StoreTimeoutError, match="absent"):
            store.meet("other", "x", 2, "absent", timedelta(0))
        assert store.members("other") == {"x"}
        waiting = pool.submit(store.meet, "set", "x", 2, "value", LONG)
        assert other.wait_size("set", 1, LONG) == 1
        assert other.meet("set", "y", 2, "value", LONG) is None, "it came last"
        assert not waiting.done()
        other.set("value", "1")
        assert waiting.result(20) == b"1"
        assert other.meet("set", "z", 2, "value", LONG) == b"1"
        assert store.members("set") == {"x", "y", "z"}

    def test_interruption_is_listed_until_locked(self, connect: Connect) -> None:
        store, other = connect(), connect()
        assert not store.is_interrupted()
        assert not store.wait_for_interrupted(SOON)
        other.record_interrupted([FIRST])
        other.record_interrupted([SECOND, FIRST])
        assert store.wait_for_interrupted(LONG)
        assert store.get_interruption_records() == (FIRST, SECOND)
        assert store.get_interruption_records()[0].detail == "trace"
        store.lock_interruption_records()
        late = InterruptionRecord(3, Interruption.SOFT_TIMEOUT)
        other.record_interrupted([late])
        other.lock_interruption_records()
        assert store.get_interruption_records() == other.get_interruption_records() == (FIRST, SECOND)

    def test_interruption_after_the_lock_sets_the_flag(self, store: Any) -> None:
        store.lock_interruption_records()
        store.record_interrupted([FIRST])
        assert store.is_interrupted()
        assert store.get_interruption_records() == ()

    def test_interruption_wakes_a_waiter(self, connect: Connect, pool: ThreadPoolExecutor) -> None:
        waiting = pool.submit(connect().wait_for_interrupted, LONG)
        connect().record_interrupted([FIRST])
        assert waiting.result(20)

    def test_completed(self, connect: Connect) -> None:
        store = connect()
        assert not store.is_completed()
        assert not store.wait_for_completed(SOON)
        connect().record_completed()
        assert store.wait_for_completed(LONG)
        assert store.is_completed()

    def test_ranks(self, connect: Connect) -> None:
        store, other = connect(), connect()
        assert store.get_terminated_ranks() == frozenset()
        store.record_terminated_ranks([3, 1])
        other.record_terminated_ranks([1, 2])
        other.record_terminated_ranks([])
        assert store.get_terminated_ranks() == {1, 2, 3}
        for rank in range(3):
            store.set_initial_rank(rank, rank + 10)
        assert other.get_initial_rank(1) == 11
        assert other.get_initial_ranks([2, 0]) == [12, 10]

    def test_heartbeats(self, connect: Connect) -> None:
        store, other = connect(), connect()
        assert store.get_heartbeat(0) is None
        store.send_heartbeat(0, "1")
        store.send_heartbeat(0, "2")
        assert other.get_heartbeats([0, 1]) == {0: "2", 1: None}

    def test_states_and_keys_wait_for_the_last(self, connect: Connect, pool: ThreadPoolExecutor) -> None:
        store, other = connect(), connect()
        states, keys = pool.submit(store.get_states, [1, 0]), pool.submit(store.get_keys, [0, 1])
        for rank in range(2):
            other.send_state({"rank": rank, "mode": None}, rank)
            other.send_key(f"node{rank}", rank)
        assert states.result(20) == [{"rank": 1, "mode": None}, {"rank": 0, "mode": None}]
        assert keys.result(20) == ["node0", "node1"]

    def test_barrier_releases_all(self, connect: Connect, pool: ThreadPoolExecutor) -> None:
        stores = [connect() for _ in range(4)]
        last = threading.Event()

        def arrive(rank: int) -> bool:
            if rank == 3:
                last.wait(20)
            stores[rank].barrier([rank], "name", 4, LONG, timedelta(milliseconds=200))
            return last.is_set()

        arrivals = [pool.submit(arrive, rank) for rank in range(4)]
        last.set()
        assert all(arrival.result(20) for arrival in arrivals)

    def test_barrier_names_who_is_missing(self, store: Any) -> None:
        with pytest.raises(BarrierTimeout, match=r"name: 2 of 4 ranks .*missing: 1,3$"):
            store.barrier([0, 2], "name", 4, SOON, SOON / 2)
        with pytest.raises(BarrierTimeout, match=r"arrived: 7$"):
            store.reentrant_barrier([7], "name", 2, SOON)

    def test_barrier_overflows(self, store: Any) -> None:
        store.barrier([0, 1], "name", 2, LONG)
        with pytest.raises(BarrierOverflow, match="3 arrivals where 2"):
            store.barrier([1], "name", 2, LONG)
        with pytest.raises(BarrierOverflow):
            store.reentrant_barrier([0, 1, 2], "name", 2, LONG)

    def test_reentrant_barrier(self, connect: Connect, pool: ThreadPoolExecutor) -> None:
        store, other = connect(), connect()
        assert not store.is_rank_at_reentrant_barrier(0, "end")
        for _ in range(2):
            store.reentrant_barrier([0], "end", 2, timedelta(0))
        assert other.is_rank_at_reentrant_barrier(0, "end")
        waiting = pool.submit(store.reentrant_barrier, [0], "end", 2, LONG, timedelta(seconds=1))
        other.reentrant_barrier([1], "end", 2, LONG)
        waiting.result(20)
        other.reentrant_barrier([0, 1], "end", 2, LONG)


class TestTCPStore:
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }.items():
            monkeypatch.setenv(name, value)

    def test_rank_0_hosts_where_nobody_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = TCPStore()
        monkeypatch.setenv("RANK", "1")
        second = TCPStore()
        second.set("key", "x")
        assert first.get("key") == b"x"
        assert first.critical_ranks == second.critical_ranks == PrefixStore(0, second).critical_ranks == (0,)
        second.close()
        first.close()

    def test_with_access_it_uses_the_server_of_the_job(self) -> None:
        server = StoreServer(Access("127.0.0.1", 0))
        store = TCPStore(access=server.start(), wait_for_workers=False, multi_tenant=True, use_libuv=False)
        assert store.critical_ranks == ()
        with CoordinationStore(store.client.access) as daemon:
            RestartIndex(daemon).begin()
            Namespace(0, daemon).set("key", "x")
            assert PrefixStore(0, store).get("key") == b"x"
            assert server.client_count == 2
        store.close()
        server.close()

    def test_the_secret_of_the_environment_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = TCPStore()
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("INPROCESS_SECRET", "another one")
        with pytest.raises(StoreError, match="serves another job"):
            TCPStore(timeout=LONG)
        store.close()

    def test_waits_for_workers(self, pool: ThreadPoolExecutor) -> None:
        with pytest.raises(StoreTimeoutError):
            TCPStore(world_size=2, timeout=SOON)
        server = StoreServer(Access("127.0.0.1", 0))
        access = server.start()
        for starting in [pool.submit(TCPStore, world_size=2, access=access) for _ in range(2)]:
            starting.result(20).close()
        server.close()

    def test_serves_torch_through_its_own_prefix(self) -> None:
        store = TCPStore()
        prefixed: Any = dist.PrefixStore("p", store)
        prefixed.set("a", "1")
        assert prefixed.get("a") == b"1"
        assert prefixed.add("n", 2) == 2
        assert prefixed.compare_set("c", "", "x") == b"x"
        assert prefixed.check(["a"])
        prefixed.wait(["a"], LONG)
        prefixed.append("a", "2")
        prefixed.multi_set(["d", "e"], ["3", "4"])
        assert prefixed.multi_get(["a", "e"]) == [b"12", b"4"]
        assert prefixed.delete_key("a")
        assert prefixed.num_keys() == store.num_keys() == 4
        assert PrefixStore("p", store).get("d") == b"3"
        with pytest.raises(StoreTimeoutError):
            prefixed.wait(["absent"], SOON)
        store.close()

    def test_clear_deletes_one_namespace(self) -> None:
        store = TCPStore()
        for iteration in (1, 10):
            PrefixStore(iteration, store).set("key", "x")
            PrefixStore(iteration, store).arrive("set", "m")
        PrefixStore(1, store).clear()
        assert not store.check(["1/key"])
        assert store.members("1/set") == frozenset()
        assert store.check(["10/key"])
        store.close()


def test_file_store_has_no_critical_ranks(tmp_path: Path) -> None:
    assert PrefixStore(0, FileStore(str(tmp_path / "store"), 1)).critical_ranks == ()


def _all_reduce(rank: int, world_size: int) -> float:
    store = TCPStore(timeout=LONG)
    prefixed = PrefixStore(0, store)
    total = 0.0
    for round_ in range(2):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(round_), prefixed), rank=rank, world_size=world_size, timeout=LONG
        )
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value)
        total += value.item()
        dist.barrier(group=dist.new_group())
        dist.destroy_process_group()
    store.reentrant_barrier([rank], "exit", world_size, timedelta(0) if rank else LONG)
    store.close()
    return total


def test_gloo_over_the_store() -> None:
    results = run_ranks(_all_reduce, 2, init_process_group=False, env={"OMP_NUM_THREADS": "1"})
    assert [result.value for result in results] == [6.0, 6.0]
    assert os.environ.get("TEST_RANKS_ID") is None
