"""Aborts in real ranks: who is blocked gets free, what is not gloo's stays whole, new groups work."""

import gc
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inprocess.abort import (
    AbortPersistentCheckpointProcesses,
    AbortTorchDistributed,
    AbortTransformerEngine,
    dump_flight_recorder,
    flight_recorder_files,
    unblock_main_thread,
)
from inprocess.compose import Compose
from inprocess.unblock import process_groups
from inprocess.unblock.gloo_waits import watch_gloo_waits
from inprocess.unblock.process_groups import discard_process_groups
from inprocess.unblock.store_waits import interruptible_store_connections
from tests.ckpt.crash.killers import wait_until
from tests.inprocess.gloo_ranks import AborterThread, Meeting, OtherConnection, holdings, settled_holdings, state
from tests.support import free_port, launch_ranks, run_ranks
from tests.support.selection import full_only
from tests.support.template import quick_python

FREED_WITHIN_S = 0.5
STUCK = 3  # the rank that never comes, of four


OPERATIONS = (
    "all_reduce",
    "large all_reduce",
    "barrier",
    "recv",
    "send",
    "subgroup",
    "mesh",
    "async",
    "objects",
    "monitored_barrier",
)


def start_group(meeting: Meeting, name: str, rank: int) -> None:
    import torch.distributed as dist

    store = dist.PrefixStore(name, meeting.store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=meeting.world_size)


def sum_of_ranks(group: Any = None) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group)
    return int(total)


