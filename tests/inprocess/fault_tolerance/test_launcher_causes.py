"""The cause for which workers have ended, in the log of their launcher."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from inprocess.fault_classes import FaultClass
from inprocess.fault_tolerance.launcher.worker_causes import cause_of_failures
from inprocess.process_end import KernelEvidence
from tests.inprocess.fault_tolerance.launching import Job
from tests.support.memory_groups import EATS_MEMORY, memory_group


@pytest.mark.parametrize(
    ("codes", "rank", "expected"),
    [
        ({0: -15, 1: 1, 2: -9}, 2, FaultClass.UNKNOWN),
        ({0: -15, 1: 1}, 1, FaultClass.USER_CODE),
        ({0: -15, 1: -15}, 0, FaultClass.PREEMPTED),
        ({3: 0}, 3, FaultClass.USER_CODE),
        ({0: -6, 1: -11}, 0, FaultClass.USER_CODE),
    ],
)
def test_which_worker_was_first(codes: dict[int, int], rank: int, expected: FaultClass) -> None:
    failures = {each: ProcessFailure(each, os.getpid(), code, "") for each, code in codes.items()}
    cause = cause_of_failures(failures, KernelEvidence(os.getpid()))
    assert (cause.rank, cause.fault_class) == (rank, expected)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("RuntimeError: something", FaultClass.USER_CODE),
        ({"message": "KeyError: 'x'"}, FaultClass.DATA),
        ({"message": "OSError: [Errno 28] No space left on device"}, FaultClass.STORAGE),
    ],
)
def test_what_a_worker_has_recorded(message: Any, expected: FaultClass, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    if isinstance(message, dict):
        frames = ["/home/x/train.py", "/x/torch/utils/data/_utils/fetch.py", "/home/x/records.py"]
        stack = "Traceback (most recent call last):\n" + "".join(f'  File "{each}", line 3, in f\n' for each in frames)
        message = {**message, "extraInfo": {"py_callstack": stack, "timestamp": "1763725470"}}
    file.write_text(json.dumps({"message": message, "timestamp": "1763725470"}))
    cause = cause_of_failures({4: ProcessFailure(0, os.getpid(), 1, str(file))}, KernelEvidence(os.getpid()))
    assert cause.fault_class is expected
    assert cause.text.startswith("exit code 1: ")


def test_a_record_of_an_error_that_is_not_whole_does_not_end_the_launcher(job: Job) -> None:
    """The disk is full, or the worker was killed meanwhile."""
    script = """
        if cycle == 0:
            if rank == 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                file.write('{"mess')
            others("written")
            if rank == 1:
                hang()
            sys.exit(3)
    """
    launcher = job.one_node(script, "--workers-stop-timeout=1", ranks=2)
    assert launcher.wait() == 0, launcher.log()
    assert "rank 0 was first: exit code 3" in launcher.log(), "the launcher has killed the other"


def test_one_traceback_and_one_cause_of_a_fault_that_all_ranks_have(job: Job) -> None:
    script = """
        import inprocess

        def train(call: inprocess.CallWrapper):
            others(f"here{call.iteration}")
            if call.iteration == 0:
                raise ValueError(f"of rank {rank}")
            say("cause", call.cause.fault_class.value)

        inprocess.Wrapper(abort=None)(train)()
    """
    launcher = job.one_node(script, ranks=3, with_torch=True)
    assert launcher.wait() == 0, launcher.log()
    assert job.events().count("cause user code") == 3
    log = launcher.log()
    assert log.count("Traceback (most recent call last)") == 1
    (line,) = [each for each in log.splitlines() if "cause of the restart" in each]
    assert "user code: rank " in line
    assert "ValueError: of rank " in line


def test_a_worker_that_the_kernel_has_killed_for_lack_of_memory(job: Job) -> None:
    with memory_group(1 << 30) as group:
        script = f"""
            if cycle == 0:  # the next cycle begins in the group
                for pid in (os.getppid(), os.getpid()):
                    open("{group.path}/cgroup.procs", "w").write(str(pid))
                sys.exit(3)
            open("/proc/self/oom_score_adj", "w").write("1000")
            if cycle == 1:
                {EATS_MEMORY}
            say("end")
        """
        launcher = job.one_node(script, restarts=2)
        assert launcher.wait() == 0
        first, second = re.findall(r"cause: (.*)", launcher.log())
        assert first.startswith("user code: rank 0 was first: exit code 3; host ")
        assert second.startswith("out of memory: rank 0 was first: SIGKILL; host ")
        assert "the kernel has killed 1 of " in second
        assert "reduce what the process holds" in second
