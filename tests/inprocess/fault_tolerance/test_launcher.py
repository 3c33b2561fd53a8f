"""`ckpt_launcher` on one node, with real workers."""

import os
import signal
from pathlib import Path

from tests.inprocess.fault_tolerance.launching import Job
from tests.support.selection import full_only


def test_a_job_without_faults(job: Job) -> None:
    script = """
        say("sockets", os.path.exists(os.environ["FT_RANK_MONITOR_IPC_SOCKET"]),
            os.path.exists(os.environ["FT_LAUNCHER_IPC_SOCKET"]))
    """
    launcher = job.one_node(script, ranks=2)
    assert launcher.wait() == 0
    assert sorted(job.events().splitlines()) == [f"cycle 0 rank {rank} sockets True True" for rank in (0, 1)]
    assert job.left() == []


def test_the_directory_for_temporary_files_may_have_a_long_path(job: Job) -> None:
    folder = job.folder / ("a" * 120)
    folder.mkdir()
    script = """
        client = monitored()
        from inprocess.fault_tolerance import WorkloadAction, WorkloadControlRequest
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue, "arrives"))
        with client.section("step"):
            if cycle == 0:
                hang()
    """
    options = ["--standalone", "--max-restarts=1", "--ft-rank-section-timeouts=step:0.5"]
    launcher = job.launch(script, *options, env={"TMPDIR": str(folder)})
    assert launcher.wait() == 0
    assert "arrives" in launcher.log()
    assert job.left() == []


def test_a_worker_that_hangs_in_a_section_is_killed_and_all_start_again(job: Job) -> None:
    script = """
        client = monitored()
        say("limits", client.section_timeouts.section["step"], client.section_timeouts.out_of_section)
        others("there")
        with client.section("step"):
            if cycle == 0 and rank == 1:
                hang()
        if cycle == 0:
            hang()
        say("end")
    """
    launcher = job.one_node(script, "--ft-rank-section-timeouts=step:1,other:null", ranks=2)
    assert launcher.wait() == 0
    assert "cycle 1 rank 0 end" in job.events()
    assert "cycle 1 rank 1 end" in job.events()
    assert "cycle 0 rank 0 end" not in job.events()
    assert job.events().count("limits 1.0 None") == 4
    assert "rank 1 with -9" in launcher.log()
    assert "cycle 1" in launcher.log(), "the monitors know the cycle"


@full_only  # with the client alone: test_a_rank_is_not_watched_while_its_interpreter_exits
def test_a_worker_may_take_longer_than_its_limit_to_exit(job: Job) -> None:
    script = """
        import atexit, time
        def last():
            begin = time.monotonic()
            while time.monotonic() < begin + 4:
                time.sleep(0.1)
            say("end")
        atexit.register(last)
        monitored()
        sys.exit(0)
    """
    launcher = job.one_node(script, "--ft-initial-rank-heartbeat-timeout=3", restarts=0)
    assert launcher.wait() == 0
    assert "end" in job.events()


def test_exhausted_restarts_end_with_1(job: Job) -> None:
    launcher = job.one_node("say('runs'); sys.exit(7)", restarts=2)
    assert launcher.wait() == 1
    assert job.events().splitlines() == [f"cycle {cycle} rank 0 runs" for cycle in range(3)]
    assert "exitcode  : 7" in launcher.log(), "torch's own report of the failure"


def test_a_monitor_that_is_killed_is_replaced_and_the_next_one_watches(job: Job) -> None:
    script = """
        client = monitored()
        if cycle == 0:
            say("is watched")
            while not os.path.exists(os.environ["TEST_EVENTS"] + ".go"):
                time.sleep(0.02)
            client.start_section("step")
            hang()
    """
    launcher = job.one_node(script, "--ft-rank-section-timeouts=step:0.5")
    job.wait_event("is watched")
    (monitor,) = launcher.monitors()
    monitor.kill()
    launcher.wait_log("the monitor of local rank 0 has ended")
    Path(f"{job.events_file}.go").touch()
    assert launcher.wait() == 0
    assert "rank 0 with -9" in launcher.log(), "the second monitor has killed the worker"


