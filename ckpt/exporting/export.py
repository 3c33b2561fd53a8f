"""`export`: write a step in a format that other programs read, in blocks of bounded memory.

`export_alone` does it in a writer process, for exports beside training (see `background`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpt.async_calls.writer_main import WriterContext, current
from ckpt.errors import CheckpointCorruptError, CheckpointError, StorageError
from ckpt.exporting.options import ExportForm, Format
from ckpt.exporting.selection import select
from ckpt.exporting.writers import WRITERS, first_few
from ckpt.formats.foreign_files import check_new, check_outside, discard, hidden_name
from ckpt.keeper.forking import let_go_of_terminal
from ckpt.loading.lazy import open_step
from ckpt.storage.directories import fsync_directory
from ckpt.storage.interface import Root
from ckpt.storage.roots import open_root, own_directory
from ckpt.storage.stores.interface import StorageOptions

_CHECK_S = 1.0
_LOOK_S = 0.2

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True)
class Exported:
    """What `export` has written.

    `files` are in `target`, or `target` itself. `left_out` are the names of values that the format cannot hold, and
    `tied` further names of tensors in the export. `became_inf` counts, by name, the finite elements that the new dtype
    cannot hold. `notes` say, for users, what is different from the step.
    """

    step: int
    path: str
    target: str
    files: list[str]
    tensors: int
    values: int
    bytes: int
    left_out: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    became_inf: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def export(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: Format = "safetensors",
    *,
    step: int | None = None,
    prefix: str | None = None,
    filter: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtype: Any = None,
    drop_tied: bool | None = None,
    max_shard_size: int | str = "5GB",
    config: Any = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a published step to `target`, in a format that other programs read.

    `path` is the directory of a step, or a checkpoint root (then `step`, or the newest one). `format` is

    * ``"safetensors"``: a directory with ``model.safetensors``, or shards and ``model.safetensors.index.json``;
    * ``"hf"``: such a directory with the files of `config`, for ``from_pretrained`` of transformers. The defaults are
      ``prefix="model"`` and ``drop_tied=True``;
    * ``"torch"``: a file for ``torch.load(weights_only=True)``, with the nesting of the state;
    * ``"dcp"``: a directory for `torch.distributed.checkpoint`.

    With a `prefix`, only what is below this key (``"model"``, ``"model/module"``) is exported, and named without it.
    `filter` and `exclude` are patterns (``*``, ``?``, ``[...]``) of names as `ckpt.open` has them, ``model/*``. `dtype`
    ("bf16", "fp16", "fp32", or a torch dtype) converts floating-point tensors, except float8. With `drop_tied` a tensor
    with several names is written only under the first. A file of tensors has at most `max_shard_size`, or one tensor.
    `config` is a dict, an object with ``save_pretrained`` or ``to_dict`` (the config of a model, a tokenizer), or a
    directory from which configuration and tokenizer files are copied. With `verify` all is read again and compared bit
    by bit. `progress` is called with the bytes done and in all.

    `target` is new, or an empty directory. It appears, or all files in it, when it is complete and durable. Memory
    stays at some hundred MB, and torch is imported only for its own formats. Any process, any thread; the step is kept
    from being removed meanwhile, as `ckpt.open` does.

    Raises ConversionError if the format cannot hold what is asked for, StorageError for a target that cannot be
    written, CheckpointCorruptError for damage, and what `ckpt.open` raises; then nothing is left at `target`, except
    that a difference found by `verify` (a CheckpointCorruptError) leaves it. ValueError for an invalid argument.
    """
    form = ExportForm(
        format=format,
        prefix=prefix,
        filter=filter if isinstance(filter, str) else tuple(filter),
        exclude=exclude if isinstance(exclude, str) else tuple(exclude),
        dtype=dtype,
        drop_tied=drop_tied,
        max_shard_size=max_shard_size,
        config=config,
    )
    return export_as(form, open_root(path), target, step=step, verify=verify, progress=progress)


def export_as(
    form: ExportForm,
    root: Root,
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Do what `export` does, with its arguments in one object, for a step of `root`."""
    where = own_directory(os.path.expanduser(os.fspath(target)), "a place for an export")
    with open_step(root, step) as checkpoint:
        check_outside(where, checkpoint.path)
        check_new(where, "file" if form.format == "torch" else "directory")
        selection = select(checkpoint.index, form)
        done, nbytes = 0, selection.nbytes
        total = nbytes * (2 if verify else 1)
        checked = time.monotonic()

        def count(more: int) -> None:
            nonlocal done, checked
            done += more
            if done in (nbytes, total) or time.monotonic() - checked > _CHECK_S:
                checkpoint.check()  # opens files, and renews the lease
                checked = time.monotonic()
            if progress is not None:
                progress(min(done, total), total)

        try:
            written = WRITERS[form.format](where, selection, form, count)
            changes = dict(selection.became_inf)
            problems = written.differences(count) if verify else []
        except (CheckpointError, OSError):
            checkpoint.check()  # a step that was removed is not damaged
            raise
        if problems:
            raise CheckpointCorruptError(
                f"{where} was written, and is not equal to {checkpoint.path}: {first_few(problems)}; check the disk, "
                "and export again"
            )
        return Exported(
            checkpoint.step,
            checkpoint.path,
            where,
            written.files,
            len(selection.tensors),
            len(selection.values) - len(written.left_out),
            nbytes,
            written.left_out,
            selection.tied,
            changes,
            written.notes,
        )


# -- beside training ---------------------------------------------------------------------------------------------------


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
