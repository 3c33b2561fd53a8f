"""Pack files on the disks of nodes: each rank has a directory of its own, as ranks of different nodes have."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointUnreachableError, StorageError
from ckpt.events import MirrorDone
from ckpt.mirroring.step_copy import StepCopy, StoppedError, Throttle
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.roots import open_root
from ckpt.validation.checks import validate
from tests.ckpt.crash.killers import wait_until
from tests.ckpt.crash.test_matrix import Cell, play, selected
from tests.ckpt.mirroring.support import STALLED, damage, mirror_process
from tests.support import run_ranks
from tests.support.selection import full_only

pytestmark = pytest.mark.timeout(120)

_NOT_COPIED = {"bandwidth": {0: STALLED, 1: STALLED}, "close_s": 0.0}
"""A copy of each step begins, and gets no further."""

_FULL = torch.arange(64.0 * 3000).reshape(-1, 64)


class Cluster:
    """A shared root, a mirror, and a disk for each rank, which is what a node has."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "shared"
        self.mirror = folder / "mirror"
        self._disks = folder / "disks"

    def disk(self, rank: int) -> Path:
        return self._disks / f"node{rank}"

    def saves(self, rank: int) -> list[str]:
        """Return the saves that have files on a node, by step."""
        return sorted(path.name for path in self.disk(rank).glob("step_*"))

    def packs(self, rank: int) -> list[Path]:
        return sorted(self.disk(rank).rglob("rank_*"))

    def has_copied(self, name: str) -> bool:
        """Return whether a copy that is not published has a file."""
        return any((self.mirror / ".pending").glob(f"*/{name}"))

    def replace(self, rank: int) -> None:
        """Replace a node: its disk is empty."""
        shutil.rmtree(self.disk(rank))

    def swap(self) -> None:
        """Let the ranks 0 and 1 run on each other's nodes."""
        self.disk(0).rename(self._disks / "other")
        self.disk(1).rename(self.disk(0))
        (self._disks / "other").rename(self.disk(1))

    def run(self, world_size: int, *orders: Any, **options: Any) -> list[Any]:
        """Run a job that saves and restores; return the last result of each rank."""
        (results,) = self.play(world_size, Run(*orders, **options))
        return results

    def play(self, world_size: int, *acts: "Run | Callable[[], object]") -> list[list[Any]]:
        """Run jobs one after another, and what happens between them on the nodes; return the results of each job.

        The jobs have the same processes, which have one writer each.
        """
        results = run_ranks(_play, world_size, self, acts, timeout=100)
        return [list(of_ranks) for of_ranks in zip(*(result.value for result in results), strict=True)]


class Run:
    """A job: its orders, and the options of its Checkpointer."""

    def __init__(self, *orders: Any, **options: Any) -> None:
        self.orders = orders
        self.options = options