def test_a_worker_that_ignores_sigterm_is_killed_after_the_stop_timeout(job: Job) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        others("ready")
        if cycle == 0 and rank == 0:
            sys.exit(3)
        if cycle == 0:
            hang()
    """
    launcher = job.one_node(script, "--workers-stop-timeout=0.5", ranks=2)
    assert launcher.wait() == 0
    assert "workers 1 (pid" in launcher.log()
    assert "have not ended within 0.5 s and are killed" in launcher.log()


GRACEFUL = """
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    child = subprocess.Popen(["sleep", "1000"])
    say("trains")
    while not stopping.wait(0.05):
        pass
    say("saved; its child runs:", child.poll() is None)
    sys.exit(0)
"""


def test_workers_end_with_a_launcher_that_is_killed(job: Job) -> None:
    """Also what they have started, and workers that were started in the place of others."""
    script = """
        asked = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: say("asked") or asked.set())
        child = subprocess.Popen(["sleep", "600"])
        say("pid", os.getpid(), "child", child.pid)
        while rank == 0 or not asked.wait(0.1):
            time.sleep(0.1)
    """
    options = ["--ft-restart-policy=in-process", "--ft-termination-grace-time=2"]
    launcher = job.one_node(script, *options, ranks=3, restarts=0)
    job.wait_event("rank 0 pid")
    job.wait_event("rank 1 pid")
    os.kill(int(job.wait_event(r"rank 2 pid (\d+)")[1]), signal.SIGKILL)
    job.wait_event(r"rank 2 pid (?s:.*) rank 2 pid")
    launcher.wait_log("it joins at a restart of the others")
    launcher.signal(signal.SIGKILL)
    for rank in range(3):
        job.wait_event(f"rank {rank} asked")
    job.wait_for(lambda: str(job.left()), r"^\[\]$", 30)
    assert launcher.wait() == -signal.SIGKILL


def test_sigterm_lets_workers_finish_and_the_code_is_0(job: Job) -> None:
    launcher = job.one_node(GRACEFUL, ranks=2)
    for rank in (0, 1):
        job.wait_event(f"rank {rank} trains")
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 0
    assert job.events().count("saved; its child runs: True") == 2, "only the workers themselves get the signal"
    assert job.left() == [], "and what they leave behind is ended"


def test_sigterm_kills_workers_that_do_not_end(job: Job) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("trains")
        hang()
    """
    launcher = job.one_node(script, "--term-timeout=0.5", "--workers-stop-timeout=0.5", restarts=5)
    job.wait_event("trains")
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGTERM
    assert job.left() == []
    assert job.events().splitlines() == ["cycle 0 rank 0 trains"], "no restart follows"


def test_what_a_worker_leaves_behind_is_ended_but_not_what_has_a_session_of_its_own(job: Job) -> None:
    script = """
        stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
        def start(**options):
            process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, **options)
            process.stdout.readline()
            return process.pid
        def runs(pid):
            try:
                return open(f"/proc/{pid}/stat").read().rpartition(") ")[2][0] != "Z"
            except FileNotFoundError:
                return False
        marks = os.environ["TEST_EVENTS"] + ".pids"
        if cycle == 0:
            pids = [start(), start(process_group=0), start(start_new_session=True)]
            open(marks, "w").write(" ".join(map(str, pids)))
            sys.exit(1)
        say(*(runs(int(pid)) for pid in open(marks).read().split()))
    """
    launcher = job.one_node(script, "--ft-check-remaining-processes=true")
    assert launcher.wait() == 0
    assert job.events().splitlines() == ["cycle 1 rank 0 False False True"]
    assert "ending processes that workers have left behind" in launcher.log()
    assert "processes of ended workers that still run" in launcher.log()
    (writer,) = job.left()
    assert os.getsid(writer.pid) == writer.pid


def test_a_writer_of_checkpoints_finishes_when_its_trainer_was_killed(job: Job) -> None:
    script = """
        from pathlib import Path
        from ckpt.async_calls import AsyncCallsQueue, AsyncRequest
        folder = Path(os.environ["TEST_EVENTS"]).parent
        def write(folder):
            (folder / "begun").touch()
            while not (folder / "go on").exists():
                time.sleep(0.02)
            (folder / "written").touch()
        if cycle == 0:
            queue = AsyncCallsQueue()
            queue.schedule_async_request(AsyncRequest(write, (folder,), []))
            while not (folder / "begun").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "go on").touch()
        while not (folder / "written").exists():
            time.sleep(0.02)
        say("written")
    """
    launcher = job.one_node(script)
    assert launcher.wait() == 0
    assert job.events().splitlines() == ["cycle 1 rank 0 written"]


