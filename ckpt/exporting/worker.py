"""The worker of one export: does what the first message says, answers, and ends; see `background`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import traceback

from ckpt.errors import StorageError
from ckpt.exporting.export import export_as
from ckpt.exporting.messages import CODEC, ExportEnded, ExportRequest
from ckpt.exporting.options import ExportForm
from ckpt.formats.foreign_files import discard, hidden_name
from ckpt.keeper.forking import let_go_of_terminal
from ckpt.storage.directories import fsync_directory
from ckpt.storage.roots import open_root
from inprocess.ipc.packets import receive, send

__all__ = ["run"]

_ERROR_CHARACTERS = 4000  # of an error and of a traceback, each


def run(trainer: socket.socket) -> None:
    """Do one export. The kernel ends this process when its time is over, whatever it waits for."""
    os.chdir("/")  # not to keep the trainer's directory in use
    try:
        packet = receive(trainer, CODEC)
    except EOFError:
        return  # the trainer could not send it
    request = packet.message
    assert isinstance(request, ExportRequest)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request.timeout_s)
    (fd,) = packet.fds
    with open(fd, "rb") as stream:
        stream.seek(0)  # the offset is shared with the process that wrote it
        form = ExportForm.from_document(json.load(stream))
    threading.Thread(target=_outlive, args=(trainer,), name="ckpt-export-trainer", daemon=True).start()
    ended = ExportEnded()
    try:
        _export(request, form)
    except Exception as error:
        summary = traceback.format_exception_only(error)[-1].strip()
        ended = ExportEnded(summary[:_ERROR_CHARACTERS], traceback.format_exc()[-_ERROR_CHARACTERS:].strip())
    with contextlib.suppress(OSError):  # the trainer has ended
        send(trainer, CODEC, ended)


def _outlive(trainer: socket.socket) -> None:
    """Wait for the end of the trainer, which does not end the export, and let go of its terminal."""
    while True:
        try:
            receive(trainer, CODEC)
        except ConnectionResetError:
            continue  # reported once, before the end
        except (EOFError, OSError):
            let_go_of_terminal()
            return


def _export(request: ExportRequest, form: ExportForm) -> None:
    """Write the export under a hidden name, and put it in the place of an earlier one."""
    folder, target = os.path.dirname(request.target), request.target
    if os.path.lexists(os.path.join(target, "zarr.json")):
        raise StorageError(f"{target} is a checkpoint, which no export replaces: give ExportOptions another directory")
    os.makedirs(folder, exist_ok=True)
    written, replaced = hidden_name(folder), hidden_name(folder)
    export_as(form, open_root(request.root, request.root_options), written, step=request.step)
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, replaced)
    os.rename(written, target)
    fsync_directory(folder)
    discard(replaced)
