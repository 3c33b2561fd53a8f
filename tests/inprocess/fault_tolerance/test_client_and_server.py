"""Real ranks under a real monitor process."""

import os
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from inprocess.fault_tolerance import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from inprocess.fault_tolerance.ipc_connector import IpcConnector
from inprocess.ipc.packets import MAX_BYTES, PacketError, receive, send
from inprocess.monitor_process import messages
from inprocess.monitor_process.messages import CODEC, RankInfo
from tests.inprocess.fault_tolerance.workers import Node
from tests.support import LeakCheck, free_port
from tests.support.template import quick_python

LIMITS = {"a": 60.0, "b": 60.0, "short": 0.4}


@pytest.fixture
def client(node: Node) -> Any:
    node.monitor(rank_section_timeouts=LIMITS)
    client = RankMonitorClient()
    client.init_workload_monitoring()
    yield client
    client.shutdown_workload_monitoring()


def test_wrong_uses(client: RankMonitorClient) -> None:
    with pytest.raises(RankMonitorClientError, match="already"):
        client.init_workload_monitoring()
    client.start_section("a")
    with pytest.raises(RankMonitorClientError, match="'a' is open already"):
        client.start_section("a")
    with pytest.raises(RankMonitorClientError, match="'b' is not open"):
        client.end_section("b")
    client.start_section("b")  # overlap
    client.end_section("a")
    client.end_section("b")
    client.start_section("not configured")
    client.start_section("not configured")
    client.end_section("nor this")
    client.start_section("a")
    client.end_all_sections()
    client.end_all_sections()
    with pytest.raises(RankMonitorClientError, match="'a' is not open"):
        client.end_section("a")
    with client.section("a"), pytest.raises(ZeroDivisionError), client.section("b"):
        raise ZeroDivisionError
    client.start_section("b")
    with pytest.raises(RankMonitorClientError, match="no process group"):
        client.calculate_and_set_section_timeouts()


def test_durations_of_sections_are_reported(node: Node) -> None:
    node.monitor(rank_section_timeouts=LIMITS)
    client = RankMonitorClient()
    found: list[tuple[str, float]] = []
    client.report_durations_to(lambda name, seconds: found.append((name, seconds)))
    client.init_workload_monitoring()
    with client.section("a"), client.section("b"), client.section("without a limit"):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="a fault"), client.section("a"):
        raise ValueError("a fault")
    assert [name for name, _ in found] == ["b", "a"]
    assert 0.01 <= found[0][1] <= found[1][1]
    client.report_durations_to(None)
    with client.section("a"):
        pass
    client.shutdown_workload_monitoring()
    assert len(found) == 2


def test_before_initialization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_RANK_MONITOR_IPC_SOCKET", raising=False)
    monkeypatch.setenv("RANK", "0")
    client = RankMonitorClient()
    assert not client.is_initialized
    assert (client.cfg, client.hb_timeouts, client.section_timeouts) == (None, None, None)
    for act in (
        lambda: client.start_section("a"),
        lambda: client.end_section("a"),
        client.end_all_sections,
        client.send_heartbeat,
        client.calculate_and_set_hb_timeouts,
        client.calculate_and_set_section_timeouts,
        lambda: client.section("a").__enter__(),
    ):
        with pytest.raises(RankMonitorClientError, match="not initialized"):
            act()
    with pytest.raises(RankMonitorClientError, match="FT_RANK_MONITOR_IPC_SOCKET"):
        client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="FT_LAUNCHER_IPC_SOCKET"):
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue))
    client.shutdown_workload_monitoring()
    assert client.state_dict() == {"current_timeouts": {}}


def test_init_shutdown_init(client: RankMonitorClient) -> None:
    client.shutdown_workload_monitoring()
    check = LeakCheck()
    for _ in range(3):
        client.init_workload_monitoring(num_warmup_iters=3)
        client.start_section("a")
        client.shutdown_workload_monitoring()
        client.shutdown_workload_monitoring()
        assert not client.is_initialized
    check.check()


