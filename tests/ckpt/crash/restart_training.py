"""A short deterministic training under the restart wrapper, and somebody who makes it fail as planned.

Every rank writes what it sees to `<folder>/rank_<initial rank>.jsonl`.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt.async_calls import WriterConfig
from ckpt.engine import restores as restores_module
from ckpt.errors import CheckpointError
from ckpt.restart import CheckpointAbort, CheckpointFinalize, CheckpointInitialize
from ckpt.saving import replicator
from ckpt.saving import save as save_module
from ckpt.saving import stage as stage_module
from ckpt.saving.memory_tier import MemoryTier
from ckpt.saving.share import HEADER_BYTES, Share
from ckpt.saving.snapshot_counts import SnapshotCounts
from ckpt.saving.staged_memory import StagedMemory
from ckpt.staging.copy_table import Copies
from ckpt.storage.names import parse_save_name
from ckpt.storage.ownership import Ownership
from inprocess.abort import AbortTorchDistributed
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from tests.ckpt.crash.fault_plan import IN_TRAINING, Fault, Job
from tests.inprocess.restarting import UNBOUNDED

_SAVE_EVERY = 2
_SHAPE = (64, 96)
_TENSORS = 3


class InjectedError(Exception):
    """Something that can go wrong anywhere."""


# -- the training ------------------------------------------------------------------------------------------------------


def fresh(rank: int) -> dict[str, Any]:
    """The state before the first step."""
    weights = {f"w{i}": torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE) * (i + 1) for i in range(_TENSORS)}
    return {
        "weights": weights,
        "momentum": {name: torch.zeros_like(tensor) for name, tensor in weights.items()},
        "own": ckpt.PerRank({"rng": torch.Generator().manual_seed(1000 + rank).get_state(), "noise": torch.zeros(50)}),
    }


def reset(state: dict[str, Any], rank: int) -> None:
    """As `fresh`, in place."""
    new = fresh(rank)
    for kind in ("weights", "momentum"):
        for name, tensor in new[kind].items():
            state[kind][name].copy_(tensor)
    for name, tensor in new["own"].value.items():
        state["own"].value[name].copy_(tensor)


def gradient(state: dict[str, Any], step: int) -> torch.Tensor:
    """This rank's, from its own random numbers."""
    own = state["own"].value
    generator = torch.Generator()
    generator.set_state(own["rng"])
    noise = torch.rand(_TENSORS, *_SHAPE, generator=generator)
    own["rng"].copy_(generator.get_state())
    own["noise"].copy_(noise[0, 0, :50])
    return noise * torch.stack([tensor.sin() for tensor in state["weights"].values()]) / step


def descend(state: dict[str, Any], gradients: list[torch.Tensor]) -> None:
    total = torch.stack(gradients).sum(0)
    for part, name in zip(total, state["weights"], strict=True):
        state["momentum"][name].mul_(0.9).add_(part)
        state["weights"][name].sub_(state["momentum"][name], alpha=0.01)


def digest(state: dict[str, Any]) -> str:
    tensors = [*state["weights"].values(), *state["momentum"].values(), *state["own"].value.values()]
    return hashlib.blake2b(b"".join(t.numpy().tobytes() for t in tensors), digest_size=8).hexdigest()


def simulate(world_size: int, steps: int) -> list[list[str]]:
    """The digests of every rank before the first step and after each, of training without faults."""
    states = [fresh(rank) for rank in range(world_size)]
    digests = [[digest(state) for state in states]]
    for step in range(1, steps + 1):
        gradients = [gradient(state, step) for state in states]
        for state in states:
            descend(state, gradients)
        digests.append([digest(state) for state in states])
    return digests


# -- how it fails ------------------------------------------------------------------------------------------------------


