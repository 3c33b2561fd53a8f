"""Devices that are made up: an NVML, and network cards in a /sys."""

import json
import os
import types
from pathlib import Path
from typing import Any

BUS_ID = "0000:3b:00.0"


class FakeNvml(types.ModuleType):
    """`count` GPUs. The attributes are what it says of each; `links_of` has NVLinks of single ones, by index."""

    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.value = value

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.opened = 0
        self.count = 3
        self.remapped_failed = 0
        self.remap_pending = 0
        self.ecc_errors = 0
        self.recovery = 0
        self.links = [1, 1]
        self.links_of: dict[str, list[int]] = {}
        self.lost = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        if self.lost:
            raise self.NVMLError(15)
        if index >= self.count:
            raise self.NVMLError(2)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        return uuid

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:  # noqa: N802
        return types.SimpleNamespace(busId=f"0000{BUS_ID}".upper().encode())

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> Any:  # noqa: N802
        return (0, 0, self.remap_pending, self.remapped_failed)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (1, 0), "uncorrected, since the last reset"
        return self.ecc_errors

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[int]) -> Any:  # noqa: N802
        return [types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(uiVal=self.recovery))]

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:  # noqa: N802
        links = self.links_of.get(str(handle), self.links)
        if link >= len(links):
            raise self.NVMLError(3)
        return links[link]


def make_port(sys_root: Path, card: str, place: str, downs: int = 0) -> Path:
    """A network card at a place on the PCI bus, with one active port; return the folder of the port."""
    device = sys_root / "devices" / place
    port = sys_root / "class/infiniband" / card / "ports/1"
    (port / "counters").mkdir(parents=True)
    device.mkdir(parents=True, exist_ok=True)
    (port.parents[1] / "device").symlink_to(device)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "counters/link_downed").write_text(f"{downs}\n")
    return port


class DevicesFile:
    """A file with the attributes of a `FakeNvml`, for other processes, and the folder of a `pynvml` that reads it.

    They import it if the folder is in their path, and find the file by the variable TEST_NVML.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "devices"
        self.file = folder / "nvml.json"
        self.folder.mkdir()
        (self.folder / "pynvml.py").write_text(
            "import sys\nfrom tests.inprocess.fake_devices import NvmlOfFile\nsys.modules[__name__] = NvmlOfFile()\n"
        )
        self.set()

    def set(self, **attributes: Any) -> None:
        """Replace all attributes, at once."""
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(attributes))
        part.replace(self.file)


class NvmlOfFile(FakeNvml):
    def nvmlInit(self) -> None:  # noqa: N802
        super().nvmlInit()
        vars(self).update({"ecc_errors": 0, "lost": False, **json.loads(Path(os.environ["TEST_NVML"]).read_text())})
