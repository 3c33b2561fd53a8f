"""The table of classes: what a fault looks like, and what it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import DistNetworkError
from torch.utils.data import DataLoader, Dataset

from ckpt.errors import CheckpointCorruptError, StateError, StorageError, WriterError
from inprocess.attribution import Cause, Interruption, InterruptionRecord, cause_of
from inprocess.exception import HealthCheckError
from inprocess.fault_classes import ADVICE, FaultClass, Symptoms, class_of
from inprocess.repetition import fault_names

OOM, NETWORK, DATA = FaultClass.OUT_OF_MEMORY, FaultClass.NETWORK, FaultClass.DATA
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=7, name=python"


@pytest.mark.parametrize(
    ("symptoms", "expected"),
    [
        (Symptoms("death", end="SIGKILL", oom=True), OOM),
        (Symptoms("death", end="", oom=True), OOM),
        (Symptoms("death", end="SIGTERM", oom=True), FaultClass.PREEMPTED),
        (Symptoms("death", end="SIGKILL"), FaultClass.UNKNOWN),
        (Symptoms("death", end="SIGBUS"), OOM),
        (Symptoms("death", end="SIGTERM"), FaultClass.PREEMPTED),
        (Symptoms("death", end="SIGSEGV"), FaultClass.USER_CODE),
        (Symptoms("death", end="exit code 1"), FaultClass.USER_CODE),
        (Symptoms("death"), FaultClass.UNKNOWN),
        (Symptoms("death", XID.format(79), end="SIGKILL"), FaultClass.HARDWARE),
        (Symptoms("death", XID.format(31), end="SIGABRT"), FaultClass.USER_CODE),
        (Symptoms("lost node"), FaultClass.HARDWARE),
        (Symptoms("unfit node", "gpu: GPU 0: cannot be queried: out of memory"), FaultClass.HARDWARE),
        (Symptoms("unfit node", "command: too hot (exit code 1)"), FaultClass.HARDWARE),
        (Symptoms("unfit node", "storage /data: writing /data/x: No space left on device"), FaultClass.STORAGE),
        (Symptoms("unfit node", "shared mounts: /home: Stale file handle"), FaultClass.STORAGE),
        (Symptoms("unfit node", "network: no transfer with nodes 0, 1 has worked"), FaultClass.NETWORK),
        (Symptoms("hang"), FaultClass.UNKNOWN),
        (Symptoms("hang", files="/home/x/train.py /home/x/main.py"), FaultClass.USER_CODE),
        (Symptoms("hang", files="/usr/lib/queue.py /x/torch/utils/data/dataloader.py /home/x/train.py"), DATA),
        (Symptoms("hang", files="/x/ckpt/storage/commit.py /home/x/train.py"), FaultClass.STORAGE),
        (Symptoms("hang in a collective", files="/x/torch/distributed/distributed_c10d.py"), NETWORK),
    ],
)
def test_what_is_seen_from_outside(symptoms: Symptoms, expected: FaultClass) -> None:
    assert class_of(symptoms) is expected


def _raise(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


class _Records(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(f"record {index}")

    def __len__(self) -> int:
        return 4


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or there was a network error"
GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (_raise(ValueError("x")), FaultClass.USER_CODE),
        (lambda: torch.zeros(2) + torch.zeros(3), FaultClass.USER_CODE),
        (_raise(StateError("a leaf has an unknown type")), FaultClass.USER_CODE),
        (_raise(MemoryError()), OOM),
        (_raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")), OOM),
        (lambda: torch.empty(1 << 55, dtype=torch.uint8), OOM),
        (
            _raise(
                RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is out of shared memory")
            ),
            OOM,
        ),
        (lambda: next(iter(DataLoader(_Records()))), DATA),
        (lambda: next(iter(DataLoader(_Records(), num_workers=1))), DATA),
        (_raise(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")), DATA),
        (_raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/x")), FaultClass.STORAGE),
        (_raise(StorageError("/data/run7 is not a directory")), FaultClass.STORAGE),
        (_raise(CheckpointCorruptError("bytes are missing")), FaultClass.STORAGE),
        (
            _raise(_caused(RuntimeError("the save failed"), OSError(errno.EIO, os.strerror(errno.EIO)))),
            FaultClass.STORAGE,
        ),
        (_raise(ExceptionGroup("tasks", [OSError(errno.ESTALE, os.strerror(errno.ESTALE))])), FaultClass.STORAGE),
        (_raise(WriterError("the writer process has ended")), FaultClass.UNKNOWN),
        (_raise(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")), NETWORK),
        (_raise(DistNetworkError("The client socket has timed out")), NETWORK),
        (_raise(RuntimeError(GLOO)), NETWORK),
        (_raise(RuntimeError(NCCL)), NETWORK),
        (_raise(ValueError("connection closed by peer")), FaultClass.USER_CODE),
        (_raise(RuntimeError("CUDA error: uncorrectable ECC error encountered")), FaultClass.HARDWARE),
        (_raise(RuntimeError("CUDA error: device-side assert triggered")), FaultClass.USER_CODE),
        (_raise(HealthCheckError("GPU 3 is unfit")), FaultClass.HARDWARE),
        (_raise(KeyboardInterrupt()), FaultClass.PREEMPTED),
        (_raise(RuntimeError("stopped by SIGTERM")), FaultClass.PREEMPTED),
    ],
)
def test_exceptions(act: Callable[[], Any], expected: FaultClass) -> None:
    try:
        act()
    except BaseException as error:
        record = InterruptionRecord.of_exception(error, 0, Interruption.EXCEPTION)
    assert record.fault_class is expected, record.summary


def test_every_class_has_advice_in_one_sentence() -> None:
    assert set(ADVICE) == set(FaultClass)
    assert all(text and "." not in text.replace("ckpt.", "") for text in ADVICE.values() if "/dev" not in text)


def _record(rank: int, fault_class: FaultClass, text: str = "ValueError: x", **more: Any) -> InterruptionRecord:
    kind = more.pop("interruption", Interruption.EXCEPTION)
    return InterruptionRecord(rank, kind, text, place="a.py:3 in f", fault_class=fault_class, **more)


def test_the_cause_is_the_first_fault_that_is_no_consequence() -> None:
    lost = [_record(rank, NETWORK, f"RuntimeError: {GLOO}") for rank in (2, 0)]
    died = _record(
        1, OOM, "process 7 died: SIGKILL", interruption=Interruption.TERMINATED, evidence=("host a", "oom_kill 1")
    )
    later = _record(3, FaultClass.USER_CODE, "KeyError: 'y'")
    cause = cause_of([*lost, died, later])
    assert cause == Cause(
        1, OOM, "process 7 died: SIGKILL (a.py:3 in f)", ADVICE[OOM], ("host a", "oom_kill 1"), (0, 2)
    )
    assert str(cause) == (
        "out of memory: rank 1 was first: process 7 died: SIGKILL (a.py:3 in f); host a; oom_kill 1; "
        f"then rank 0,2 lost the connection; {ADVICE[OOM]}"
    )
    first = cause_of(lost)
    assert first is not None
    assert (first.rank, first.fault_class, first.followed) == (2, NETWORK, ())
    waits = _record(0, NETWORK, "no progress", interruption=Interruption.SOFT_TIMEOUT)
    assert cause_of([waits, later]) == cause_of([later, waits]) == cause_of([later])


def test_a_restart_that_takes_in_processes_has_no_cause() -> None:
    joins = InterruptionRecord(5, Interruption.NEWCOMER, "is ready")
    assert cause_of([]) is None
    assert cause_of([joins]) is None


def test_only_what_the_program_does_again_is_the_same_fault() -> None:
    ended, devices = FaultClass.PREEMPTED, FaultClass.HARDWARE
    assert fault_names([_record(1, ended)]) == []
    assert fault_names([_record(1, FaultClass.USER_CODE)]) == fault_names([_record(2, FaultClass.USER_CODE)])
    assert fault_names([_record(1, devices)]) == fault_names([_record(1, devices, "ValueError: y")])
    assert fault_names([_record(1, devices)]) != fault_names([_record(2, devices)])
