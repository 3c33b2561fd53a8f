"""Names of parameters are interface: programs written for nvidia_resiliency_ext call with keywords.

Each entry of the lists is a callable by its dotted name and the parameters that it must accept by name, with the
default where one is promised. More parameters are fine if they have defaults.
"""

import inspect
from functools import reduce
from importlib import import_module
from typing import Any

import pytest

REQUIRED = inspect.Parameter.empty
ANY = object()  # has a default; which one is not promised

Signature = tuple[str, dict[str, Any]]

CKPT: list[Signature] = [
    (
        "ckpt.AsyncRequest",
        {
            "async_fn": REQUIRED,
            "async_fn_args": REQUIRED,
            "finalize_fns": REQUIRED,
            "async_fn_kwargs": {},
            "preload_fn": None,
            "is_frozen": False,
            "call_idx": 0,
        },
    ),
    ("ckpt.AsyncRequest.add_finalize_fn", {"fn": REQUIRED}),
    ("ckpt.AsyncRequest.execute_sync", {}),
    ("ckpt.AsyncRequest.execute_finalize_fns", {"validate_matching_call_idx": True}),
    ("ckpt.AsyncRequest.freeze", {}),
    (
        "ckpt.AsyncCallsQueue",
        {
            "persistent": False,
            "is_daemon": True,
            "cpu_priority": ANY,
            "io_priority": ANY,
            "sigterm_timeout": ANY,
            "cpu_shm_mode": ANY,
        },
    ),
    ("ckpt.AsyncCallsQueue.schedule_async_request", {"async_request": REQUIRED}),
    ("ckpt.AsyncCallsQueue.maybe_finalize_async_calls", {"blocking": False, "no_dist": ANY}),
    ("ckpt.AsyncCallsQueue.get_num_unfinalized_calls", {}),
    ("ckpt.AsyncCallsQueue.warmup_persistent_caller", {"rank": REQUIRED, "mp_mode": ANY}),
    ("ckpt.AsyncCallsQueue.close", {"abort": False}),
    ("ckpt.abort_nvrx_checkpoint", {}),
    ("ckpt.DistributedAsyncCaller", {}),
    (
        "ckpt.DistributedAsyncCaller.schedule_async_call",
        {"async_fn": REQUIRED, "save_args": REQUIRED, "save_kwargs": {}},
    ),
    ("ckpt.integrations.nvrx.TorchAsyncCheckpoint", {"persistent_queue": True}),
    ("ckpt.integrations.nvrx.TorchAsyncCheckpoint.async_save", {"state_dict": REQUIRED, "f": REQUIRED}),
    (
        "ckpt.integrations.nvrx.TorchAsyncCheckpoint.finalize_async_save",
        {"blocking": False, "no_dist": True, "terminate": False},
    ),
    ("ckpt.integrations.nvrx.TorchAsyncCheckpoint.close", {"abort": False}),
    ("ckpt.DistributedAsyncCaller.is_current_async_call_done", {"blocking": False, "no_dist": False}),
]

_RESTARTER = {"restarter_state": ANY, "restarter_stage": ANY, "logger": ANY, "special_rank": ANY}