ENDS = {
    "exit": "sys.exit(0)",
    "end of the script": "pass",
    "exception": "raise ValueError('at the end')",
    "with a thread": "threading.Thread(target=last).start(); sys.exit(0)",
    "without the client": "del client; sys.exit(0)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_is_not_watched_while_its_interpreter_exits(node: Node, end: str) -> None:
    """Another client gets the monitor then: a rank at a time is watched at a socket."""
    node.monitor(rank_section_timeouts=LIMITS)
    worker = node.worker(
        f"""
        import atexit
        def last():
            say("exits")
            wait()
        {"atexit.register(last)" if end != "with a thread" else ""}
        client.init_workload_monitoring()
        client.start_section("a")
        {ENDS[end]}
        """
    )
    assert worker.line() == "exits"
    other = RankMonitorClient()
    other.init_workload_monitoring()
    other.shutdown_workload_monitoring()
    worker.go()
    assert worker.wait() == (1 if end == "exception" else 0)


LEARNED = {
    "current_timeouts": {
        "heartbeat": {"initial": 3.0, "subsequent": 2.0, "were_calculated": True},
        "section": {
            "section": {"a": 1.5, "gone": 4.0},
            "out_of_section": 7.0,
            "calculated_sections": ["a", "gone"],
            "is_out_of_section_calculated": True,
        },
        "unknown": 1,
    },
    "more": 2,
}


def test_state(client: RankMonitorClient) -> None:
    assert client.state_dict() == {"current_timeouts": {}}
    client.load_state_dict(LEARNED)  # after
    state = client.state_dict()
    assert client.section_timeouts is not None
    assert client.section_timeouts.section == {"a": 1.5, "b": 60.0, "short": 0.4}
    assert state["current_timeouts"]["section"]["section"] == {"a": 1.5}
    assert state["current_timeouts"]["heartbeat"] == LEARNED["current_timeouts"]["heartbeat"]
    client.shutdown_workload_monitoring()
    client.load_state_dict(state)  # before
    client.init_workload_monitoring()
    assert client.state_dict() == state
    client.load_state_dict({})
    assert client.state_dict() == state


def test_a_hang_is_reported_and_ended(node: Node) -> None:
    node.monitor(rank_section_timeouts=LIMITS, rank_out_of_section_timeout=30)
    worker = node.worker("""
        client.init_workload_monitoring()
        client.set_iteration(7)
        client.start_section("a")
        client.start_section("short")
        say(time.monotonic())
        def stuck_here():
            time.sleep(60)
        stuck_here()
    """)
    begun = float(worker.line())
    assert worker.wait() == -signal.SIGKILL
    assert time.monotonic() - begun < 10, "the other limits are longer"
    report = node.reports()[0]
    assert report["rank"] == 0
    assert report["iteration"] == 7
    assert report["late_s"] < 10
    assert set(report["open"]) == {"a", "short"}
    assert 0.4 <= report["open"]["short"] < 10
    assert "stuck_here" in report["stacks"]
    assert any(event.startswith("open short") for event in report["recent"])


def test_stacks_come_also_with_the_gil_held(node: Node) -> None:
    node.monitor(rank_section_timeouts=LIMITS)
    worker = node.worker("""
        client.init_workload_monitoring()
        client.start_section("short")
        def holds_the_gil():
            while True:  # the signal that asks for the stacks ends a sleep
                ctypes.PyDLL(None).sleep(60)
        holds_the_gil()
    """)
    assert worker.wait() == -signal.SIGKILL
    assert "holds_the_gil" in node.reports()[0]["stacks"]


def test_a_stopped_rank_is_ended(node: Node) -> None:
    node.monitor(rank_section_timeouts=LIMITS, rank_termination_signal="SIGTERM")
    worker = node.worker("""
        client.init_workload_monitoring()
        client.start_section("short")
        say("open")
        time.sleep(60)
    """)
    worker.line()
    os.kill(worker.pid, signal.SIGSTOP)
    assert worker.wait() == -signal.SIGTERM  # it was continued


def test_a_monitor_that_was_suspended_itself_starts_limits_again(node: Node) -> None:
    """All are stopped for longer than the limit, and the rank goes on a little after its monitor."""
    monitor = node.monitor(rank_section_timeouts={"middle": 2.5})
    worker = node.worker("""
        client.init_workload_monitoring()
        client.start_section("middle")
        say("open")
        wait()
        client.end_section("middle")
        say("closed")
        client.start_section("middle")
        time.sleep(60)
    """)
    worker.line()
    for pid in (monitor.pid, worker.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(monitor.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(worker.pid, signal.SIGCONT)
    worker.go()
    assert worker.line() == "closed"
    assert worker.wait() == -signal.SIGKILL  # and limits count again


def test_outside_and_heartbeat_limits(node: Node) -> None:
    node.monitor(rank_section_timeouts={"a": 60}, rank_out_of_section_timeout=0.3, rank_heartbeat_timeout=60)
    assert node.worker("client.init_workload_monitoring(); time.sleep(60)").wait() == -signal.SIGKILL
    assert "outside all sections" in node.reports()[-1]["summary"]


def test_heartbeats_are_watched(node: Node) -> None:
    node.monitor(initial_rank_heartbeat_timeout=60, rank_heartbeat_timeout=0.3)
    worker = node.worker("client.init_workload_monitoring(); client.send_heartbeat(); time.sleep(60)")
    assert worker.wait() == -signal.SIGKILL
    assert "heartbeat" in node.reports()[-1]["summary"]


def test_acknowledged_mode(node: Node) -> None:
    monitor = node.monitor(rank_section_timeouts=LIMITS, skip_section_response=False)
    worker = node.worker("""
        client.init_workload_monitoring()
        for _ in range(50):
            with client.section("a"): pass
        client.send_heartbeat()
        try:
            client.end_section("a")
        except RankMonitorClientError as error:
            say(error)
        wait()
        t = time.monotonic()
        for _ in range(5):
            client.start_section("a"); client.end_all_sections()
        say(time.monotonic() - t)
    """)
    assert "'a' is not open" in worker.line()
    os.kill(monitor.pid, signal.SIGSTOP)
    worker.go()
    assert float(worker.line()) < 10  # the first waits a few seconds, the others not at all
    os.kill(monitor.pid, signal.SIGCONT)


def test_a_stuck_monitor_costs_nothing(node: Node) -> None:
    monitor = node.monitor(rank_section_timeouts=LIMITS)
    worker = node.worker("""
        client.init_workload_monitoring()
        say("ready")
        wait()
        t = time.monotonic()
        for _ in range(100_000):
            client.start_section("a"); client.end_section("a")
        say(time.monotonic() - t)
        wait()
        client.start_section("short")
        time.sleep(60)
    """)
    worker.line()
    os.kill(monitor.pid, signal.SIGSTOP)
    worker.go()
    assert float(worker.line()) < 30
    os.kill(monitor.pid, signal.SIGCONT)
    worker.go()
    assert worker.wait() == -signal.SIGKILL


def test_another_monitor_finds_what_is_open(node: Node) -> None:
    monitor = node.monitor(rank_section_timeouts=LIMITS)
    worker = node.worker("""
        client.init_workload_monitoring()
        say("ready")
        wait()
        client.start_section("short")
        say("open")
        time.sleep(60)
    """)
    worker.line()
    monitor.kill()
    monitor.join()
    worker.go()  # the hang begins while nobody watches
    worker.line()
    node.monitor(rank_section_timeouts=LIMITS)
    assert worker.wait() == -signal.SIGKILL


def test_two_clients_wait_for_each_other(node: Node) -> None:
    node.monitor(slot_wait_s=0.5, rank_section_timeouts=LIMITS)
    first = node.worker("""
        client.init_workload_monitoring()
        client.start_section("a")
        say("in")
        wait()
    """)
    first.line()
    script = """
        try:
            client.init_workload_monitoring()
            say("in")
        except RankMonitorClientError as error:
            say(error)
    """
    assert "has not ended" in node.worker(script).line()
    assert not node.reports()
    first.process.kill()  # while its section is open
    assert node.worker(script).line() == "in"
    assert "ends with open section(s) ['a']" in node.log()


def test_a_later_client_of_a_process_replaces_the_earlier_one(node: Node) -> None:
    node.monitor(slot_wait_s=0.5, rank_section_timeouts=LIMITS)
    worker = node.worker("""
        clients = [RankMonitorClient() for _ in range(4)]
        for number, each in enumerate(clients):
            each.init_workload_monitoring()
            each.start_section("a")
            say("watched", number)
        while any(each._connection.link.connected for each in clients[:-1]):
            time.sleep(0.01)
        for each in clients[:-1]:
            each.end_section("a")  # is no error
        clients[-1].start_section("short")
        threading.Event().wait()
    """)
    for number in range(4):
        assert worker.line() == f"watched {number}"
    assert worker.wait() == -signal.SIGKILL
    (report,) = node.reports()
    assert set(report["open"]) == {"a", "short"}
    assert node.log().count("another client of its process has taken its place") >= 3


def test_a_client_that_is_deleted_ends_monitoring(node: Node) -> None:
    node.monitor(slot_wait_s=0.5, rank_section_timeouts=LIMITS)
    worker = node.worker("""
        def threads():
            return sum(thread.name == "monitor-link" for thread in threading.enumerate())
        def iteration():
            client = RankMonitorClient()
            client.init_workload_monitoring()
            client.start_section("short")
        for _ in range(40):  # more than there are free signals
            iteration()
        say(threads(), client.is_initialized)
        wait()
    """)
    assert worker.line() == "0 False"
    node.wait_log("is not watched any more")
    assert "cannot read the stacks" not in node.log()
    worker.go()
    assert worker.wait() == 0


def test_each_iteration_of_a_wrapped_function_may_make_a_client(node: Node) -> None:
    """The documented use, with the monitor of a launcher."""
    node.monitor(slot_wait_s=0.5, rank_section_timeouts=LIMITS)
    env = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    worker = node.worker(
        """
        from datetime import timedelta
        import inprocess
        kept = []
        def train(call: inprocess.CallWrapper):
            client = RankMonitorClient()
            kept.append(client)  # as a global object of the program may
            client.init_workload_monitoring()
            client.start_section("a")
            if call.iteration < 3:
                raise ValueError("again")
            say("iteration", call.iteration)
            client.shutdown_workload_monitoring()
        unbounded = {'max_same_faults': None, 'max_backoff': timedelta(0)}
        inprocess.Wrapper(abort=None, last_call_wait=timedelta(0), **unbounded)(train)()
        """,
        python=quick_python(),
        **env,
    )
    assert worker.line() == "iteration 3"
    assert worker.wait() == 0


def test_the_clocks_of_a_client_stop_while_the_wrapper_waits_or_protects(node: Node) -> None:
    """The client was made outside of the wrapped function, so the limits are those of the launcher."""
    node.monitor(rank_section_timeouts={"a": 0.3})
    env = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    worker = node.worker(
        """
        import inprocess
        from inprocess import repetition
        client.init_workload_monitoring()
        wait_until_set = repetition.wait_until_set
        def backs_off(event, timeout_s):
            with client.section("a"):
                wait_until_set(event, 1.5 * timeout_s)
            say("waited", timeout_s)
        repetition.wait_until_set = backs_off
        def train(call: inprocess.CallWrapper):
            if call.iteration < 2:
                raise ValueError("again")
            with call.disable_hang_protection():
                with client.section("a"):
                    time.sleep(1.5)
            say("iteration", call.iteration)
            client.start_section("a")
            wait()
        inprocess.Wrapper(abort=None)(train)()
        """,
        **env,
    )
    assert worker.line(50) == "waited 1.0"
    assert worker.line() == "iteration 2"
    node.wait_log("in section 'a' for")  # now the clock goes on


def test_a_forked_child_neither_speaks_nor_holds_the_place(node: Node) -> None:
    node.monitor(rank_section_timeouts=LIMITS)
    worker = node.worker("""
        client.init_workload_monitoring()
        client.start_section("a")
        inodes = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in [client._connection.link._end.fileno()]}
        child = os.fork()
        if not child:
            refused = 0
            for act in (lambda: client.end_section("a"), client.end_all_sections, client.send_heartbeat,
                        lambda: client.start_section("b")):
                try:
                    act()
                except RankMonitorClientError as error:
                    refused += "forked" in str(error)
            held = set()
            for fd in os.listdir("/proc/self/fd"):
                try:
                    held.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
                except OSError:
                    pass
            client.shutdown_workload_monitoring()
            say(refused, bool(held & inodes))
            time.sleep(60)
        wait()
        client.end_section("a")  # the child has changed nothing
        say("well", child)
        os._exit(0)
    """)
    assert worker.line() == "4 False"
    worker.go()
    word, child = worker.line().split()
    try:
        assert word == "well"
        assert node.worker("client.init_workload_monitoring(); say('in')").line() == "in"  # though the child lives
    finally:
        os.kill(int(child), signal.SIGKILL)


INVALID = [
    b"\xff\xff\xff\xff",
    b"\x80\x04\x95pickle",
    b"{}",
    b'["Init", {}]',
    b'["Init", {"rank": 3, "stack_signal": 1, "again": false}]',
    b'["Confirm", {"events": 1}]',
    b'["Confirm", {"events": true}]',
    b'["AttachBoard", {}]',
    b'["Shutdown", {}]',  # of the launcher
    b'["Leaving", {}]',  # of a wrapper
    b"[" * 50_000,
    b"x" * (MAX_BYTES + 1),
]


def test_an_invalid_message_costs_only_its_sender(client: RankMonitorClient, node: Node) -> None:
    for message in INVALID:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.settimeout(20)
            end.connect(node.path)
            end.send(message)
            while end.recv(1000):  # an answer perhaps, then the end
                pass
    client.load_state_dict(LEARNED)  # answered by the same monitor
    assert client._connection is not None
    assert client._connection.link is not None
    assert client._connection.link.connected


def test_a_descriptor_that_is_no_board_is_refused(node: Node) -> None:
    node.monitor(rank_section_timeouts=LIMITS)
    fd = os.memfd_create("x")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(20)
        end.connect(node.path)
        send(end, CODEC, messages.Init(RankInfo(0, 0, "h", 1)))
        assert isinstance(receive(end, CODEC).message, messages.Ok)
        send(end, CODEC, messages.AttachBoard(), (fd,))
        os.close(fd)
        answer = receive(end, CODEC).message
        assert isinstance(answer, messages.RequestFailed)
        assert "not that of a board" in answer.cause
    assert os.stat(node.path).st_mode & 0o777 == 0o600


def test_the_launcher_closes_connections_and_ends_monitors(node: Node) -> None:
    monitor = node.monitor(rank_section_timeouts=LIMITS, is_restarter_logger=True)
    first = node.worker("client.init_workload_monitoring(); client.start_section('a'); say('in'); time.sleep(60)")
    first.line()
    monitor.control.set_cycle(3)
    monitor.control.close_worker_connection()
    second = node.worker("client.init_workload_monitoring(); client.start_section('a'); say('in'); time.sleep(60)")
    assert second.line() == "in"
    assert "cycle 3" in node.log()
    assert "state=handling stage=starting" in node.log()
    assert os.stat(os.path.dirname(monitor.control.path)).st_mode & 0o777 == 0o700
    first.close()
    monitor.terminate()
    monitor.join(20)
    assert monitor.exitcode == 0
    assert not os.path.exists(node.path)
    assert not os.path.exists(monitor.control.path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_end_a_monitor_and_its_sockets(node: Node, number: signal.Signals) -> None:
    monitor = node.monitor()
    os.kill(monitor.pid, number)
    monitor.join(20)
    assert monitor.exitcode == 0
    assert not os.path.exists(node.path)
    assert not os.path.exists(monitor.control.path)


def test_shutdown_through_the_control_socket(node: Node) -> None:
    monitor = node.monitor()
    monitor.control.shutdown()
    monitor.join(20)
    assert monitor.exitcode == 0


def test_a_monitor_that_cannot_listen_says_why(node: Node) -> None:
    node.path = "/nonexistent/" + "x" * 10
    with pytest.raises(RuntimeError, match="No such file"):
        node.monitor()


def test_the_exception_hook_exits(node: Node) -> None:
    node.monitor(install_exception_hook=True)
    worker = node.worker("""
        client.init_workload_monitoring()
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise ZeroDivisionError
    """)
    assert worker.wait() == 1


def test_the_iteration_of_megatron_is_found(node: Node) -> None:
    node.monitor(rank_section_timeouts={"step": 60})
    worker = node.worker("""
        import types
        class Arguments: pass
        arguments = Arguments()
        def get_args(): return arguments
        module = types.ModuleType("megatron.training.global_vars")
        module.get_args = get_args
        sys.modules["megatron.training.global_vars"] = module
        client.init_workload_monitoring()
        iterations = [client._recorder.iteration]
        for name, value in (("iteration", 10), ("curr_iteration", 12)):
            setattr(arguments, name, value)
            with client.section("step"): pass
            iterations.append(client._recorder.iteration)
        say(*iterations)
    """)
    assert worker.line() == "1 10 12"


def test_control_requests_reach_the_launcher(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    path = str(tmp_path / "launcher.sock")
    inbox = IpcConnector(path)
    inbox.start_receiving()
    with pytest.raises(RuntimeError, match="already"):
        inbox.start_receiving()
    monkeypatch.setenv("FT_LAUNCHER_IPC_SOCKET", path)
    monkeypatch.setenv("RANK", "3")
    request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "broken")
    RankMonitorClient().send_workload_control_request(request)
    objects = [None, 1, [1.5, "x"], {"a": (1, 2)}, WorkloadAction.Continue]
    for item in objects:
        inbox.send(item)
    with pytest.raises(PacketError):
        inbox.send(object())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(20)
        end.connect(path)
        end.send(b"\x80\x04invalid")
        assert not end.recv(100)
    (info, got), *rest = inbox.peek_received()
    assert (info.global_rank, got, rest) == (3, request, objects)
    assert len(inbox.fetch_received()) == 6
    assert inbox.fetch_received() == []
    inbox.send("x")
    inbox.clear()
    assert inbox.peek_received() == []
    inbox.stop_receiving()
    inbox.stop_receiving()
    assert not os.path.exists(path)
    with pytest.raises(OSError, match="No such file"):
        inbox.send(1)


CLEANS_UP = """
    signals = []
    def clean_up(number, frame):
        signals.append(number)
        if len(signals) > 1:
            os._exit(99)
        say("cleans up")
        {cleaning}
        sys.exit(7)
    signal.signal(signal.SIGTERM, clean_up)
    client.init_workload_monitoring()
    client.start_section("short")
    threading.Event().wait()
"""


def test_a_rank_that_ends_is_not_signalled_again(node: Node) -> None:
    node.monitor(rank_section_timeouts=LIMITS, rank_termination_signal="SIGTERM", workload_check_interval=0.1)
    worker = node.worker(CLEANS_UP.format(cleaning="time.sleep(1.5)"))  # so many intervals
    assert worker.line() == "cleans up"
    assert worker.wait() == 7
    assert len(node.reports()) == 1
    assert node.log().count("sending SIG") == 1


@pytest.mark.parametrize("before", ["", "client.shutdown_workload_monitoring(); "])
def test_a_rank_that_does_not_end_is_killed_after_the_grace(node: Node, before: str) -> None:
    node.monitor(rank_section_timeouts=LIMITS, rank_termination_signal="SIGTERM", termination_grace_time=0.5)
    worker = node.worker(CLEANS_UP.format(cleaning=f"{before}threading.Event().wait()"))
    assert worker.line() == "cleans up"
    began = time.monotonic()
    assert worker.wait() == -signal.SIGKILL
    assert time.monotonic() - began < 10
    assert "not ended 0.5 s after SIGTERM" in node.wait_log("sending SIGKILL.*").group()
    assert node.worker("client.init_workload_monitoring(); say('in')").line() == "in"


@pytest.mark.parametrize("umask", [0, 0o022, 0o377])
def test_monitors_make_nothing_that_others_can_reach(
    umask: int, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    earlier = os.umask(umask)
    try:
        monitor = node.monitor(rank_section_timeouts={"a": 60})
        control = Path(monitor.control.path)
        assert stat.S_IMODE(os.lstat(node.path).st_mode) & 0o077 == 0
        assert stat.S_IMODE(os.lstat(control).st_mode) & 0o077 == 0
        assert stat.S_IMODE(os.lstat(control.parent).st_mode) == 0o700
        assert control.parent.parent == tmp_path
    finally:
        os.umask(earlier)
