"""What is known or assumed about faults, hardware and launchers, each figure with its unit and its source."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from tools.bench.goodput.simulation import Kind

_DAY_S = 86400.0
_LLAMA = "A. Grattafiori et al., The Llama 3 Herd of Models (2024)"
_LLAMA_DAYS = 16.384 * 54  # in 1,000 GPUs x days
_HSDP = "O. Salpekar et al., Training LLMs with Fault Tolerant HSDP on 100,000 GPUs (2026)"


def _figure(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Assumptions:
    """A fleet. Rates are per 1,000 GPUs and day, bandwidths per GPU."""

    exceptions: float = _figure(
        56 / _LLAMA_DAYS,
        "per 1,000 GPUs and day",
        f"{_LLAMA}, table 5: software bugs 54, dependencies 2, in 54 days on 16,384 GPUs",
    )
    hangs: float = _figure(7 / _LLAMA_DAYS, "per 1,000 GPUs and day", "the same table: NCCL watchdog timeouts 7")
    processes: float = _figure(
        108 / _LLAMA_DAYS,
        "per 1,000 GPUs and day",
        "the same table: HBM3 72, SRAM 19, GPU system processor 17; these are assumed to leave the node",
    )
    nodes: float = _figure(
        248 / _LLAMA_DAYS,
        "per 1,000 GPUs and day",
        "the same table: the other 248 of 419; these are assumed to take the node",
    )
    jobs: float = _figure(0.01, "per 1,000 GPUs and day", "assumed: storage, scheduler, power, preemption")
    gpus_per_node: float = _figure(8, "GPUs", f"{_LLAMA}; DGX and HGX H100")
    state_bytes: float = _figure(
        14, "bytes per parameter", "bf16 weights 2, fp32 master weights 4, Adam's moments 8; each byte on one GPU only"
    )
    step_s: float = _figure(
        5.0, "s", f"assumed; 405B parameters, 16M tokens and 400 TFLOPS on each of 16,384 GPUs, from {_LLAMA}, make 6 s"
    )
    copy_bytes_s: float = _figure(
        25e9, "bytes/s", "assumed: device to host or back, all GPUs of a node at once; half of PCIe 5.0 x16"
    )
    network_bytes_s: float = _figure(50e9, "bytes/s", f"{_LLAMA}: 400 Gbit/s for each GPU")
    replica_share: float = _figure(0.1, "of the network", "assumed: limit of the traffic of replicas")
    storage_bytes_s: float = _figure(
        2e12 / 24576, "bytes/s", f"{_LLAMA}: 2 TB/s sustained for a cluster of 24,000 GPUs; reads taken to be as fast"
    )
    storage_duty: float = _figure(
        0.1, "of the time", "assumed: what saves may take of the storage's time, which has other work, too"
    )
    file_bytes: float = _figure(64 * 2**20, "bytes", "`file_bytes` of our saves; docs/scale.md")
    peer_files: float = _figure(1, "per GPU", "files of the other systems' saves, as torch.distributed.checkpoint's")
    metadata_calls_s: float = _figure(
        30e3, "per s", "assumed: creates, syncs, closes or opens of files, in the whole storage; docs/scale.md"
    )
    end_detect_s: float = _figure(5.0, "s", "assumed: a launcher notices that a process ended, and ends the others")
    collective_timeout_s: float = _figure(600.0, "s", "PyTorch's default timeout of NCCL collectives")
    soft_timeout_s: float = _figure(60.0, "s", "default of `Wrapper`; docs/restart.md")
    node_detect_s: float = _figure(45.0, "s", "1.5 x the default of `heartbeat_timeout`; for all systems")
    relaunch_s: float = _figure(
        120.0,
        "s",
        "assumed: end all processes, start them, import, build the model; a node in reserve is there at once",
    )
    relaunch_gpu_s: float = _figure(
        1.8e-3,
        "s per GPU",
        f"so that a relaunch of 100,000 GPUs with its groups takes the 10 minutes of {_HSDP}",
    )
    group_gpu_s: float = _figure(
        3e-3,
        "s per GPU",
        "process groups: less than 30 s on more than 10,000 GPUs, Z. Jiang et al., MegaScale (NSDI 2024); growth "
        "in proportion is assumed, and the same for all systems",
    )


@dataclass(frozen=True)
class Job:
    """A synchronous job on `gpus`, whose model has `parameters`."""

    gpus: int
    parameters: float

    def share_bytes(self, assumed: Assumptions) -> float:
        """Return the bytes of the state on each GPU."""
        return self.parameters * assumed.state_bytes / self.gpus


def rates(job: Job, assumed: Assumptions) -> dict[Kind, float]:
    """Return faults per second of the job.

    The loss of the node with the coordination server ends all processes: it counts as loss of the job.
    """
    thousands = job.gpus / 1000 / _DAY_S
    server = assumed.nodes * assumed.gpus_per_node / 1000 / _DAY_S
    return {
        Kind.EXCEPTION: assumed.exceptions * thousands,
        Kind.HANG: assumed.hangs * thousands,
        Kind.PROCESS: assumed.processes * thousands,
        Kind.NODE: assumed.nodes * thousands - server,
        Kind.JOB: assumed.jobs * thousands + server,
    }


def rows(assumed: Assumptions) -> list[tuple[str, float, str, str]]:
    """Return name, value, unit and source of each figure."""
    return [(each.name, getattr(assumed, each.name), *_about(each)) for each in fields(assumed)]


def _about(each: Field[Any]) -> tuple[str, str]:
    return each.metadata["unit"], each.metadata["source"]


_BASE = Assumptions()
_RATES = ("exceptions", "hangs", "processes", "nodes", "jobs")

BASE, SLOW_STORAGE = "as assumed", "storage 10 times slower"
SCENARIOS: Mapping[str, Assumptions] = MappingProxyType(
    {
        BASE: _BASE,
        "faults 3 times rarer": replace(_BASE, **{name: getattr(_BASE, name) / 3 for name in _RATES}),
        "every hardware fault takes the node": replace(_BASE, processes=0.0, nodes=_BASE.nodes + _BASE.processes),
        "no fault takes a node": replace(_BASE, processes=_BASE.nodes + _BASE.processes, nodes=0.0),
        "1 in 10 faults is a hang": replace(_BASE, hangs=(_BASE.exceptions + _BASE.processes + _BASE.nodes) / 9),
        SLOW_STORAGE: replace(_BASE, storage_bytes_s=_BASE.storage_bytes_s / 10),
        "relaunch 4 times faster": replace(
            _BASE, relaunch_s=_BASE.relaunch_s / 4, relaunch_gpu_s=_BASE.relaunch_gpu_s / 4
        ),
        "whole job lost 10 times as often": replace(_BASE, jobs=10 * _BASE.jobs),
    }
)
"""What else could be true."""