@pytest.fixture(scope="module")
def queue() -> Iterator[ckpt.AsyncCallsQueue]:
    with ckpt.AsyncCallsQueue() as queue:
        yield queue


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def _state(rank: int, world_size: int, step: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    state: dict[str, Any] = {"w": distribute_tensor(_FULL * float(step), mesh, [Shard(0)]), "step": step}
    state["own"] = ckpt.PerRank(torch.full((5,), float(rank + step)))
    state["common"] = [torch.full((60_000,), float(step)), torch.tensor(step)]  # as the steps of an optimizer
    return state


def _wait(condition: Callable[[], bool], poll: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        poll()
        time.sleep(0.02)


def _play(rank: int, world_size: int, cluster: Cluster, acts: Sequence[Run | Callable[[], object]]) -> list[Any]:
    """Run the jobs, and between them what rank 0 does; return the result of each job."""
    results = []
    with ckpt.AsyncCallsQueue() as queue:
        for act in acts:
            if isinstance(act, Run):
                results.append(_job(rank, world_size, cluster, act.orders, {**act.options, "queue": queue}))
            elif rank == 0:
                act()
            torch.distributed.barrier()
    return results


def _job(rank: int, world_size: int, cluster: Cluster, orders: Sequence[Any], options: dict[str, Any]) -> Any:
    """Do what `orders` say: a number is a step to save, None is a restore.

    A text is a file of a copy that is not published, to wait for. A list has the steps of the root, to wait for; the
    last one is in the mirror then, and no step is held for that any more.
    """
    every = options.pop("every", 1)
    close_s = options.pop("close_s", 40.0)
    bandwidth = options.pop("bandwidth", {}).get(rank)
    mirror = ckpt.Mirror(cluster.mirror, every, bandwidth=bandwidth, close_timeout=timedelta(seconds=close_s))
    result: Any = None
    copied: list[int] = []
    with (
        ckpt.observe(lambda event: copied.append(event.step) if isinstance(event, MirrorDone) else None),
        ckpt.Checkpointer(
            cluster.root,
            node_local=cluster.disk(rank),
            mirror=mirror,
            staging=ckpt.Staging(file_bytes=100_000, compression=options.pop("compression", None)),
            **options,
        ) as checkpointer,
    ):
        for order in orders:
            if isinstance(order, str):
                _wait(lambda order=order: cluster.has_copied(order))  # type: ignore[misc]
                torch.distributed.barrier()
                continue
            if isinstance(order, list):
                if rank == 0:
                    _wait(lambda order=order: order[-1] in copied, checkpointer.maybe_finalize)  # type: ignore[misc]
                _wait(lambda order=order: checkpointer.all_steps() == order)  # type: ignore[misc]
                torch.distributed.barrier()
                continue
            state = _state(rank, world_size, 0 if order is None else order)
            if order is not None:
                checkpointer.save(state, order)
                continue
            found = checkpointer.restore(state, strict=False)
            if found is None:
                result = None
                continue
            assert torch.equal(state["w"].full_tensor(), _FULL * float(found))
            assert state["step"] == found
            assert torch.equal(state["common"][0], torch.full((60_000,), float(found)))
            assert state["common"][1].item() == found
            report = checkpointer.last_restore
            assert report is not None
            result = found, report.mirror_files
    return result


def _on_one_node(rank: int, world_size: int, cluster: Cluster) -> None:
    mirror = ckpt.Mirror(cluster.mirror / "other", bandwidth=STALLED, close_timeout=timedelta(0))
    with ckpt.Checkpointer(cluster.root, node_local=cluster.disk(0), mirror=mirror) as checkpointer:
        checkpointer.save({"own": ckpt.PerRank(torch.full((100_000,), float(rank)))}, 8)


class _Stalled(Throttle):
    """Lets the first bytes pass, and says when it waits."""

    def __init__(self) -> None:
        self.stopping, self.waits = threading.Event(), threading.Event()
        super().__init__(STALLED, self.stopping)

    def pause(self, seconds: float) -> None:
        if seconds > 1:
            self.waits.set()
        super().pause(seconds)


def test_a_process_that_stops_in_the_middle_of_its_share_holds_up_no_copy(cluster: Cluster) -> None:
    """That of rank 1 has the lock of its share, and writes nothing; the files are on the node of rank 0, too."""
    run_ranks(_on_one_node, 2, cluster, timeout=60)
    root, mirror = open_root(cluster.root), open_root(cluster.mirror / "copies")
    mirror.make()
    token = root.owner_of(8)
    mirror.ownership.claim_as(token)
    source = NodePacks(str(cluster.disk(0)), root).source(8, root.source_of(8))
    stalled, ending = _Stalled(), threading.Event()
    stuck = StepCopy(source, mirror, token, stalled)
    copy = StepCopy(source, mirror, token, Throttle(None, ending), patience_s=0.5)

    def run(work: Callable[[], None]) -> None:
        with contextlib.suppress(StoppedError):
            work()

    helper = threading.Thread(target=run, args=(lambda: stuck.copy_share(1),))
    thread = threading.Thread(target=run, args=(lambda: copy.run(lambda: None),))
    helper.start()
    assert stalled.waits.wait(30)
    thread.start()
    thread.join(30)
    ended = not thread.is_alive()
    for event in (ending, stalled.stopping):
        event.set()
    for each in (thread, helper):
        each.join(30)
    assert ended, "it waits for the lock"
    assert mirror.steps() == [8]
    assert validate(str(cluster.mirror / "copies" / "step_00000008")).whole


def test_each_node_has_the_files_of_its_ranks_and_a_new_one_takes_them_from_the_mirror(cluster: Cluster) -> None:
    def check() -> None:
        common = sum(path.stat().st_size for path in (cluster.root / "step_00000001" / "packs").rglob("rank_*"))
        assert 240_000 < common < 250_000, "what both ranks have is in the root, once, and nothing else"
        for rank in (0, 1):
            names = {path.name[:10] for path in cluster.packs(rank)}
            assert names == {f"rank_{rank:05d}"}
            assert len(cluster.packs(rank)) > 2
        assert open_root(cluster.root).steps() == open_root(cluster.mirror).steps() == [1]
        assert validate(str(cluster.mirror / "step_00000001")).whole
        assert torch.equal(ckpt.load(cluster.mirror)["w"], _FULL)

    _, restored, again = cluster.play(2, Run(1), check, Run(None), lambda: cluster.replace(1), Run(None))
    assert restored == [(1, 0), (1, 0)], "all from the disks of the nodes"
    from_disk, from_mirror = again
    assert from_disk == (1, 0)
    assert from_mirror[0] == 1
    assert from_mirror[1] > 2


def test_a_step_whose_files_are_lost_is_not_taken_for_whole(cluster: Cluster) -> None:
    """The newest step was not copied when a node was lost: all ranks agree on the one before."""

    def lose() -> None:
        cluster.replace(1)
        assert open_root(cluster.mirror).steps() == [1]

    *_, before, after = cluster.play(
        2, Run(1), Run(None, 2, **_NOT_COPIED), Run(None, **_NOT_COPIED), lose, Run(None, 3, None)
    )
    assert before == [(2, 0), (2, 0)]
    assert after == [(3, 0), (3, 0)]
    assert open_root(cluster.root).steps() == [1, 3], "step 2 is of another branch"
    assert open_root(cluster.mirror).steps() == [1, 3]
    assert open_root(cluster.mirror).pending() == [], "the copy that cannot be completed was abandoned"
    with ckpt.open(cluster.mirror, 3) as step:
        assert step.summary["continues"]["step"] == 1


def test_all_steps_are_out_of_reach(cluster: Cluster) -> None:
    cluster.run(2, 2, **_NOT_COPIED)
    cluster.replace(0)
    results = run_ranks(_refused, 2, cluster, timeout=60)
    for result in results:
        assert "node0" in result.value
        assert "neither" in result.value
    assert open_root(cluster.root).steps() == [2]


def _refused(rank: int, world_size: int, cluster: Cluster) -> str:
    """Return why nothing can be restored. The state is as it was."""
    state = _state(rank, world_size, 7)
    mirror = ckpt.Mirror(cluster.mirror)
    with ckpt.Checkpointer(cluster.root, node_local=cluster.disk(rank), mirror=mirror) as checkpointer:
        with pytest.raises(CheckpointUnreachableError) as refused:
            checkpointer.restore(state)
        assert checkpointer.last_restore is None
    assert torch.equal(state["w"].full_tensor(), _FULL * 7.0)
    assert state["step"] == 7
    return str(refused.value)


def test_ranks_on_other_nodes(cluster: Cluster) -> None:
    restores = Run(None, **_NOT_COPIED)
    *_, swapped, back = cluster.play(
        2, Run(1), Run(None, 2, **_NOT_COPIED), cluster.swap, restores, cluster.swap, restores
    )
    for found, files in swapped:
        assert found == 1
        assert files > 2
    assert back == [(2, 0), (2, 0)]


def test_another_number_of_ranks(cluster: Cluster) -> None:
    cluster.run(2, 5)
    for world_size in (1, 3):
        results = cluster.run(world_size, None)
        assert {found for found, _ in results} == {5}
        assert all(files for _, files in results[1:]), "parts of what rank 0 wrote"
        assert world_size > 1 or results[0][1] > 0, "what rank 1 wrote"


def test_a_copy_that_is_not_complete_is_read_and_completed(cluster: Cluster) -> None:
    """The files of one node are in the mirror already, those of the other one are on its disk."""
    cluster.run(2, 1, "parts/000/rank_00000.json", bandwidth={1: STALLED}, close_s=0.0)
    assert open_root(cluster.mirror).steps() == []
    assert len(open_root(cluster.mirror).pending()) == 1
    cluster.replace(0)
    ((found, files), from_disk), _ = cluster.play(2, Run(None, close_s=0.0), Run(None, 2))
    assert found == 1
    assert files > 2
    assert from_disk == (1, 0)
    assert open_root(cluster.mirror).steps() == [1, 2]
    for step in (1, 2):
        assert validate(str(cluster.mirror / f"step_{step:08d}")).whole


def test_what_all_ranks_have(cluster: Cluster) -> None:
    """Is in the root, so nothing is lost with a node."""
    run_ranks(_replicated, 2, cluster, True, timeout=60)
    assert cluster.packs(0) == cluster.packs(1) == []
    for rank in (0, 1):
        cluster.replace(rank)
    run_ranks(_replicated, 2, cluster, False, timeout=60)


def _replicated(rank: int, world_size: int, cluster: Cluster, saves: bool) -> None:
    state = {"w": torch.arange(200_000.0) * saves, "v": torch.full((90_000,), 3.0 * saves)}
    mirror = ckpt.Mirror(cluster.mirror, bandwidth=STALLED, close_timeout=timedelta(0))
    with ckpt.Checkpointer(cluster.root, node_local=cluster.disk(rank), mirror=mirror) as checkpointer:
        if saves:
            checkpointer.save(state, 1)
            return
        assert checkpointer.restore(state) == 1
        report = checkpointer.last_restore
        assert report is not None
        assert report.mirror_files == 0
    assert torch.equal(state["w"], torch.arange(200_000.0))
    assert torch.equal(state["v"], torch.full((90_000,), 3.0))


def test_nodes_delete_what_is_removed(cluster: Cluster) -> None:
    def steps(rank: int) -> list[str]:
        return [name[:13] for name in cluster.saves(rank)]

    def check(step: str = "step_00000002") -> None:  # writers delete files after the step is published
        wait_until(lambda: steps(0) == steps(1) == [step], f"only {step}")

    options = {"keep": ckpt.Latest(1)}
    cluster.play(2, Run(1, [1], 2, [2], **options), check, Run(None, 4, [4], **options))
    check("step_00000004")


def test_leftovers_of_dead_saves(cluster: Cluster) -> None:
    """A node deletes what it has of saves that can never be published, and nothing else."""

    def leave() -> None:
        token = open_root(cluster.root).ownership.newest()
        for name in (
            f"step_00000002-o{token}-{'ab' * 8}",
            f"step_00000003-o{token + 10**9}-{'cd' * 8}",
            "of_another_program",
        ):
            (cluster.disk(0) / name / "packs").mkdir(parents=True)

    cluster.play(2, Run(1), leave, Run(None, 4))
    names = [path.name[:13] for path in sorted(cluster.disk(0).iterdir())]
    assert names == ["of_another_pr", "root.json", "step_00000001", "step_00000003", "step_00000004"]


def test_a_save_that_one_node_cannot_write(cluster: Cluster) -> None:
    """All ranks abandon it, its files are deleted on all nodes, and training goes on."""
    for result in run_ranks(_one_disk_fails, 2, cluster, timeout=100):
        assert "rank 1" in result.value
    assert open_root(cluster.root).steps() == [1, 3]
    assert [name[:13] for name in cluster.saves(0)] == ["step_00000001", "step_00000003"]


def _one_disk_fails(rank: int, world_size: int, cluster: Cluster) -> str:
    mirror = ckpt.Mirror(cluster.mirror, 100)
    with ckpt.Checkpointer(cluster.root, node_local=cluster.disk(rank), mirror=mirror) as checkpointer:
        checkpointer.save(_state(rank, world_size, 1), 1)
        torch.distributed.barrier()
        aside = cluster.disk(rank).with_suffix(".aside")
        if rank == 1:
            cluster.disk(rank).rename(aside)
        torch.distributed.barrier()
        with pytest.raises(ckpt.SaveAbandonedError) as abandoned:
            checkpointer.save(_state(rank, world_size, 2), 2)
        if rank == 1:
            aside.rename(cluster.disk(rank))
        torch.distributed.barrier()
        checkpointer.save(_state(rank, world_size, 3), 3)
    return str(abandoned.value)


def test_a_directory_of_another_root(cluster: Cluster, queue: ckpt.AsyncCallsQueue, tmp_path: Path) -> None:
    mirror = ckpt.Mirror(cluster.mirror)
    with ckpt.Checkpointer(cluster.root, node_local=cluster.disk(0), mirror=mirror, queue=queue) as checkpointer:
        checkpointer.save({"w": torch.ones(5)}, 1)
    before = cluster.saves(0)
    with (
        ckpt.Checkpointer(tmp_path / "other", node_local=cluster.disk(0), mirror=mirror, queue=queue) as checkpointer,
        pytest.raises(StorageError, match="pack files of the root"),
    ):
        checkpointer.save({"w": torch.ones(5)}, 1)
    assert cluster.saves(0) == before


@pytest.mark.parametrize("how", ["changed", "short", "unreadable"])
def test_damage_on_a_node(
    cluster: Cluster, queue: ckpt.AsyncCallsQueue, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.arange(100_000.0), "v": torch.ones(50_000)}
    options: dict[str, Any] = {"node_local": cluster.disk(0), "queue": queue}
    options["staging"] = ckpt.Staging(file_bytes=100_000)
    with ckpt.Checkpointer(cluster.root, mirror=ckpt.Mirror(cluster.mirror), **options) as checkpointer:
        checkpointer.save(state, 1)
    (save,) = cluster.saves(0)
    name = damage(cluster.disk(0) / save)
    path = next(cluster.disk(0).rglob(name))
    match how:
        case "short":
            path.write_bytes(path.read_bytes()[:5000])
        case "unreadable":
            path.unlink()
            path.mkdir()
    restored = {"w": torch.zeros(100_000), "v": torch.zeros(50_000)}
    with ckpt.Checkpointer(cluster.root, mirror=ckpt.Mirror(cluster.mirror), **options) as checkpointer:
        assert checkpointer.restore(restored) == 1
        report = checkpointer.last_restore
        assert report is not None
        assert report.mirror_files == 1
        assert report.damaged == ()
    assert torch.equal(restored["w"], state["w"])
    assert torch.equal(restored["v"], state["v"])
    assert f"{name} " in caplog.text
    shutil.rmtree(cluster.mirror)
    with (
        ckpt.Checkpointer(cluster.root, mirror=ckpt.Mirror(cluster.mirror), **options) as checkpointer,
        pytest.raises(ckpt.CheckpointCorruptError, match=name),
    ):
        checkpointer.restore(restored)


def test_compressed_files(cluster: Cluster) -> None:
    *_, restored = cluster.play(2, Run(1, compression="zstd"), lambda: cluster.replace(0), Run(None))
    (found, from_mirror), (also_found, from_disk) = restored
    assert found == also_found == 1
    assert from_mirror > 0 == from_disk


def test_the_mirror_is_away_and_comes_back(cluster: Cluster) -> None:
    def comes_back() -> None:
        assert open_root(cluster.root).steps() == [1, 2]
        cluster.mirror.unlink()

    cluster.mirror.write_text("not a directory")
    away = Run(1, 2, close_s=0.0), Run(None, close_s=0.0)
    _, without, _, restored = cluster.play(2, *away, comes_back, Run(None, 3), lambda: cluster.replace(0), Run(None))
    assert without == [(2, 0), (2, 0)]
    assert open_root(cluster.mirror).steps() == [3]
    assert restored[0][0] == 3


def test_it_is_not_known_whether_the_mirror_has_a_copy(cluster: Cluster) -> None:
    """Then no older step is taken."""
    cluster.run(2, 1, 2)
    shutil.rmtree(cluster.mirror)
    cluster.mirror.write_text("not a directory")
    cluster.replace(1)
    for result in run_ranks(_fails, 2, cluster, timeout=60):
        assert "StorageError" in result.value
        assert str(cluster.mirror) in result.value


def _fails(rank: int, world_size: int, cluster: Cluster) -> str:
    mirror = ckpt.Mirror(cluster.mirror, close_timeout=timedelta(0))
    with (
        ckpt.Checkpointer(cluster.root, node_local=cluster.disk(rank), mirror=mirror) as checkpointer,
        pytest.raises(ckpt.CheckpointError) as failed,
    ):
        checkpointer.restore(_state(rank, world_size, 0))
    return f"{type(failed.value).__name__} {failed.value}"


def test_arguments(cluster: Cluster) -> None:
    disk, mirror = cluster.disk(0), ckpt.Mirror(cluster.mirror)
    export = ckpt.ExportOptions(cluster.root.parent / "export", every=1)
    with pytest.raises(ValueError, match="needs a mirror"):
        ckpt.Checkpointer(cluster.root, node_local=disk)
    with pytest.raises(ValueError, match="export"):
        ckpt.Checkpointer(cluster.root, node_local=disk, mirror=mirror, export=export)
    with pytest.raises(ValueError, match="node_local"):
        ckpt.Checkpointer(cluster.root, node_local=disk, mirror=mirror, keep=1, staging=ckpt.Staging(reuse_files=True))
    with pytest.raises(StorageError, match="local path"):
        ckpt.Checkpointer(cluster.root, node_local="s3://bucket/x", mirror=mirror)


_KILLED = {
    ("both", "during write", 1, 2),
}


@pytest.mark.parametrize("cell", selected(_KILLED), ids=str)
def test_kill(cell: Cell, cluster: Cluster, tmp_path: Path) -> None:
    """The crash matrix, with all ranks on one node: afterwards it has the files of published steps only."""
    if cell.reuse:
        pytest.skip("no files are reused on nodes")
    mirror = ckpt.Mirror(cluster.mirror, close_timeout=timedelta(0))
    play(cell, tmp_path, (cluster.root, cluster.root), node_local=cluster.disk(0), mirror=mirror)
    assert set(cluster.saves(0)) == set(open_root(cluster.root).saves().values())
    for step in open_root(cluster.mirror).steps():
        assert validate(str(cluster.mirror / f"step_{step:08d}")).whole


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=full_only)])
def test_kill_of_the_process_that_copies(cluster: Cluster, victim: int) -> None:
    run_ranks(_kills_the_process, 2, cluster, victim, timeout=80)
    assert open_root(cluster.mirror).steps() == [0, 1]
    assert validate(str(cluster.mirror / "step_00000001")).whole