class Saboteur:
    """Fails on this rank what `faults` say. Places in the library that it must reach are patched."""

    def __init__(self, faults: tuple[Fault, ...], log: Callable[..., None], checkpointer: ckpt.Checkpointer) -> None:
        self.iteration, self.rank, self.offset = 0, 0, 0
        self.recovers = False  # in the finalize hook: who hangs there is killed, and the plan may count on him
        self._faults = list(faults)
        self._log = log
        self._checkpointer = checkpointer
        self._slots: list[SharedMemory] = []
        self._remember_slots()
        self._patch(stage_module, "stage", "staging", after_some=True)
        self._patch(save_module, "settle", "drain")
        self._patch(save_module.Saver, "settle_all", "drain")
        self._patch(restores_module, "restore", "restore")
        self._patch(SnapshotCounts, "count", "count")
        self._patch(MemoryTier, "choose", "agreement")
        self._patch(StagedMemory, "fill", "copy-back")
        self._patch(MemoryTier, "settle", "settle")

    def begin(self, iteration: int, rank: int) -> None:
        self.iteration, self.rank, self.offset, self.recovers = iteration, rank, 0, False
        self._limit_files(resource.RLIM_INFINITY)

    def at(self, moment: str) -> None:
        for fault in list(self._faults):
            if (fault.iteration, fault.rank, fault.moment) == (self.iteration, self.rank, moment) and (
                self.offset >= fault.offset
            ):
                if self.recovers and fault.kind == "hang" and moment in IN_TRAINING:
                    continue
                self._faults.remove(fault)
                self._log("fault", fault=str(fault))
                self._fail(fault)

    def _fail(self, fault: Fault) -> None:
        if fault.kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "os-exit":
            os._exit(3)
        elif fault.kind == "hang":
            time.sleep(600)
        elif fault.kind == "exception":
            raise InjectedError(str(fault))
        elif fault.kind == "damage":
            self._damage(random.Random(str(fault)))
        elif fault.kind == "disk-full":
            self._limit_files(0)
        else:
            for process in self._processes(fault.kind.split("-")[0]):
                process.send_signal(signal.SIGSTOP if fault.kind == "writer-stopped" else signal.SIGKILL)

    def _limit_files(self, nbytes: int) -> None:
        """Let the writers of this rank write files of this size only."""
        for process in self._processes("writer"):
            with contextlib.suppress(psutil.Error):
                process.rlimit(psutil.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    def _damage(self, choose: random.Random) -> None:
        """Change a byte of what this rank has kept last, once no writer reads it any more."""
        with contextlib.suppress(CheckpointError):
            self._checkpointer.maybe_finalize(blocking=True)
        slots = [Share(region) for region in self._slots if not region.closed]
        saves = {share: parse_save_name(share.save_name or "") for share in slots if share.is_whole}
        steps = {share: save.step for share, save in saves.items() if save is not None}
        if steps:
            share = max(steps, key=steps.__getitem__)
            self._log("damaged", step=steps[share], iteration=self.iteration)
            share.region.buffer[choose.randrange(share.region.size - HEADER_BYTES)] ^= 1 << choose.randrange(8)

    def _processes(self, which: str) -> Iterator[psutil.Process]:
        for process in psutil.Process().children(recursive=True):
            try:
                name = process.name()
            except psutil.Error:
                continue
            if which == {"ckpt-writer": "writer", "ckpt-replicas": "replica", "ckpt-keeper": "keeper"}.get(name):
                yield process

    def _remember_slots(self) -> None:
        create = SharedMemory.create

        def created(name: str, size: int) -> SharedMemory:
            region = create(name, size)
            self._slots = [region, *(other for other in self._slots if not other.closed)]
            return region

        SharedMemory.create = created  # type: ignore[method-assign, assignment]

    def _patch(self, where: Any, name: str, moment: str, after_some: bool = False) -> None:
        original = getattr(where, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            if after_some:
                original(Copies.of(args[0].ops[:2]), *args[1:], **kwargs)
            self.at(moment)
            return original(*args, **kwargs)

        setattr(where, name, patched)


# -- one rank ----------------------------------------------------------------------------------------------------------


def run(rank: int, world_size: int, job: Job, folder: Path) -> str | None:
    """A rank, active or spare, until the training is over. Returns the digest of the final state."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the parent that forked it
    stream = (folder / f"rank_{rank}.jsonl").open("a", buffering=1)

    def log(event: str, **more: Any) -> None:
        stream.write(json.dumps({"event": event, **more}) + "\n")

    queue = ckpt.AsyncCallsQueue(config=WriterConfig(writer_timeout_s=4.0))
    snapshots = ckpt.Snapshots(1) if job.snapshots else None
    if job.replicas:
        snapshots = ckpt.Snapshots(1, replicas=1, place=f"place {rank % 2}", host="127.0.0.1")
        replicator._LINGER_S = 1.0  # the test waits for the end of all processes
    checkpointer = ckpt.Checkpointer(folder / "root", queue=queue, timeout=timedelta(seconds=30), snapshots=snapshots)
    state = fresh(rank)
    if job.registered:
        checkpointer.register(**state)
    saboteur = Saboteur(job.faults, log, checkpointer)
    trainer = _Trainer(job, checkpointer, state, saboteur, log)
    hangs = any(fault.kind == "hang" for fault in job.faults)
    wrapper = inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        initialize=CheckpointInitialize(checkpointer, timedelta(seconds=20)) if job.snapshots else None,
        finalize=_Finalize(checkpointer, trainer, job.on_fault),
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(job.active), ShiftRanks()),
        soft_timeout=timedelta(seconds=2 if hangs else 25),
        hard_timeout=timedelta(seconds=50),
        last_call_wait=timedelta(seconds=0.1),
        progress_watchdog_interval=timedelta(seconds=0.1),
        monitor_thread_interval=timedelta(seconds=0.2),
        monitor_process_interval=timedelta(seconds=0.2),
        **UNBOUNDED,
    )
    try:
        return wrapper(trainer)()
    finally:
        checkpointer.close()
        queue.close(abort=True)


class _Finalize(CheckpointFinalize):
    def __init__(self, checkpointer: ckpt.Checkpointer, trainer: "_Trainer", on_fault: str) -> None:
        longest = {"drain_timeout": timedelta(seconds=20)} if on_fault == "drain" else {}
        super().__init__(checkpointer, on_fault, **longest)  # type: ignore[arg-type]
        self._trainer = trainer

    def __call__(self, state: Any) -> Any:
        self._trainer.recovers()
        result = super().__call__(state)
        self._trainer.recovered(state)
        return result


class _Trainer:
    """The wrapped function."""

    def __init__(
        self,
        job: Job,
        checkpointer: ckpt.Checkpointer,
        state: dict[str, Any],
        saboteur: Saboteur,
        log: Callable[..., None],
    ) -> None:
        self._job = job
        self._checkpointer = checkpointer
        self._state = state
        self._saboteur = saboteur
        self._log = log
        self._finalized: list[int] = []

    def recovers(self) -> None:
        """The finalize hook of the library begins: it runs the finalize functions of saves that it drains."""
        self._saboteur.recovers = True

    def recovered(self, state: Any) -> None:
        """In the finalize hook, after what the library does."""
        report = self._checkpointer.last_restore
        self._log(
            "recovered",
            iteration=state.iteration,
            owner=Ownership(self._checkpointer.root).newest(),
            rank=state.active_rank,
            resume=self._checkpointer.resume_step,
            steps=self._checkpointer.all_steps(),
            digest=digest(self._state),
            memory=report and report.own_memory_bytes + report.neighbour_memory_bytes,
            storage=report and report.storage_bytes,
            pending=self._checkpointer.queue.get_num_unfinalized_calls(),
        )
        self._saboteur.at("restored")

    def __call__(self, call: inprocess.CallWrapper | None = None) -> str:
        assert call is not None
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        checkpointer, state, saboteur = self._checkpointer, self._state, self._saboteur
        saboteur.begin(call.iteration, rank)
        dist.init_process_group("gloo", store=dist.PrefixStore("pg", call.store), rank=rank, world_size=world_size)
        # With snapshots the ranks have agreed before; every third job lets them do it again here.
        again = self._job.seed.removesuffix("-snapshots")[-1] in "258" if self._job.snapshots else self._job.kills
        all_ask = call.iteration == 0 or again or not self._job.registered
        step = checkpointer.restore(state) if all_ask else checkpointer.resume_step
        if step is None:
            reset(state, rank)
        self._log("begin", iteration=call.iteration, rank=rank, step=step, digest=digest(state), held=held())
        for current in range((step or 0) + 1, self._job.steps + 1):
            call.ping()
            saboteur.offset += 1
            self._step(current, world_size)
        while not self._maybe_finalize(blocking=True):
            call.ping()
        saboteur.at("finalize-fn")
        dist.destroy_process_group()
        return digest(state)

    def _step(self, step: int, world_size: int) -> None:
        saboteur = self._saboteur
        own = gradient(self._state, step)
        if saboteur.offset == 1:
            saboteur.offset = 99
            saboteur.at("first-step")
            saboteur.offset = 1
        saboteur.at("step")
        gradients = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(gradients, own)
        descend(self._state, gradients)
        saboteur.at("maybe-finalize")
        self._maybe_finalize(blocking=False)
        if step % _SAVE_EVERY == 0:
            self._save(step)
        if self._job.snapshots and (step % _SAVE_EVERY or self._job.twice):
            saboteur.at("snapshot")
            self._checkpointer.snapshot(self._state, step)
        if self._job.snapshots:
            self._log("kept", step=step, iteration=saboteur.iteration)

    def _save(self, step: int) -> None:
        request = self._checkpointer.save_request(self._state, step)
        request.add_finalize_fn(lambda: self._finalize(step))
        self._saboteur.at("between")
        self._checkpointer.queue.schedule_async_request(request)
        self._saboteur.at("scheduled")

    def _finalize(self, step: int) -> None:
        self._log("finalized", step=step, published=step in self._checkpointer.all_steps())
        self._saboteur.at("finalize-fn")

    def _maybe_finalize(self, blocking: bool) -> bool:
        try:
            self._checkpointer.maybe_finalize(blocking=blocking)
        except CheckpointError as error:
            self._log("save failed", error=str(error))
            return False
        return True


def held() -> dict[str, Any]:
    """What this process holds of the library, counted.

    Until a thread has prepared the next save, there are the slots of the neighbours of now and of before.
    """
    for name in ("ckpt-plan", "ckpt-unmap"):  # the first starts the second
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join(5)
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(links),
        "regions": sorted(link.split(":")[1].split()[0] for link in links if "memfd:ckpt" in link),
        "mappings": sum("memfd:ckpt" in line for line in maps),
        "children": len(psutil.Process().children()),
    }
