"""What is particular to the store in etcd. What every store does is in `tests/inprocess/test_store.py`."""

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from inprocess import Wrapper
from inprocess.coordination import Access, Guard, Namespace, RestartIndex
from inprocess.coordination.etcd import EtcdClient
from inprocess.coordination.etcd_gateway import EtcdCluster
from inprocess.coordination.etcd_messages import KeyRange, after, read
from inprocess.exception import StaleViewError, StoreError, StoreLostError, StoreTimeoutError
from inprocess.store import EtcdStore
from tests.inprocess.coordination.helpers import Relay, check_that_a_forked_child_cannot_use, eventually
from tests.inprocess.etcd import Etcd, needs_etcd, running_etcd
from tests.inprocess.restarting import outcome
from tests.support import run_ranks
from tests.support.selection import full_only

pytestmark = needs_etcd

LONG = timedelta(seconds=40)
SHORT = timedelta(seconds=2)  # the patience of a client that is to lose its store

Connect = Callable[..., EtcdClient]


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as etcd:
        yield etcd


@pytest.fixture
def job() -> str:
    return f"test {uuid.uuid4().hex}"


@pytest.fixture
def connect(etcd: Etcd, job: str) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connect(cluster: EtcdCluster | None = None, patience: timedelta = LONG) -> EtcdClient:
            target = cluster or EtcdCluster(tuple(etcd.endpoints))
            return stack.enter_context(EtcdClient(target, job, timeout=LONG, patience=patience))

        yield connect


@pytest.fixture
def client(connect: Connect) -> EtcdClient:
    return connect()


@pytest.fixture
def relay(etcd: Etcd) -> Iterator[Relay]:
    relay = Relay(Access("127.0.0.1", urlsplit(etcd.endpoints[0]).port or 0))
    yield relay
    relay.close()


def through(relay: Relay) -> EtcdCluster:
    return EtcdCluster((f"http://127.0.0.1:{relay.access.port}",))


