"""Three ways to keep states and to restart, as a simulated job sees them."""

import math

from tools.bench.goodput.assumptions import Assumptions, Job
from tools.bench.goodput.costs import Costs
from tools.bench.goodput.simulation import Downtime, Kind, System, Tier

STORAGE = "storage only"
ASYNC = "async saves, in-process restart"
OURS = "snapshots in memory, replicas"

_ALWAYS = dict.fromkeys(Kind, math.inf)
_ONE_NODE = {**_ALWAYS, Kind.NODE: 1.0, Kind.JOB: 0.0}
"""A second node that is lost in one recovery is taken to be the one with the replicas of the first."""


def systems(job: Job, costs: Costs, assumed: Assumptions) -> list[System]:
    """Return the three systems; their intervals are one step, and still to be chosen.

    storage only
        Training waits until all bytes are in storage. Every fault ends all processes, and the job is launched again.
    async saves, in-process restart
        A save stalls training for a copy, and is written beside it. Processes are restarted as ours are, with the
        same times, and all ranks load the newest step from storage.
    snapshots in memory, replicas
        The same, and between saves states are kept in memory and sent to another node. A restart takes the newest
        state that is whole in memory, else the newest step in storage.
    """
    theirs = _async_saves(job, costs, assumed, assumed.peer_files)
    ours = _async_saves(job, costs, assumed, _files(job, assumed))
    restarts, step_s = _restarts(job, costs, assumed), assumed.step_s
    return [
        System(STORAGE, step_s, (_sync_saves(job, assumed),), _relaunches(job, assumed)),
        System(ASYNC, step_s, (theirs,), restarts),
        System(OURS, step_s, (_snapshots(job, costs, assumed), ours), restarts),
    ]


# -- states ------------------------------------------------------------------------------------------------------------


def _copy_s(job: Job, assumed: Assumptions) -> float:
    """Return the seconds of a copy of a GPU's share, all GPUs of its node at once."""
    return job.share_bytes(assumed) / assumed.copy_bytes_s


def _files(job: Job, assumed: Assumptions) -> float:
    """Return the files of each GPU in one of our steps: its packs and a manifest."""
    return 2 + job.share_bytes(assumed) // assumed.file_bytes


def _bytes_s(job: Job, assumed: Assumptions) -> float:
    """Return the seconds in which all GPUs at once write or read the whole state."""
    return job.share_bytes(assumed) / assumed.storage_bytes_s


def _write_s(job: Job, assumed: Assumptions, files: float) -> float:
    """Return the seconds of a write by all GPUs at once, with a create, a sync and a close of each file."""
    return _bytes_s(job, assumed) + 3 * files * job.gpus / assumed.metadata_calls_s


def _load_s(job: Job, assumed: Assumptions, files: float) -> dict[Kind, float]:
    """Return the seconds of a read by all GPUs at once, with an open of each file."""
    opens_s = files * job.gpus / assumed.metadata_calls_s
    return dict.fromkeys(Kind, opens_s + _bytes_s(job, assumed) + _copy_s(job, assumed))


def _sync_saves(job: Job, assumed: Assumptions) -> Tier:
    """Copy, then write: no time for planning or a commit."""
    write_s, load_s = _write_s(job, assumed, assumed.peer_files), _load_s(job, assumed, assumed.peer_files)
    cost_s = _copy_s(job, assumed) + write_s
    return Tier("storage", cost_s, 0.0, write_s / assumed.storage_duty, load_s, _ALWAYS)


def _async_saves(job: Job, costs: Costs, assumed: Assumptions, files: float) -> Tier:
    """Copy, then write beside training: where the measured write was faster than a plain one, as fast as that."""
    copy_s, write_s = _copy_s(job, assumed), max(1.0, costs.durable) * _write_s(job, assumed, files)
    cost_s = costs.save.seconds(copy_s) + costs.beside * copy_s
    return Tier("storage", cost_s, write_s, write_s / assumed.storage_duty, _load_s(job, assumed, files), _ALWAYS)


def _snapshots(job: Job, costs: Costs, assumed: Assumptions) -> Tier:
    """Steps are taken to wait for the bytes of replicas as if they needed the whole network all the time."""
    copy_s, send_s = _copy_s(job, assumed), job.share_bytes(assumed) / assumed.network_bytes_s
    restore_s = costs.restore * copy_s
    restores = {**dict.fromkeys(Kind, restore_s), Kind.NODE: restore_s + send_s}
    cost_s, lag_s = costs.snapshot.seconds(copy_s) + send_s, send_s / assumed.replica_share
    return Tier("memory", cost_s, lag_s, lag_s, restores, _ONE_NODE)


# -- restarts ----------------------------------------------------------------------------------------------------------


def _relaunches(job: Job, assumed: Assumptions) -> dict[Kind, Downtime]:
    detect_s = dict.fromkeys(Kind, assumed.end_detect_s)
    detect_s |= {Kind.HANG: assumed.collective_timeout_s, Kind.NODE: assumed.node_detect_s}
    restart_s = assumed.relaunch_s + (assumed.relaunch_gpu_s + assumed.group_gpu_s) * job.gpus
    return {kind: Downtime(detect_s[kind], restart_s) for kind in Kind}


def _restarts(job: Job, costs: Costs, assumed: Assumptions) -> dict[Kind, Downtime]:
    """Return the times of restarts in the processes; after the loss of the job it is launched again."""
    grows_s = (costs.server_rank_s + assumed.group_gpu_s) * job.gpus
    again_s = costs.exception_s + grows_s
    return {
        Kind.EXCEPTION: Downtime(0.0, again_s),
        Kind.HANG: Downtime(assumed.soft_timeout_s, again_s),
        Kind.PROCESS: Downtime(costs.noticed_s, costs.kill_s - costs.noticed_s + costs.start_s + grows_s),
        Kind.NODE: Downtime(assumed.node_detect_s, again_s + costs.start_s),
        Kind.JOB: _relaunches(job, assumed)[Kind.JOB],
    }