INPROCESS: list[Signature] = [
    ("inprocess.abort.Abort.__call__", {"state": REQUIRED}),
    ("inprocess.abort.AbortTorchDistributed", {"torch_fr_trace_path": None}),
    ("inprocess.abort.AbortTransformerEngine", {}),
    ("inprocess.completion.Completion.__call__", {"state": REQUIRED}),
    ("inprocess.terminate.Terminate.__call__", {"state": REQUIRED}),
    ("inprocess.initialize.Initialize.__call__", {"state": REQUIRED}),
    ("inprocess.finalize.Finalize.__call__", {"state": REQUIRED}),
    ("inprocess.health_check.HealthCheck.__call__", {"state": REQUIRED}),
    ("inprocess.rank_assignment.RankAssignment.__call__", {"ctx": REQUIRED}),
    (
        "inprocess.rank_assignment.RankAssignmentCtx",
        {"state": REQUIRED, "store": REQUIRED, "terminated_ranks": REQUIRED},
    ),
    ("inprocess.finalize.ThreadedFinalize", {"timeout": REQUIRED, "fn": REQUIRED, "args": (), "kwargs": {}}),
    ("inprocess.health_check.CudaHealthCheck", {"timeout": ANY}),
    ("inprocess.health_check.FaultCounter", {"max_rank_faults": ANY}),
    ("inprocess.health_check.ChainedGPUHealthCheck", {"device_index": ANY}),
    ("inprocess.health_check.ChainedNVLHealthCheck", {"device_index": ANY}),
    ("inprocess.health_check.ChainedNicHealthCheck", {"device_index": ANY}),
    (
        "inprocess.initialize.RetryController",
        {"max_iterations": None, "min_world_size": 1, "min_active_world_size": 1},
    ),
    ("inprocess.nested_restarter.NestedRestarterCallback", {**_RESTARTER, "restarter_state": REQUIRED}),
    ("inprocess.nested_restarter.NestedRestarterLogger", {}),
    ("inprocess.nested_restarter.NestedRestarterLogger.set_connected_rank", {"rank": REQUIRED}),
    ("inprocess.nested_restarter.NestedRestarterHandlingStarting", _RESTARTER),
    ("inprocess.nested_restarter.NestedRestarterFinalized", _RESTARTER),
    ("inprocess.nested_restarter.NestedRestarterAborted", _RESTARTER),
    ("inprocess.nested_restarter.NestedRestarterHandlingCompleted", {"special_rank": ANY}),
    ("inprocess.rank_assignment.RankFilter.__call__", {"ctx": REQUIRED}),
    ("inprocess.attribution.InterruptionRecord.from_str", {"string": REQUIRED}),
    ("inprocess.rank_assignment.MaxActiveWorldSize", {"max_active_world_size": ANY}),
    ("inprocess.rank_assignment.MaxActiveWorldSize.__call__", {"ctx": REQUIRED}),
    ("inprocess.rank_assignment.ActiveWorldSizeDivisibleBy", {"divisor": ANY}),
    ("inprocess.rank_assignment.ActivateAllRanks", {}),
    ("inprocess.rank_assignment.FillGaps", {}),
    ("inprocess.rank_assignment.ShiftRanks", {}),
    ("inprocess.rank_assignment.Tree", {"layers": REQUIRED, "world_size_filter": None}),
    ("inprocess.rank_assignment.Layer", {"min_ranks": ANY, "max_ranks": ANY, "key_or_fn": ANY, "flag": ANY}),
    (
        "inprocess.rank_assignment.FilterCountGroupedByKey",
        {"key_or_fn": REQUIRED, "condition": REQUIRED, "timeout": ANY},
    ),
    ("inprocess.rank_filter.MaxActiveWorldSize", {"max_active_world_size": ANY}),
    ("inprocess.rank_filter.WorldSizeDivisibleBy", {"divisor": ANY}),
    ("inprocess.store.PrefixStore", {"iteration": REQUIRED, "store": REQUIRED}),
    (
        "inprocess.store.TCPStore",
        dict.fromkeys(
            ("host_name", "port", "world_size", "timeout", "wait_for_workers", "multi_tenant", "use_libuv"), ANY
        ),
    ),
    (
        "inprocess.Wrapper",
        dict.fromkeys(
            (
                "store_factory",
                "store_kwargs",
                "initialize",
                "abort",
                "finalize",
                "health_check",
                "rank_assignment",
                "rank_filter",
                "monitor_thread_interval",
                "monitor_process_interval",
                "heartbeat_interval",
                "progress_watchdog_interval",
                "soft_timeout",
                "hard_timeout",
                "heartbeat_timeout",
                "barrier_timeout",
                "completion_timeout",
                "last_call_wait",
                "termination_grace_time",
                "monitor_process_logfile",
                "monitor_process_pidfile",
                "enabled",
                "completion",
                "terminate",
            ),
            ANY,
        ),
    ),
    ("inprocess.CallWrapper.ping", {}),
    ("inprocess.CallWrapper.atomic", {}),
    ("inprocess.CallWrapper.disable_hang_protection", {}),
]