def operations() -> dict[str, Callable[[], Any]]:
    """Each blocks ranks 0 to 2 as long as rank 3 stays away."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    def wait_for_the_last_of_many() -> None:
        works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(10)]
        works[-1].wait()

    subgroup = dist.new_group([0, 1, 2, STUCK])
    mesh = init_device_mesh("cpu", (4,))
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(8)),
        "large all_reduce": lambda: dist.all_reduce(torch.ones(5_000_000)),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(torch.ones(8), STUCK),
        "recv from any": lambda: dist.recv(torch.ones(8)),
        "send": lambda: dist.send(torch.ones(20_000_000), STUCK),
        "subgroup": lambda: dist.all_reduce(torch.ones(8), group=subgroup),
        "mesh": lambda: dist.all_reduce(torch.ones(8), group=mesh.get_group()),
        "async": wait_for_the_last_of_many,
        "objects": lambda: dist.all_gather_object([None] * 4, "x"),
        "monitored_barrier": dist.monitored_barrier,
    }


def blocked_then_freed(rank: int, world_size: int, watched: bool) -> dict[str, float]:
    assert not watched or watch_gloo_waits()
    meeting, other = Meeting(rank, world_size), OtherConnection()
    seconds: dict[str, float] = {}
    names = ["warm-up", *OPERATIONS, *["all_reduce again"] * 20, *(["recv from any"] if watched else [])]
    before = (0, 0)
    for number, name in enumerate(names):
        start_group(meeting, str(number), rank)
        blocked = operations() if name != "all_reduce again" else {}
        meeting.meet(f"ready {number}")
        if rank == STUCK:
            meeting.meet(f"freed {number}")
            AbortTorchDistributed()(state(number))
        else:
            aborter = AborterThread(lambda number=number: AbortTorchDistributed()(state(number)))
            with pytest.raises(RuntimeError):
                blocked.get(name, sum_of_ranks)()
            seconds[name] = max(aborter.join(), seconds.get(name, 0.0))
            meeting.meet(f"freed {number}")
        other.check()
        del blocked
        discard_process_groups()
        gc.collect()
        start_group(meeting, f"{number} again", rank)
        assert sum_of_ranks() == sum(range(world_size))
        meeting.meet(f"used {number}")
        AbortTorchDistributed()(state(number))
        if number == 1:
            before = holdings()
    left = settled_holdings(before)
    assert left[0] <= before[0], f"descriptors {left[0]}, {before[0]} after the first round"
    assert left[1] <= before[1], f"threads {left[1]}, {before[1]} after the first round"
    other.close()
    meeting.meet("end")
    return seconds


@pytest.mark.timeout(180)
@pytest.mark.parametrize("watched", [pytest.param(False, marks=full_only), True])
def test_blocked_operations_are_freed_and_new_groups_work(watched: bool) -> None:
    results = run_ranks(blocked_then_freed, 4, watched, init_process_group=False)
    for result in results[:STUCK]:
        print(f"rank {result.rank}:", {name: round(seconds, 4) for name, seconds in result.value.items()})
        slow = {name: seconds for name, seconds in result.value.items() if seconds > FREED_WITHIN_S}
        assert not slow, f"rank {result.rank}"
    assert {"warm-up", *OPERATIONS, "all_reduce again"} <= results[0].value.keys()
    assert ("recv from any" in results[0].value) == watched


def blocked_by_a_stopped_rank(rank: int, world_size: int) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    aborter = AborterThread(lambda: AbortTorchDistributed()(state()))
    with pytest.raises(RuntimeError):
        dist.recv(torch.ones(8), 1)
    return aborter.join()


@pytest.mark.parametrize("variable", ["TORCH_GLOO_LAZY_INIT=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL"])
def test_a_rank_that_was_stopped(variable: str) -> None:
    name, value = variable.split("=")
    with launch_ranks(blocked_by_a_stopped_rank, 2, env={name: value}) as group:
        deadline = 0
        while group.results()[0].returncode is None and deadline < 3000:
            deadline += 1
            threading.Event().wait(0.01)
        assert group.results()[0].returncode == 0, group.results()[0].stderr
        assert group.results()[0].value < FREED_WITHIN_S


def fails_while_bytes_are_on_the_way(rank: int, world_size: int, number: int, fails: int) -> float:
    """Rank 0 sends 256 MB to rank 1; `fails` gets the signal when the first bytes have arrived."""
    import torch
    import torch.distributed as dist

    assert watch_gloo_waits()
    meeting = Meeting(rank, world_size)
    meeting.store.set(f"pid {rank}", str(os.getpid()))
    tensor = torch.full((64 << 20,), float(rank == 0))
    dist.barrier()

    def strike() -> None:
        while tensor[0] == 0:
            pass
        os.kill(int(meeting.store.get(f"pid {fails}")), number)

    if rank == 1:
        threading.Thread(target=strike, daemon=True).start()
    aborter = AborterThread(lambda: AbortTorchDistributed()(state())) if rank != fails else None

    def transfer() -> None:
        dist.broadcast(tensor, 0)
        dist.barrier()  # fails if the bytes were all in the kernel's buffers

    with pytest.raises(RuntimeError):
        transfer()
    assert aborter is not None
    return aborter.join()


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_fails_while_bytes_are_on_the_way(number: int, fails: int) -> None:
    with launch_ranks(fails_while_bytes_are_on_the_way, 2, number, fails) as group:
        wait_until(lambda: group.results()[1 - fails].returncode is not None, "the rank that is left", 15)
        survivor = group.results()[1 - fails]
        assert survivor.returncode == 0, survivor.stderr
        assert survivor.value < FREED_WITHIN_S


def test_waits_are_not_watched_if_they_are_not_as_expected(tmp_path: Path) -> None:
    script = """
        import torch.distributed
        from inprocess.unblock import gloo_waits
        gloo_waits.{name} = {value!r}
        assert not gloo_waits.watch_gloo_waits()
        assert gloo_waits.end_gloo_waits() == 0
    """
    for name, value in (
        ("_LIBRARY", str(tmp_path / "not compiled")),
        ("_TORCH", "libtorch_of_another_kind.so"),
        ("_TABLE", "_ZTVN4gloo9transport3tcp6BufferE"),
        ("_WAITS", ("_Z4recv", "_Z4send")),
    ):
        code = textwrap.dedent(script.format(name=name, value=value))
        subprocess.run([quick_python(), "-c", code], check=True, timeout=50)


def waiting_for_ranks_that_do_not_come(rank: int, world_size: int, folder: str) -> list[float]:
    """Rank 0 waits as host of the store, then rank 1 as client, then rank 1 in `new_group`."""
    import torch.distributed as dist

    meeting = Meeting(rank, world_size)
    seconds = []

    def wait_in(creation: Callable[[], Any], name: str, after: str | None = None) -> None:
        aborter = AborterThread(lambda: AbortTorchDistributed()(state()), after)
        with pytest.raises(dist.DistNetworkError):
            creation()
        if rank == 1:
            Path(folder, "first is free").touch()
        seconds.append(aborter.join())
        meeting.meet(name)

    def join(world: int, name: str) -> None:
        port = port_for(meeting, rank, name)
        if rank != 0:
            wait_for_listener(port)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)

    # The host last: without it the other would go on trying to connect.
    aborted_already = None if rank == 1 else f"{folder}/first is free"
    wait_in(lambda: join(world_size + 1, "too few"), "too few", aborted_already)
    discard_process_groups()

    port = port_for(meeting, rank, "lone")
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    meeting.meet("hosted")
    if rank == 1:
        url = f"tcp://127.0.0.1:{port}"
        wait_in(lambda: dist.init_process_group("gloo", init_method=url, rank=1, world_size=2), "lone")
    else:
        meeting.meet("lone")
    discard_process_groups()
    del store

    # Rank 1 has named one group more than rank 0, unless that was forgotten.
    join(world_size, "again")
    assert sum_of_ranks() == 1
    meeting.meet("joined")
    if rank == 1:
        wait_in(lambda: dist.new_group([0, 1]), "new group")
    else:
        meeting.meet("new group")
    AbortTorchDistributed()(state())
    discard_process_groups()
    start_group(meeting, "last", rank)
    assert sum_of_ranks() == 1
    meeting.meet("end")
    return seconds


def wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.01)


def port_for(meeting: Meeting, rank: int, name: str) -> int:
    """A port that rank 0 has found free, the same on all ranks."""
    if rank == 0:
        meeting.store.set(f"port {name}", str(free_port()))
    return int(meeting.store.get(f"port {name}"))


def test_group_creation_is_freed_while_other_ranks_do_not_come(tmp_path: Path) -> None:
    results = run_ranks(waiting_for_ranks_that_do_not_come, 2, str(tmp_path), init_process_group=False)
    print([result.value for result in results])
    assert [len(result.value) for result in results] == [1, 3]
    assert max(max(result.value) for result in results) < FREED_WITHIN_S


def with_a_store_of_the_caller(rank: int, world_size: int) -> bool:
    import torch.distributed as dist

    meeting = Meeting(rank, world_size)
    if rank == 0:
        meeting.store.wait(["left alone"])
    else:

        def abort() -> Any:
            from inprocess.unblock.store_waits import break_store_wait

            broken = break_store_wait()
            other = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
            other.set("left alone", "")
            return broken

        aborter = AborterThread(abort)
    dist.init_process_group("gloo", store=meeting.store, rank=rank, world_size=world_size)
    assert sum_of_ranks() == 1
    meeting.meet("end")
    if rank == 0:
        return False
    aborter.join()
    return bool(aborter.result)


def test_a_store_that_was_passed_in_is_left_alone() -> None:
    results = run_ranks(with_a_store_of_the_caller, 2, init_process_group=False)
    assert [result.value for result in results] == [False, False]


def continued_while_it_waits(rank: int, world_size: int) -> bool:
    """Return whether the abort has broken the wait of a process that was stopped, and has continued."""
    import torch.distributed as dist

    meeting = Meeting(rank, world_size)
    port = port_for(meeting, rank, "store")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        meeting.meet("hosted")
        meeting.meet("freed")
        return store.num_keys() > 0
    meeting.meet("hosted")

    def abort() -> bool:
        code = f"""