def _kills_the_process(rank: int, world_size: int, cluster: Cluster, victim: int) -> None:
    """Kill the process that copies for `victim`, in a copy that the other process cannot complete meanwhile."""
    mirror = ckpt.Mirror(cluster.mirror, bandwidth=3e5, close_timeout=timedelta(seconds=60))
    disk, barrier = cluster.disk(rank), torch.distributed.barrier
    with ckpt.Checkpointer(
        cluster.root, node_local=disk, mirror=mirror, staging=ckpt.Staging(file_bytes=100_000)
    ) as checkpointer:
        checkpointer.save({"own": ckpt.PerRank(torch.ones(5))}, 0)
        _wait(lambda: open_root(cluster.mirror).steps() == [0])
        process = mirror_process()
        if rank == 1:
            process.suspend()
        barrier()
        checkpointer.save(_state(rank, world_size, 1), 1)
        _wait(lambda: cluster.has_copied("packs/000/rank_00000_000"))
        if rank == 0:
            process.kill() if victim == 0 else process.suspend()
        barrier()
        if rank == 1:
            process.resume()
        if victim == 1:
            _wait(lambda: cluster.has_copied("packs/000/rank_00001_000"))
            if rank == 1:
                process.kill()
            barrier()
            if rank == 0:
                process.resume()


def test_after_a_fault(cluster: Cluster, queue: ckpt.AsyncCallsQueue) -> None:
    """A rank restores alone, also when its staging memory is lost and its disk was emptied."""
    model = {"w": torch.arange(100_000.0)}
    options: dict[str, Any] = {"node_local": cluster.disk(0), "queue": queue}
    options["staging"] = ckpt.Staging(file_bytes=100_000)
    with ckpt.Checkpointer(cluster.root, mirror=ckpt.Mirror(cluster.mirror), **options) as checkpointer:
        checkpointer.save({"m": model}, 1)
    for lost in (False, True):
        if lost:
            cluster.replace(0)
        with ckpt.Checkpointer(cluster.root, mirror=ckpt.Mirror(cluster.mirror), **options) as checkpointer:
            model["w"].zero_()
            checkpointer.register(m=model)
            checkpointer.bridge.recover_from_fault(None, 0)
            report = checkpointer.last_restore
            assert report is not None
            assert (report.step, report.mirror_files > 0) == (1, lost)
        assert torch.equal(model["w"], torch.arange(100_000.0))
