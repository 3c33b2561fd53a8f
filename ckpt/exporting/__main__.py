"""The process of one export in the background: started by `background`, with the request as JSON on its stdin."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys

import psutil

from ckpt.errors import StorageError
from ckpt.exporting.export import export_as
from ckpt.exporting.options import ExportForm
from ckpt.formats.files import discard, hidden_name
from ckpt.storage.directories import fsync_directory

_PR_SET_NAME = 15
_NICE = 15


def main() -> None:
    """Do the export with low priority. The kernel ends this process when its time is over, whatever it waits for."""
    request = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"ckpt-export", 0, 0, 0)
    with contextlib.suppress(OSError, psutil.Error):
        os.nice(_NICE)
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    folder, target = os.path.dirname(request["target"]), request["target"]
    if os.path.lexists(os.path.join(target, "zarr.json")):
        raise StorageError(f"{target} is a checkpoint, which no export replaces: give ExportOptions another directory")
    os.makedirs(folder, exist_ok=True)
    written, replaced = hidden_name(folder), hidden_name(folder)
    form, options = ExportForm.from_document(request["form"]), request.get("storage_options")
    export_as(form, request["root"], written, step=request["step"], storage_options=options)
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, replaced)
    os.rename(written, target)
    fsync_directory(folder)
    discard(replaced)


if __name__ == "__main__":
    main()