import os, signal, time
os.kill({os.getpid()}, signal.SIGSTOP)
while open("/proc/{os.getpid()}/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
os.kill({os.getpid()}, signal.SIGCONT)
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
        deadline = time.monotonic() + 10
        while not (freed := unblock_main_thread() > 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        return freed

    aborter = AborterThread(abort)
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    aborter.join()
    meeting.meet("freed")
    return bool(aborter.result)


def test_a_rank_that_was_stopped_and_continued_while_it_waits() -> None:
    """A wait that was interrupted goes on as another system call (`restart_syscall`)."""
    results = run_ranks(continued_while_it_waits, 2, init_process_group=False)
    assert [result.value for result in results] == [True, True]


class PersistentAborter:
    """Aborts when any rank asks for it, then frees the main thread until it has left, as the monitor thread does."""

    def __init__(self, number: int) -> None:
        from torch.distributed import TCPStore

        self._key = f"abort {number}"
        self._store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> float:
        """Return how long ago the abort began; negative if it came after all."""
        left_at = time.monotonic()
        self._left.set()
        self._thread.join()
        return left_at - self._began_at

    def _run(self) -> None:
        self._store.wait([self._key])
        self._began_at = time.monotonic()
        AbortTorchDistributed()(state())
        while not self._left.wait(0.02):
            unblock_main_thread()


def aborted_while_groups_are_made(rank: int, world_size: int) -> float:
    """Return the longest time from the begin of an abort to the main thread's freedom."""
    import torch.distributed as dist

    meeting, other = Meeting(rank, world_size), OtherConnection()
    chance = random.Random(rank)
    slowest = 0.0
    for number in range(8):
        after = chance.randrange(6)
        url = f"tcp://127.0.0.1:{port_for(meeting, rank, str(number))}"
        aborter = PersistentAborter(number)

        def make_groups(number: int = number, after: int = after, url: str = url) -> None:
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
            for count in itertools.count():
                if count == after:
                    meeting.store.set(f"abort {number}", "")  # from here the abort runs beside the creation of groups
                dist.new_group([0, 1])

        # Where torch finds that its groups are gone is a matter of chance: it may be a KeyError or AttributeError.
        with interruptible_store_connections(), pytest.raises(Exception) as ended:  # noqa: PT011
            make_groups()
        print(f"abort {number} after {after} groups: {ended.value!r:.200}", flush=True)
        slowest = max(slowest, aborter.end())
        meeting.meet(f"aborted {number}")
        discard_process_groups()
        other.check()
        start_group(meeting, f"{number} again", rank)
        assert sum_of_ranks() == 1
        meeting.meet(f"used {number}")
        discard_process_groups()
    other.close()
    meeting.meet("end")
    return slowest


def test_an_abort_while_groups_are_made() -> None:
    results = run_ranks(aborted_while_groups_are_made, 2, init_process_group=False)
    print("slowest:", [round(result.value, 3) for result in results])


class FakeGroup:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: object) -> Any:
        if self.backend is None:
            raise RuntimeError("no backend for this device")
        return self.backend


class FakeNccl:
    """A backend whose abort returns when `others` of them are in it, or never."""

    def __init__(self, barrier: threading.Barrier | None, error: Exception | None = None) -> None:
        self.barrier, self.error = barrier, error

    def abort(self) -> None:
        if self.barrier is None:
            threading.Event().wait(5)
        else:
            self.barrier.wait(20)
        if self.error is not None:
            raise self.error


def fake_groups(monkeypatch: pytest.MonkeyPatch, *backends: Any) -> None:
    import torch  # noqa: F401

    world = types.SimpleNamespace(pg_names={FakeGroup(backend): str(i) for i, backend in enumerate(backends)})
    module = types.SimpleNamespace(ProcessGroupNCCL=FakeNccl, _world=world, is_initialized=lambda: False)
    monkeypatch.setattr(process_groups, "_groups_module", lambda: module)


def test_nccl_is_aborted_on_all_groups_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    barrier = threading.Barrier(3)
    wrapped = types.SimpleNamespace(wrapped_pg=FakeNccl(barrier))
    fake_groups(monkeypatch, FakeNccl(barrier), None, wrapped, FakeNccl(barrier, RuntimeError("broken")))
    assert process_groups.abort_nccl(5.0) == 3
    assert "abort of NCCL in process group '3' failed" in caplog.text


def test_an_nccl_abort_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_groups(monkeypatch, FakeNccl(None))
    assert process_groups.abort_nccl(0.05) == 1
    assert "has not ended within" in caplog.text


def test_without_groups_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_groups(monkeypatch)
    frozen = state()
    assert AbortTorchDistributed()(frozen) is frozen


def test_importing_and_calling_it_does_not_load_torch() -> None:
    code = (
        "import sys; from inprocess.abort import *; from inprocess.state import FrozenState;"
        "import inprocess.health_check, inprocess.finalize, inprocess.nested_restarter, inprocess.tools.inject_fault;"
        "AbortTorchDistributed()(FrozenState(0, 1)); discard_process_groups(); unblock_main_thread();"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("given", ["argument", "INPROCESS_FR_TRACE_PATH", "NVRX_FR_TRACE_PATH"])
def test_the_flight_recorder_is_written_when_it_records(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    bindings = types.SimpleNamespace(_dump_nccl_trace=lambda: b"trace")
    monkeypatch.setattr(torch._C, "_distributed_c10d", bindings)
    if given != "argument":
        monkeypatch.setenv(given, str(tmp_path))
    folder = tmp_path if given == "argument" else None
    for size in ("0", "", "many"):
        monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", size)
        assert dump_flight_recorder(folder, state()) is None
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")
    file = dump_flight_recorder(folder, state(iteration=2))
    assert file == tmp_path / "iteration_2" / "rank_0"
    assert file.read_bytes() == b"trace"
    hook = Compose(AbortTorchDistributed(folder), AbortTransformerEngine())
    assert flight_recorder_files(hook, 2) == [str(file)]
    assert flight_recorder_files(hook, 1) == []
    monkeypatch.delenv(given, raising=False)
    assert flight_recorder_files(None, 2) == []


def test_transformer_engine_is_reset_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, calls = state(), []
    assert AbortTransformerEngine()(frozen) is frozen
    base = types.SimpleNamespace(destroy_ub=lambda: calls.append("buffers"))
    manager = types.SimpleNamespace(reset=lambda: calls.append("fp8"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)  # type: ignore[arg-type]
    fp8 = types.SimpleNamespace(FP8GlobalStateManager=manager)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", fp8)  # type: ignore[arg-type]
    assert AbortTransformerEngine()(frozen) is frozen
    assert calls == ["buffers", "fp8"]


def test_writers_of_another_library_are_killed_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, calls = state(), []
    assert AbortPersistentCheckpointProcesses()(frozen) is frozen
    core = types.SimpleNamespace(abort_nvrx_checkpoint=lambda: calls.append("killed"))
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.checkpointing.async_ckpt.core", core)  # type: ignore[arg-type]
    assert AbortPersistentCheckpointProcesses()(frozen) is frozen
    assert calls == ["killed"]