_CLIENT = "inprocess.fault_tolerance.RankMonitorClient"
_CONFIG = "inprocess.fault_tolerance.FaultToleranceConfig"
FAULT_TOLERANCE: list[Signature] = [
    (f"{_CONFIG}.from_kwargs", {"ignore_not_recognized": ANY}),
    (f"{_CONFIG}.from_yaml_file", {"cfg_path": REQUIRED, "ignore_not_recognized": ANY}),
    (f"{_CONFIG}.from_args", {"args": REQUIRED}),
    (f"{_CONFIG}.to_yaml_file", {"cfg_path": REQUIRED}),
    (_CLIENT, {}),
    (f"{_CLIENT}.start_section", {"section": REQUIRED}),
    (f"{_CLIENT}.end_section", {"section": REQUIRED}),
    (f"{_CLIENT}.end_all_sections", {}),
    (f"{_CLIENT}.send_heartbeat", {}),
    (f"{_CLIENT}.init_workload_monitoring", {"num_warmup_iters": None}),
    (f"{_CLIENT}.shutdown_workload_monitoring", {}),
    (f"{_CLIENT}.calculate_and_set_hb_timeouts", {"skip_if_not_ready": False}),
    (
        f"{_CLIENT}.calculate_and_set_section_timeouts",
        {"selected_sections": None, "calc_out_of_section": True, "skip_if_not_ready": False},
    ),
    (f"{_CLIENT}.state_dict", {}),
    (f"{_CLIENT}.load_state_dict", {"state": REQUIRED}),
    (f"{_CLIENT}.send_workload_control_request", {"req": REQUIRED}),
    (
        "inprocess.fault_tolerance.RankMonitorServer.run_in_subprocess",
        {
            "cfg": REQUIRED,
            "ipc_socket_path": REQUIRED,
            "is_restarter_logger": False,
            "mp_ctx": ANY,
            "env": None,
        },
    ),
    ("inprocess.fault_tolerance.RankMonitorStateMachine", {"logger": REQUIRED}),
]

NAMES = [
    "inprocess.store.BarrierError",
    "inprocess.store.BarrierTimeout",
    "inprocess.store.BarrierOverflow",
    "inprocess.Compose",
    "inprocess.compose.Compose",
    "inprocess.CallWrapper.iteration",
    "inprocess.fault_tolerance.WorkloadAction",
    "inprocess.fault_tolerance.WorkloadControlRequest",
    "inprocess.fault_tolerance.RankMonitorClientError",
    "inprocess.fault_tolerance.InvalidStateTransitionException",
    "inprocess.fault_tolerance.RankMonitorState",
]


def find(dotted: str) -> Any:
    """The object behind the longest importable module and the attributes after it."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise AssertionError(f"no module holds {dotted}")


def check(name: str, expected: dict[str, Any]) -> None:
    parameters = dict(inspect.signature(find(name)).parameters)
    parameters.pop("self", None)
    for parameter, default in expected.items():
        assert parameter in parameters, f"{name} has no parameter {parameter}: {list(parameters)}"
        found = parameters.pop(parameter)
        assert found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY), parameter
        if default is ANY:
            assert found.default is not REQUIRED, f"{name}: {parameter} has no default"
        elif default is not REQUIRED:
            assert found.default == default, f"{name}: {parameter} is {found.default!r} by default"
    for parameter, more in parameters.items():
        takes_any_number = more.kind in (more.VAR_POSITIONAL, more.VAR_KEYWORD)
        assert takes_any_number or more.default is not REQUIRED, f"{name} wants {parameter}, too"


@pytest.mark.parametrize(
    ("name", "expected"),
    [pytest.param(*entry, id=entry[0]) for entry in (*CKPT, *INPROCESS, *FAULT_TOLERANCE)],
)
def test_parameters_have_their_names(name: str, expected: dict[str, Any]) -> None:
    check(name, expected)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_there(name: str) -> None:
    find(name)


def test_compose_takes_any_number_of_members() -> None:
    (members,) = inspect.signature(find("inprocess.Compose")).parameters.values()
    assert (members.name, members.kind) == ("instances", members.VAR_POSITIONAL)


def test_the_variables_that_a_launcher_sets() -> None:
    data = find("inprocess.fault_tolerance.data")
    assert data.FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR == "FT_RANK_MONITOR_IPC_SOCKET"
    assert data.FT_LAUNCHER_IPC_SOCKET_ENV_VAR == "FT_LAUNCHER_IPC_SOCKET"
