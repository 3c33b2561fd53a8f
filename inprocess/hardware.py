"""State of the GPUs, NVLinks and network cards of this machine, read without CUDA.

It comes from /sys, and from NVML if the package pynvml is installed. All of it is best effort: what cannot be read is
None or empty, and logged at DEBUG.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

__all__ = ["Gpu", "Port", "all_ports", "nearest_ports", "open_gpu", "open_gpus"]

_log = logging.getLogger(__name__)
_MOST_LINKS = 18
_GPU_LOST = (15, 999)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN
_UNCORRECTED = (1, 0)  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
_ERROR_COUNTERS = ("link_downed", "link_error_recovery", "local_link_integrity_errors")


class Gpu:
    """One GPU of NVML, valid within `open_gpu`."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @property
    def bus_id(self) -> str:
        """PCI address as in /sys: "0000:3b:00.0"."""
        text = self._nvml.nvmlDeviceGetPciInfo(self._handle).busId
        domain, rest = (text.decode() if isinstance(text, bytes) else str(text)).lower().split(":", 1)
        return f"{domain[-4:]}:{rest}"

    def defects(self) -> list[str]:
        """Return the defects that only a reset or a replacement of the GPU removes."""
        found = []
        remapped = self._ask("nvmlDeviceGetRemappedRows")
        if remapped is not None and remapped[3]:
            found.append("remapping a memory row has failed")
        action = self._recovery_action()
        if action:
            found.append(f"the driver asks for recovery action {action}")
        return found

    def memory_errors(self) -> list[str]:
        """Return the errors of memory that a reset of the GPU would remove, and with which it should not start work."""
        found = []
        remapped = self._ask("nvmlDeviceGetRemappedRows")
        if remapped is not None and remapped[2]:
            found.append("the remapping of a memory row waits for a reset")
        errors = self._ask("nvmlDeviceGetTotalEccErrors", *_UNCORRECTED)
        if errors:
            found.append(f"{errors} uncorrected ECC errors since the last reset")
        return found

    def inactive_links(self) -> list[int]:
        """Return the NVLinks that exist and are down."""
        return self._links(0)

    def active_links(self) -> list[int]:
        """Return the NVLinks that are up."""
        return self._links(1)

    def _links(self, wanted: int) -> list[int]:
        states = {link: self._ask("nvmlDeviceGetNvLinkState", link) for link in range(_MOST_LINKS)}
        return [link for link, state in states.items() if state == wanted]

    def nvlink_domain(self) -> str:
        """Return the UUID of the NVLink domain (cluster) that the GPU is in; "" if it is in none."""
        kind = getattr(self._nvml, "c_nvmlGpuFabricInfo_t", None)
        if kind is None:
            return ""
        info = kind()
        self._ask("nvmlDeviceGetGpuFabricInfo", ctypes.byref(info))
        found = bytes(info.clusterUuid)
        return str(uuid.UUID(bytes=found)) if any(found) else ""

    def _recovery_action(self) -> int:
        """Return the recovery action; 0 for none, and if the driver or pynvml is too old to report it."""
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return 0
        values = self._ask("nvmlDeviceGetFieldValues", [field])
        return int(values[0].value.uiVal) if values and values[0].nvmlReturn == 0 else 0

    def _ask(self, function: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *args)
        except AttributeError:
            return None
        except self._nvml.NVMLError as error:
            if error.value in _GPU_LOST:
                raise
            return None  # not supported by this GPU


@contextlib.contextmanager
def open_gpu(cuda_index: int) -> Iterator[Gpu | None]:
    """Open the GPU with this CUDA index (see CUDA_VISIBLE_DEVICES); None without NVML, or without such a GPU.

    A process that sees only one GPU gets that one, whatever the index, which may be the rank on the node. The error of
    NVML for a GPU that has fallen off the bus is raised.
    """
    with _open_nvml() as nvml:
        names = [] if nvml is None else _visible(nvml)
        if cuda_index >= len(names) > 1 or not names:
            _log.debug("there is no GPU %d", cuda_index)
            yield None
        else:
            yield _open(nvml, names[min(cuda_index, len(names) - 1)])


@contextlib.contextmanager
def open_gpus() -> Iterator[dict[str, Gpu | str]]:
    """Open all GPUs that this process sees, by index or UUID; for one that cannot be opened, the error of NVML as text.

    Empty without NVML.
    """
    with _open_nvml() as nvml:
        found: dict[str, Gpu | str] = {}
        for name in [] if nvml is None else _visible(nvml):
            try:
                found[name] = _open(nvml, name)
            except nvml.NVMLError as error:
                found[name] = str(error)
        yield found


@contextlib.contextmanager
def _open_nvml() -> Iterator[Any]:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:
        _log.debug("GPUs cannot be queried without NVML: %s", error)
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _visible(nvml: Any) -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(nvml.nvmlDeviceGetCount())]
    entries = [entry.strip() for entry in named.split(",")]
    # As CUDA reads it: a negative number ends the list, "-1" alone hides all.
    return [entry for entry in takewhile(lambda entry: not entry.startswith("-"), entries) if entry]


def _open(nvml: Any, name: str) -> Gpu:
    if name.isdecimal():
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(int(name)))
    return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(name))


@dataclass(frozen=True)
class Port:
    """One port of a network card in /sys/class/infiniband."""

    path: Path

    @property
    def name(self) -> str:
        """The name, as in "mlx5_0 port 1"."""
        return f"{self.path.parents[1].name} port {self.path.name}"

    def is_active(self) -> bool:
        """Return whether the link is up."""
        return "ACTIVE" in self._text("state")

    def times_down(self) -> int:
        """Return how often the link went down since the driver was loaded; 0 if the card does not count."""
        return self.errors().get("link_downed", 0)

    def errors(self) -> dict[str, int]:
        """Return the counters of errors that a link in order does not have, as far as the card counts them."""
        texts = {name: self._text(f"counters/{name}") for name in _ERROR_COUNTERS}
        return {name: int(text) for name, text in texts.items() if text.isdecimal()}

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text().strip()
        except OSError:
            return ""


def nearest_ports(bus_id: str, sys_root: Path = Path("/sys")) -> list[Port]:
    """Return the ports of the network cards that share the longest part of their PCI path with the device."""
    device = (sys_root / "bus/pci/devices" / bus_id).resolve().parts
    best: list[Path] = []
    most_shared = 0
    cards = sys_root / "class/infiniband"
    for card in sorted(cards.iterdir()) if cards.is_dir() else []:
        parts = (card / "device").resolve().parts
        shared = next((i for i, (a, b) in enumerate(zip(device, parts, strict=False)) if a != b), len(parts))
        if shared > most_shared:
            best, most_shared = [], shared
        if shared == most_shared:
            best.append(card)
    return [Port(port) for card in best for port in sorted((card / "ports").glob("*"))]


def all_ports(sys_root: Path = Path("/sys")) -> list[Port]:
    """Return the ports of all network cards."""
    return [Port(port) for port in sorted((sys_root / "class/infiniband").glob("*/ports/*"))]
