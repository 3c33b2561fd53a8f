"""The function of a background export, which runs in a writer process of its own; see `background`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from ckpt.async_calls.context import WriterContext, current
from ckpt.errors import StorageError
from ckpt.exporting.export import export_as
from ckpt.exporting.options import ExportForm
from ckpt.formats.foreign_files import discard, hidden_name
from ckpt.keeper.forking import let_go_of_terminal
from ckpt.storage.directories import fsync_directory
from ckpt.storage.options import StorageOptions
from ckpt.storage.roots import open_root

__all__ = ["export_alone"]

_LOOK_S = 0.2


def export_alone(
    root: str, root_options: StorageOptions | None, step: int, target: str, form: ExportForm, timeout_s: float
) -> None:
    """Export a step. The kernel ends the process when its time is over, whatever it waits for.

    Without its trainer it goes on. Raises what `export` raises.
    """
    os.chdir("/")  # not to keep the trainer's directory in use
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    if (context := current()) is not None:
        threading.Thread(target=_outlive, args=(context,), name="ckpt-export-trainer", daemon=True).start()
    folder = os.path.dirname(target)
    if os.path.lexists(os.path.join(target, "zarr.json")):
        raise StorageError(f"{target} is a checkpoint, which no export replaces: give ExportOptions another directory")
    os.makedirs(folder, exist_ok=True)
    written, replaced = hidden_name(folder), hidden_name(folder)
    export_as(form, open_root(root, root_options), written, step=step)
    # Under its own name it appears whole, in the place of an earlier one.
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, replaced)
    os.rename(written, target)
    fsync_directory(folder)
    discard(replaced)


def _outlive(context: WriterContext) -> None:
    """Wait for the end of the trainer, which does not end the export, and let go of its terminal."""
    while not context.trainer_left():
        time.sleep(_LOOK_S)
    let_go_of_terminal()