@pytest.fixture
def _checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets waits that no event ends look again, also for the loss of the store, after half a second instead of 5 s."""
    monkeypatch.setattr("inprocess.coordination.etcd._CHECK_S", 0.5)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


# -- changes -----------------------------------------------------------------------------------------------------------


def test_a_change_whose_answer_is_lost_is_applied_once(
    connect: Connect, client: EtcdClient, relay: Relay, pool: ThreadPoolExecutor
) -> None:
    relayed = connect(through(relay))

    def change() -> None:  # by one connection, which has the greeting of the relay behind it
        relayed.set("a", "1")
        relayed.set("b", "1")
        for round_ in range(5):
            relay.swallow_answers = 1
            assert relayed.add("sum", 1) == round_ + 1
            relayed.append("warm", "")
            relayed.append("warm", "")
            relay.swallow_answers = 1
            relayed.append("log", "x")
            relayed.check(["a"])
            relayed.check(["a"])
        relay.swallow_answers = 1
        assert relayed.delete_key("a")
        relayed.check(["a"])
        relayed.check(["a"])
        relay.swallow_answers = 1
        assert relayed.arrive("set", "me") == 1
        relayed.check(["a"])
        relayed.check(["a"])
        relay.swallow_answers = 1
        assert relayed.compare_set("b", "1", "2") == b"2"

    pool.submit(change).result(60)
    assert client.get("log") == b"xxxxx"
    assert client.add("sum", 0) == 5
    assert client.get("b") == b"2"
    assert relay.swallow_answers == 0


def test_counting_by_several_at_once(connect: Connect, pool: ThreadPoolExecutor) -> None:
    def count(_: int) -> list[int]:
        client = connect()
        return [client.add("n", 1) for _ in range(20)]

    numbers = [number for counted in pool.map(count, range(4)) for number in counted]
    assert sorted(numbers) == list(range(1, 81))


def test_the_order_of_what_is_appended(client: EtcdClient) -> None:
    client.set("log", "a")
    for letter in "bcd":
        client.append("log", letter)
    assert client.get("log") == b"abcd"
    for operation in (lambda: client.add("log", 1), lambda: client.compare_set("log", "abcd", "x")):
        with pytest.raises(StoreError, match="was appended to"):
            operation()
    client.set("log", "e")
    assert client.get("log") == b"e"
    assert client.num_keys() == 1


def test_more_keys_than_a_transaction_takes(client: EtcdClient) -> None:
    keys = [f"key {number}" for number in range(250)]
    client.multi_set(keys, [str(number) for number in range(250)])
    assert client.check(keys)
    assert not client.check([*keys, "another"])
    assert client.multi_get(keys) == [str(number).encode() for number in range(250)]
    with pytest.raises(StoreTimeoutError, match="and 247 more"):
        client.wait([*keys, "another"], timedelta(0))


def test_jobs_do_not_see_each_other(etcd: Etcd, client: EtcdClient) -> None:
    client.set("key", "x")
    client.arrive("set", "x")
    with EtcdClient(EtcdCluster(tuple(etcd.endpoints)), f"{client.job}2") as other:
        assert not other.check(["key"])
        assert other.delete_prefix("") == 0
        assert other.num_keys() == 0
    assert client.get("key") == b"x"
    assert client.members("set") == {"x"}


# -- guards ------------------------------------------------------------------------------------------------------------


def test_nothing_is_done_on_an_old_view(client: EtcdClient) -> None:
    index = RestartIndex(client)
    index.begin()
    old = Namespace(0, client)
    old.set("key", "x")
    index.advance(0)
    for operation in (
        lambda: old.set("key", "y"),
        lambda: old.add("n", 1),
        lambda: old.append("log", "y"),
        lambda: old.compare_set("key", "x", "y"),
        lambda: old.delete_key("key"),
        lambda: old.arrive("set", "me"),
        lambda: old.wait_size("set", 1, LONG),
        lambda: old.wait(["absent"], LONG),
    ):
        with pytest.raises(StaleViewError, match="expects restart_index 0, but the value is 1 now"):
            operation()
    assert old.get("key") == b"x"
    assert old.members("set") == frozenset()
    with pytest.raises(StaleViewError, match="too late"):
        index.begin()


def test_a_wait_ends_as_soon_as_the_view_is_old(client: EtcdClient, pool: ThreadPoolExecutor) -> None:
    RestartIndex(client).begin()
    old = Namespace(0, client)
    waiting = [pool.submit(old.wait, ["absent"], LONG), pool.submit(old.wait_size, "set", 3, LONG)]
    eventually(lambda: client.check([]) and not any(each.done() for each in waiting))
    RestartIndex(client).advance(0)
    for each in waiting:
        assert isinstance(each.exception(20), StaleViewError)


@pytest.mark.usefixtures("_checked_often")
def test_a_wait_for_a_size_ends_although_nobody_says_so(client: EtcdClient, pool: ThreadPoolExecutor) -> None:
    """Whoever makes a set large enough may die before it says so; the wait looks again by itself."""
    waiting = pool.submit(client.wait_size, "set", 1, LONG)
    wanted = f"{client._root}w/set\0".encode()
    eventually(lambda: bool(client._ask([read(KeyRange(wanted, after(wanted)))]).count(0)))
    client._change(Guard("", ""), [client._put("s", "set", "me")])  # the first half of `arrive`
    assert waiting.result(20) == 1


# -- a member, or the cluster, out of reach ----------------------------------------------------------------------------


def test_the_loss_of_a_minority_costs_nothing(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with Etcd(tmp_path, 3) as etcd:
        clients = [
            EtcdClient(EtcdCluster((*etcd.endpoints[first:], *etcd.endpoints[:first])), "job", patience=LONG)
            for first in range(3)
        ]
        waiting = [pool.submit(client.wait, ["key"], LONG) for client in clients]
        for round_, break_it in enumerate((etcd.kill, etcd.freeze)):
            break_it(0)
            for client in clients:
                client.append("log", "x")
            assert clients[1].get("log") == b"x" * 3 * (round_ + 1)
            etcd.kill(0)
            etcd.start(0)
        clients[2].set("key", "1")
        for each in waiting:
            each.result(40)
        for client in clients:
            client.close()


@pytest.mark.usefixtures("_checked_often")
def test_without_a_quorum_the_store_is_lost_for_good(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with (
        Etcd(tmp_path, 3) as etcd,
        EtcdClient(EtcdCluster(tuple(etcd.endpoints)), "job", patience=SHORT) as client,
        EtcdClient(EtcdCluster(tuple(etcd.endpoints)), "job", patience=SHORT) as idle,
    ):
        waiting = pool.submit(client.wait, ["absent"], LONG)
        etcd.kill(0)
        etcd.kill(1)
        with pytest.raises(StoreLostError, match="no quorum, or this node is cut off"):
            client.set("key", "x")
        assert isinstance(waiting.exception(20), StoreLostError)
        eventually(lambda: idle.lost)  # it has asked nothing meanwhile
        etcd.start(0)
        with pytest.raises(StoreLostError):
            client.check(["key"])


def post(client: EtcdClient, path: str, **document: Any) -> dict[str, Any]:
    """Send a message to the cluster, as its administrator does."""
    return client._gateway.run(lambda request: client._gateway.post(request, path, document))


EVERYTHING = {"key": "AA==", "range_end": "AA=="}


def fill(endpoints: Sequence[str]) -> None:
    """Write until the cluster has no space any more: from then on it answers reads, and refuses changes."""
    cluster = EtcdCluster(tuple(endpoints))

    def write() -> None:
        for number in range(1000):
            client.set(f"key {number}", b"x" * 500_000)

    with (
        EtcdClient(cluster, "filler", patience=timedelta(seconds=0.5)) as client,
        pytest.raises(StoreLostError, match="database space exceeded"),
    ):
        write()


@pytest.fixture
def small_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A cluster with space for a few megabytes."""
    with Etcd(tmp_path, options=("--quota-backend-bytes=4000000",)) as etcd:
        etcd.wait_ready()
        yield etcd