def test_no_progress_ends_with_the_code_not_to_start_again(job: Job, tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    script = f"""
        if cycle < 2:
            open({str(tracker)!r}, "w").write(str(100 * cycle))
        say("fails")
        sys.exit(1)
    """
    launcher = job.one_node(script, f"--ft-checkpoint-iteration-file={tracker}", restarts=50)
    assert launcher.wait() == 93
    assert len(job.events().splitlines()) == 5, "the first made none, the second did, three made none"


@full_only
def test_no_progress_in_a_checkpoint_root(job: Job, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (root / "step_00000100").mkdir(parents=True)
    script = f"""
        if cycle == 1:
            os.mkdir({str(root)!r} + "/step_00000200")
        say("fails")
        sys.exit(1)
    """
    options = ["--ft-max-no-progress-cycles=2", "--ft-no-restart-exit-code=77"]
    launcher = job.one_node(script, f"--ft-checkpoint-iteration-file={root}", *options, restarts=50)
    assert launcher.wait() == 77
    assert len(job.events().splitlines()) == 4


CONTROL = """
    from inprocess.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
    RankMonitorClient().send_workload_control_request(
        WorkloadControlRequest(WorkloadAction.{action}, "for a reason"))
    say("asked")
    sys.exit({code})
"""


def test_a_rank_shuts_the_workload_down(job: Job) -> None:
    launcher = job.one_node(CONTROL.format(action="ShutdownWorkload", code=1), restarts=5)
    assert launcher.wait() == 93
    assert job.events().splitlines() == ["cycle 0 rank 0 asked"]
    assert "a rank has asked for the end: for a reason" in launcher.log()


@full_only
def test_a_request_matters_at_the_next_rendezvous_only(job: Job) -> None:
    launcher = job.one_node(CONTROL.format(action="ShutdownWorkload", code=0))
    assert launcher.wait() == 0


def test_leaving_out_the_only_node_ends_the_job(job: Job) -> None:
    launcher = job.one_node(CONTROL.format(action="ExcludeThisNode", code=1), restarts=5)
    assert launcher.wait() == 1
    assert job.events().splitlines() == ["cycle 0 rank 0 asked"]


@full_only
def test_continue_asks_for_nothing(job: Job) -> None:
    launcher = job.one_node(CONTROL.format(action="Continue", code=1), restarts=1)
    assert launcher.wait() == 1
    assert len(job.events().splitlines()) == 2


@full_only
def test_a_function_can_be_run_as_with_torchrun(job: Job) -> None:
    launcher = job.launch(
        "say('runs')\nif cycle == 0: raise ValueError", "--standalone", "--max-restarts=1", "--run-path"
    )
    assert launcher.wait() == 0
    assert job.events().splitlines() == ["cycle 0 rank 0 runs", "cycle 1 rank 0 runs"]


@full_only
def test_past_the_hard_limit_of_the_wrapper_the_launcher_restarts(job: Job) -> None:
    script = """
    import ctypes
    from datetime import timedelta
    import inprocess
    from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient

    def train(call: inprocess.CallWrapper):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        say("iteration", call.iteration)
        with client.section("step"):
            if cycle == 0 and call.iteration == 0:
                hang()
            if cycle == 0:
                mutex, libc = ctypes.create_string_buffer(256), ctypes.PyDLL(None)
                libc.pthread_mutex_lock(mutex)
                libc.pthread_mutex_lock(mutex)  # for ever, and with the GIL: no signal and no exception ends this
        say("ends")

    inprocess.Wrapper(
        abort=None,
        sections=FaultToleranceConfig(rank_section_timeouts={"step": 1}),
        soft_timeout=timedelta(seconds=30),
        hard_timeout=timedelta(seconds=32),
    )(train)()
    """
    launcher = job.one_node(script)
    assert launcher.wait(50) == 0
    assert job.events().splitlines() == [
        "cycle 0 rank 0 iteration 0",
        "cycle 0 rank 0 iteration 1",
        "cycle 1 rank 0 iteration 0",
        "cycle 1 rank 0 ends",
    ]
    assert "rank 0 with -" in launcher.log(), "the monitor of the wrapper has ended the worker"
