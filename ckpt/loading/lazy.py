"""Open a published checkpoint without torch: tensors by name, read when they are indexed."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ckpt.errors import CheckpointError, CheckpointNotFoundError
from ckpt.events import Restored, RestoreFailed
from ckpt.loading.consistency import read_index
from ckpt.loading.fetch import Fetch
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.observing import emit, is_observed, shortened
from ckpt.paths import display
from ckpt.planning.boxes import Box
from ckpt.ranks.group import own_rank
from ckpt.storage.dtypes import stored
from ckpt.storage.interface import Root
from ckpt.storage.roots import note_seen, open_root
from ckpt.storage.step_source import HeldStep
from ckpt.storage.stores.interface import StorageOptions
from inprocess.ipc.uncopied import Uncopied

if TYPE_CHECKING:
    import torch

    from ckpt.loading.stored_tree import StoredTree


_ATTEMPTS = 20
_TIMEOUT_S = 60.0  # for requests that a storage does not answer
_BLOCK_BYTES = 4 << 20
_SEQUENCES = ("list", "tuple", "namedtuple", "deque")


@dataclass(frozen=True)
class LazyTensor(Uncopied):
    """A tensor of a checkpoint, read when it is indexed. `dtype` is torch's name, `shape` the global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    _index: CheckpointIndex
    _stored: StoredTensor
    _reader: HeldStep
    _held: Any = None  # keeps the step from being removed while the tensor is in use

    _CPU: ClassVar[tuple[int, int]] = (1, 0)  # of DLPack

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} has no dimensions, so no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """Read the elements selected by `key` (integers, slices with step 1, ...). IndexError for any other key.

        The array has the numpy dtype of the same name (that of ml_dtypes for bfloat16 and float8). Where numpy has none
        it is uint8, with a last dimension of the size of an element. Raises CheckpointCorruptError if bytes are
        damaged, CheckpointNotFoundError if the step was removed since it was opened.
        """
        probe = np.lib.stride_tricks.as_strided(np.zeros((), np.uint8), self.shape, (0,) * len(self.shape))
        shape = probe[key].shape  # IndexError for an integer out of range
        box = _box_of(key, self.shape)
        try:
            result = Fetch(self._index).array(self.name, self._stored, box)
        except CheckpointError:
            self._reader.check()  # raises if the step was removed: then nothing is damaged
            raise
        self._reader.check()
        return result.reshape((*shape, *result.shape[len(box.shape) :]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Read all elements, for `numpy.asarray`."""
        if copy is False:
            raise ValueError("the elements are on disk: an array of them is a copy")
        return np.asarray(self[...], dtype=dtype)

    def read(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Read all elements."""
        return self[...]

    def torch(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        """Read all elements into a new torch tensor on `device`, a floating-point one (not float8) as `dtype`."""
        from ckpt.loading.new_tensors import read_tensor

        try:
            tensor = read_tensor(self._index, self.name, self._stored, dtype, device)
        except CheckpointError:
            self._reader.check()
            raise
        self._reader.check()
        return tensor

    def __dlpack__(self, **options: Any) -> Any:
        """Read all elements, for `torch.as_tensor` and `from_dlpack`."""
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._CPU

    def tensorstore(self) -> Any:
        """Return the tensor as a read-only tensorstore with the dtype and shape of what `read` returns.

        It reads whole blocks by indexing this tensor, with the same checks and errors. Its spec cannot be serialised.
        """
        import tensorstore as ts

        how, dimensions = stored(self.dtype), len(self.shape)

        def read(domain: Any, block: Any, _: Any) -> None:
            block[...] = self[domain.index_exp[:dimensions]]

        layout = ts.ChunkLayout(read_chunk_shape=[*block_shape(self._stored), *how.trailing])
        shape = [*self.shape, *how.trailing]
        return ts.virtual_chunked(read, dtype=ts.dtype(how.numpy_dtype), shape=shape, chunk_layout=layout)


class Checkpoint(Mapping[str, LazyTensor], Uncopied):
    """A published step: a mapping of names (keys joined by "/") to tensors, including aliases.

    `values_by_name` has the leaves that are not tensors. Leaves of single ranks are named ``<name>@rank<r>``. While it
    is open, retention does not remove the step, as far as leases and locks reach (see docs/guide.md): a thread renews
    the lease, also while nothing is read. `close` it, use it as a context manager, or drop it and its tensors.
    """

    def __init__(self, index: CheckpointIndex, reader: HeldStep) -> None:
        self._reader = reader
        self._finalizer = weakref.finalize(self, reader.close)
        self.index = index
        self.step = index.step
        self.path = index.path
        self.summary = index.summary
        self.values_by_name = {display(path): value for path, value in index.values.items()}
        for path, by_rank in index.per_rank_values.items():
            self.values_by_name |= {f"{display(path)}@rank{rank}": value for rank, value in by_rank.items()}
        self._tree: StoredTree | None = None  # made by the first `load`
        self._is_restoring = False
        self._restored_bytes = 0  # since the restore began

    @functools.cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        """The tensors by name, in the order of their names. For `load`, which has their paths, they are not made."""
        index = self.index
        tensors = {display(path): tensor for path, tensor in index.tensors.items()}
        tensors |= {
            display(path): index.tensors[target] for path, target in index.aliases.items() if target in index.tensors
        }
        for path, own in index.per_rank_tensors.items():
            tensors |= {f"{display(path)}@rank{rank}": tensor for rank, tensor in own.items()}
        return dict(sorted(tensors.items()))

    def __getitem__(self, name: str) -> LazyTensor:
        return self.lazy(name, self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def lazy(self, name: str, stored: StoredTensor) -> LazyTensor:
        """Return a tensor that keeps this checkpoint open as long as it is in use."""
        return LazyTensor(name, stored.dtype, stored.shape, self.index, stored, self._reader, self)

    def leaves(self) -> Iterator[tuple[tuple[str | int, ...], int | None, Any]]:
        """Yield the keys of each leaf, the rank that it belongs to or None, and the leaf: a LazyTensor, or a value.

        Names of tied tensors are leaves, too. The keys of a list, a tuple and a deque are 0, 1, ...; see `is_sequence`.
        """
        index = self.index
        for path, rank, tensor in index.stored_tensors():
            name = display(path) if rank is None else f"{display(path)}@rank{rank}"
            yield path, rank, self.lazy(name, tensor)
        for path, target in index.aliases.items():
            if target in index.tensors:
                yield path, None, self.lazy(display(path), index.tensors[target])
        for path, value in index.values.items():
            yield path, None, value
        for path, own in index.per_rank_values.items():
            for rank, value in own.items():
                yield path, rank, value

    def is_sequence(self, keys: tuple[str | int, ...]) -> bool:
        """Return whether the container that these keys lead to is a list, a tuple or a deque, and not a dict."""
        container = self.index.containers.get(keys)
        return container is not None and container.kind in _SEQUENCES

    def load(self, keys: tuple[str | int, ...]) -> Any:
        """Return the item of the state at these keys, nested as it was saved, with new torch tensors on the CPU.

        It is made as `ckpt.load` makes it; of one rank alone nothing is returned. StateMismatchError if it holds
        values of types that are not registered. Raises what `LazyTensor.read` raises.
        """
        from ckpt.loading.stored_tree import StoredTree

        def new_tensor(stored: StoredTensor) -> torch.Tensor:
            made = self.lazy(display(keys), stored).torch()
            self.count_restored(made.nbytes)
            return made

        with self.restoring():
            if self._tree is None:
                self._tree = StoredTree(self.index, None)
            return self._tree.make(keys, new_tensor)

    def read_into(self, wanted: Iterable[tuple[LazyTensor, Sequence[int], torch.Tensor]]) -> None:
        """Read boxes of tensors of this step, several at a time, each into a torch tensor of its shape.

        The numbers are the offset of the box in the stored tensor. The torch tensors may be on any device and have any
        strides; the elements are converted to their dtypes. Complete on return, also on a GPU. ValueError for a box
        that is not within its tensor. Raises what `LazyTensor.read` raises; then the elements are undefined.
        """
        from ckpt.loading.new_tensors import read_into

        with self.restoring():
            reads = [
                (tensor.name, tensor._stored, _box_in(tensor, at, target), target) for tensor, at, target in wanted
            ]
            try:
                read_into(self.index, reads)
            except CheckpointError:
                self._reader.check()  # raises if the step was removed: then nothing is damaged
                raise
            self._reader.check()
            self.count_restored(sum(target.nbytes for *_, target in reads))

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Tell `ckpt.observe` that the reads of a block are one restore: `Restored`, or `RestoreFailed` if it raises.

        For a program that goes on from what it reads. `load` and `read_into` are restores by themselves, outside of
        such a block. What indexes tensors, or makes new ones by `LazyTensor.torch` and `ckpt.load`, only looks.
        """
        if self._is_restoring:
            yield
            return
        self._is_restoring, self._restored_bytes = True, 0
        rank, begin = own_rank() or 0, time.perf_counter()
        try:
            yield
        except Exception as error:
            if is_observed():
                why = type(error).__name__, shortened(str(error))
                emit(RestoreFailed(time.time(), rank, self.step, *why, time.perf_counter() - begin))
            raise
        finally:
            self._is_restoring = False
        if is_observed():
            emit(Restored(time.time(), rank, self.step, 0, 0, self._restored_bytes, time.perf_counter() - begin))

    def count_restored(self, nbytes: int) -> None:
        """Count bytes of tensors that the current restore has read."""
        self._restored_bytes += nbytes

    def check(self) -> None:
        """Raise CheckpointNotFoundError unless the step is still the one that was opened."""
        self._reader.check()

    def close(self) -> None:
        """Release the step, which may be removed then. Later reads are still checked. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_checkpoint(
    path: str | os.PathLike[str], step: int | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a published step: `path` is its directory, or a checkpoint root (then `step`, or the newest one).

    It may be a URL, as `Checkpointer` takes them, with its `storage_options`. Reads metadata only. Needs no write
    permission; with it, a lease is made if `path` is a checkpoint root.
    Raises CheckpointNotFoundError, CheckpointCorruptError, FormatVersionError.
    """
    root = open_root(path, StorageOptions.of(storage_options, _TIMEOUT_S))
    checkpoint = open_step(root, step)
    note_seen(os.path.dirname(root.path) if checkpoint.path == root.path else root.path)
    return checkpoint


def open_step(root: Root, step: int | None = None) -> Checkpoint:
    """Open a step of a root, as `open_checkpoint` does."""
    for attempt in range(_ATTEMPTS):
        steps = root.steps()
        if step is None and not steps:
            return _opened(root.hold_itself())
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise CheckpointNotFoundError(f"{root.path} has no published step {chosen}; it has {steps}", step=chosen)
        try:
            return _opened(root.hold_step(chosen, lease=True, renewing=True))
        except CheckpointNotFoundError:
            if step is not None or attempt == _ATTEMPTS - 1:
                raise  # else the newest step was just removed, because there is a newer one
    raise AssertionError("unreachable")


def _opened(reader: HeldStep) -> Checkpoint:
    try:
        try:
            return Checkpoint(read_index(reader.source), reader)
        finally:
            reader.check()
    except BaseException:
        reader.close()
        raise


def block_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """Return the shape in which a tensor is best read: what has one checksum; some rows if it is several boxes."""
    if len(tensor.boxes) == 1:
        meta = tensor.boxes[0].meta
        return meta.inner_chunk_shape or meta.chunk_shape
    rest = tuple(max(size, 1) for size in tensor.shape[1:])
    row_bytes = math.prod(rest) * stored(tensor.dtype).itemsize
    return (max(min(_BLOCK_BYTES // row_bytes, tensor.shape[0]), 1), *rest)


def _box_in(tensor: LazyTensor, offset: Sequence[int], target: torch.Tensor) -> Box:
    """Return the box of a tensor that is read into a target. ValueError if it is not within the tensor."""
    box = Box(tuple(offset), tuple(target.shape))
    if len(box.offset) != len(tensor.shape) or len(box.shape) != len(tensor.shape):
        raise ValueError(f"{tensor.name} has {len(tensor.shape)} dimensions, not those of {box}")
    if any(at < 0 or at + n > size for at, n, size in zip(box.offset, box.shape, tensor.shape, strict=True)):
        raise ValueError(f"{tensor.name} has the shape {list(tensor.shape)}, and {box} is not within it")
    return box


def _box_of(key: Any, shape: tuple[int, ...]) -> Box:
    """Return the box of the elements that `key` selects."""
    keys = key if isinstance(key, tuple) else (key,)
    at = next((number for number, part in enumerate(keys) if part is Ellipsis), None)
    if at is not None:
        missing = len(shape) - (len(keys) - 1)
        keys = (*keys[:at], *(slice(None),) * missing, *keys[at + 1 :])
    keys = (*keys, *(slice(None),) * (len(shape) - len(keys)))
    offset, sizes = [], []
    for part, size in zip(keys, shape, strict=True):
        if isinstance(part, slice):
            start, stop, stride = part.indices(size)
            if stride != 1:
                raise IndexError("only slices with step 1 can be read; index the result instead")
            offset.append(start)
            sizes.append(max(0, stop - start))
        else:
            offset.append(_index_of(part) % size)
            sizes.append(1)
    return Box(tuple(offset), tuple(sizes))


def _index_of(part: Any) -> int:
    """Return an index as an int. IndexError for what selects in another way, such as a list."""
    try:
        if not isinstance(part, bool):
            return operator.index(part)
    except TypeError:
        pass
    raise IndexError(f"only integers and slices select what is read, not {part!r:.80}; index the result instead")