@pytest.mark.usefixtures("_checked_often")
def test_a_full_cluster_is_lost_also_for_a_process_that_only_reads(small_etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    cluster = EtcdCluster(tuple(small_etcd.endpoints))
    with (
        EtcdClient(cluster, "job", patience=SHORT) as client,
        EtcdClient(cluster, "job", patience=SHORT) as reading,
    ):
        waiting = pool.submit(reading.wait, ["absent"], LONG)
        fill(small_etcd.endpoints)
        with pytest.raises(
            StoreLostError, match=r"has refused changes for 2 s: .*space exceeded.*etcdctl alarm disarm"
        ):
            client.set("key", "x")
        assert isinstance(waiting.exception(20), StoreLostError)


def test_a_cluster_that_has_space_again_in_time_is_not_lost(small_etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    with EtcdClient(EtcdCluster(tuple(small_etcd.endpoints)), "job", patience=LONG) as client:
        fill(small_etcd.endpoints)
        writing = pool.submit(client.set, "key", "x")
        first, after = (base64.b64encode(key).decode() for key in (b"/inprocess/filler/", b"/inprocess/filler0"))
        revision = post(client, "/v3/kv/deleterange", key=first, range_end=after)["header"]["revision"]
        post(client, "/v3/kv/compaction", revision=revision, physical=True)
        post(client, "/v3/maintenance/defragment")
        (alarm,) = post(client, "/v3/maintenance/alarm", action="GET")["alarms"]
        assert not writing.done()
        post(client, "/v3/maintenance/alarm", action="DEACTIVATE", **alarm)
        writing.result(30)
        assert client.get("key") == b"x"
        assert not client.lost


@pytest.mark.parametrize("fault", ["raises", pytest.param("dies", marks=full_only)])
def test_a_fault_that_cannot_be_reported_ends_the_job(small_etcd: Etcd, fault: str) -> None:
    """The cluster is full. Rank 0 would wait for rank 1 otherwise, and rank 1 for its own restart."""

    def main(rank: int, world_size: int, url: str) -> Any:
        @Wrapper(
            store_factory=EtcdStore,
            store_kwargs={"endpoints": url},
            heartbeat_timeout=timedelta(seconds=4),
            heartbeat_interval=timedelta(seconds=0.5),
        )
        def train() -> None:
            if rank == 1:
                fill((url,))
                if fault == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("not to be reported")
            while True:
                time.sleep(0.1)

        return outcome(train)

    ended = dict.fromkeys((0, 1))  # by themselves, or on a busy machine by their monitors, 2 s later
    for result in run_ranks(main, 2, small_etcd.endpoints[0], init_process_group=False, returncodes=ended):
        assert result.value is None or result.value[0] == "StoreLostError"
        assert "space exceeded" in result.stderr or (result.rank, fault) == (1, "dies")


@pytest.mark.usefixtures("_checked_often")
def test_without_its_lease_the_store_is_lost(connect: Connect, pool: ThreadPoolExecutor) -> None:
    """Everything in it was deleted: what is written afterwards would be another store."""
    client = connect(patience=SHORT)
    waiting = pool.submit(client.wait, ["absent"], LONG)
    post(client, "/v3/lease/revoke", ID=str(client._lease.id))
    failure = waiting.exception(30)
    assert isinstance(failure, StoreLostError)
    assert "for 2 s, no change was possible: the lease of job" in str(failure)


@pytest.mark.usefixtures("_checked_often")
def test_without_the_permission_to_write_the_store_is_lost(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with (
        Etcd(tmp_path) as etcd,
        EtcdClient(EtcdCluster(tuple(etcd.endpoints)), "administration", patience=LONG) as admin,
    ):
        for name in ("root", "worker"):
            post(admin, "/v3/auth/user/add", name=name, password="secret")
            post(admin, "/v3/auth/role/add", name=name)
            post(admin, "/v3/auth/user/grant", user=name, role=name)
        post(admin, "/v3/auth/role/grant", name="worker", perm={"permType": "READWRITE", **EVERYTHING})
        post(admin, "/v3/auth/enable")
        clusters = {
            name: EtcdCluster(tuple(etcd.endpoints), user=name, password="secret") for name in ("root", "worker")
        }
        with (
            EtcdClient(clusters["root"], "job", patience=LONG) as root,
            EtcdClient(clusters["worker"], "job", patience=SHORT) as client,
        ):
            waiting = pool.submit(client.wait, ["absent"], LONG)
            post(root, "/v3/auth/role/grant", name="worker", perm={"permType": "READ", **EVERYTHING})
            with pytest.raises(StoreError, match="permission denied"):
                client.set("key", "x")
            failure = waiting.exception(30)
            assert isinstance(failure, StoreLostError)
            assert "for 2 s, no change was possible: etcd refuses /v3/kv/txn" in str(failure)


def test_nobody_there(job: str) -> None:
    began = time.monotonic()
    with pytest.raises(StoreLostError, match=r"127.0.0.1:1 .*answered for 0.5 s"):
        EtcdClient(EtcdCluster(("http://127.0.0.1:1",)), job, patience=timedelta(seconds=0.5))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("url", ["127.0.0.1:2379", "ftp://host:2379", "http://", "http://host/path"])
def test_what_is_no_endpoint(url: str) -> None:
    with pytest.raises(ValueError, match="is not the client URL"):
        EtcdCluster((url,))
    with pytest.raises(ValueError, match="at least one"):
        EtcdCluster(())
    with pytest.raises(ValueError, match="belong together"):
        EtcdCluster(("https://host:2379",), cert="x.pem")


# -- who may -----------------------------------------------------------------------------------------------------------


def test_users_and_passwords(tmp_path: Path, job: str, pool: ThreadPoolExecutor) -> None:
    if shutil.which("etcdctl") is None:
        pytest.skip("etcdctl is not installed (Debian: etcd-client)")
    with Etcd(tmp_path) as etcd:
        for command in (
            "user add root:over",
            "user grant-role root root",
            "role add jobs",
            "role grant-permission jobs readwrite --prefix=true /inprocess/",
            "user add trainer:secret",
            "user grant-role trainer jobs",
            "auth enable",
        ):
            environment = {**os.environ, "ETCDCTL_API": "3"}
            subprocess.run(
                ["etcdctl", f"--endpoints={etcd.endpoints[0]}", *command.split()],
                env=environment,
                check=True,
                capture_output=True,
                timeout=30,
            )
        cluster = EtcdCluster(tuple(etcd.endpoints), "trainer", "secret")
        with EtcdClient(cluster, job, patience=SHORT) as client:
            client.set("key", "x")
            client._gateway._token = "one that has expired"
            assert client.get("key") == b"x"
            waiting = pool.submit(client.wait, ["late"], LONG)
            client.set("late", "x")
            waiting.result(20)
        for wrong in (replace(cluster, password="guessed"), EtcdCluster(tuple(etcd.endpoints))):
            with pytest.raises(StoreError, match="etcd refuses"):
                EtcdClient(wrong, job, patience=SHORT)


def test_tls_with_certificates_of_clients(tmp_path: Path, job: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=30)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    files = {name: str(tmp_path / name) for name in ("ca.pem", "client.pem", "client.key")}
    options = (
        "--client-cert-auth",
        f"--trusted-ca-file={files['ca.pem']}",
        f"--cert-file={tmp_path / 'server.pem'}",
        f"--key-file={tmp_path / 'server.key'}",
    )
    with Etcd(tmp_path, 1, options, scheme="https") as etcd:
        cluster = EtcdCluster(
            tuple(etcd.endpoints), ca_cert=files["ca.pem"], cert=files["client.pem"], key=files["client.key"]
        )
        with EtcdClient(cluster, job, patience=LONG) as client:
            client.set("key", "x")
            assert EtcdCluster.from_document(client.to_document()["etcd"]) == cluster
        unknown = EtcdCluster(tuple(etcd.endpoints), ca_cert=files["ca.pem"])
        with pytest.raises(StoreLostError):
            EtcdClient(unknown, job, patience=timedelta(seconds=1))


# -- threads and processes ---------------------------------------------------------------------------------------------


class _ThrownError(BaseException):
    pass


def test_an_exception_in_the_main_thread_ends_its_wait(client: EtcdClient) -> None:
    import ctypes

    main = threading.main_thread().ident
    thrower = threading.Timer(
        0.2, ctypes.pythonapi.PyThreadState_SetAsyncExc, (ctypes.c_ulong(main), ctypes.py_object(_ThrownError))
    )
    thrower.start()
    began = time.monotonic()
    with pytest.raises(_ThrownError):
        client.wait(["absent"], LONG)
    thrower.join()
    assert time.monotonic() - began < 20
    client.set("absent", "x")
    client.wait(["absent"], LONG)


def test_closing_ends_what_waits(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    waiting = pool.submit(client.wait, ["absent"], LONG)
    eventually(waiting.running)
    client.close()
    client.close()
    assert isinstance(waiting.exception(20), StoreError)
    with pytest.raises(StoreError, match="closed"):
        client.set("key", "x")


def test_a_forked_child_has_no_connection(client: EtcdClient) -> None:
    check_that_a_forked_child_cannot_use(client)


def test_everything_has_a_lease(etcd: Etcd, client: EtcdClient) -> None:
    if shutil.which("etcdctl") is None:
        pytest.skip("etcdctl is not installed (Debian: etcd-client)")
    client.set("key", "x")
    client.append("log", "x")
    client.arrive("set", "x")
    client.compare_set("other", "", "x")
    with pytest.raises(StoreTimeoutError):
        client.wait_size("set", 2, timedelta(0))
    arguments = [
        "etcdctl",
        f"--endpoints={etcd.endpoints[0]}",
        "lease",
        "timetolive",
        "--keys",
        f"{client._lease.id:x}",
    ]
    said = subprocess.run(
        arguments, env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True, text=True, timeout=30
    ).stdout
    assert "granted with TTL(900s)" in said
    for kind in ("k/key", "k/log", "s/set", "k/other", "w/set", "m/"):
        assert kind in said


def test_a_member_that_attends_leaves_when_its_process_has_ended(connect: Connect, client: EtcdClient) -> None:
    other = connect()
    assert [other.attend("set", "x"), other.attend("set", "x"), client.attend("set", "y")] == [1, 1, 2]
    post(client, "/v3/lease/revoke", ID=str(other._presence.id))  # as when it expires
    assert client.members("set") == {"y"}
    assert other.attend("set", "x") == 2, "it was only cut off, and comes back"
    remaining = post(client, "/v3/lease/timetolive", ID=str(other._presence.id))
    assert int(remaining["grantedTTL"]) == 10
