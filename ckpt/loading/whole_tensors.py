"""Find the tensors of a state that are read as a whole, straight to their memory: most, of a model with many.

A few properties of each are read in calls for all of them, and no Python object is made for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, eq

import numpy as np
import torch

from ckpt.loading.match import Read
from ckpt.native import CHECKSUM_BYTES
from ckpt.planning.state_dict import TensorLeaf
from ckpt.storage.direct_reads import WholeReads
from ckpt.storage.pack_index import PackIndex, StoredArray

_nbytes, _is_cpu = attrgetter("nbytes"), attrgetter("is_cpu")


def divided(packs: PackIndex, reads: Sequence[Read]) -> tuple[WholeReads, list[Read]]:
    """Return the reads of whole tensors, and the others.

    Whole are those that are stored as one block and have all of it in contiguous CPU memory, as it is stored.
    """
    fits = _forms_that_fit(reads)
    locals_ = [read[2].local for read in compress(reads, fits)]
    numbers = np.array([tensor.boxes[0].number for _, tensor, _ in compress(reads, fits)], np.int64)
    nbytes = packs.array_places[2, numbers] - CHECKSUM_BYTES
    if not _are_plain(locals_, nbytes.tolist()):
        plain = list(map(_are_plain, zip(locals_), zip(nbytes.tolist())))
        locals_, numbers = list(compress(locals_, plain)), numbers[plain]
        are_plain = iter(plain)
        fits = [fit and next(are_plain) for fit in fits]
    addresses = np.array(list(map(torch.Tensor.data_ptr, locals_)), np.int64)
    others = [] if all(fits) else [read for read, fit in zip(reads, fits, strict=True) if not fit]
    return WholeReads(numbers, addresses), others


def _are_plain(tensors: Sequence[torch.Tensor], nbytes: Sequence[int]) -> bool:
    """Return whether all tensors are contiguous memory of the CPU, of these sizes, with the elements as they are."""
    return (
        all(map(eq, map(_nbytes, tensors), nbytes))  # an object may have resized one when it was tried
        and all(map(_is_cpu, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
    )


def _forms_that_fit(reads: Sequence[Read]) -> list[bool]:
    """Return which reads are of a leaf that is all of its tensor, in its dtype, and stored as one block."""
    known: dict[tuple[int, int, int], bool] = {}
    fits = []
    for _, tensor, leaf in reads:
        array = tensor.boxes[0]
        form = id(array.meta), id(leaf.spec), id(leaf.boxes)  # many tensors share these
        fit = known.get(form)
        if fit is None:
            fit = known[form] = _fits(array, leaf)
        fits.append(fit)
    return fits


def _fits(array: StoredArray, leaf: TensorLeaf) -> bool:
    meta, boxes, spec = array.meta, leaf.boxes, leaf.spec
    if not array.is_one_block or len(boxes) != 1 or spec.sharding is not None:
        return False
    if meta.dtype != spec.dtype or "complex" in spec.dtype:  # these may be conjugated
        return False
    return meta.shape == boxes[0][0].shape == spec.shape
