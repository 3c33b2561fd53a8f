"""The index of packs: what it says is what was laid out, and what cannot be is refused, in little time and memory."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ckpt.planning.boxes import unravel_index
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import ALIGNMENT, PackIndex, StoredArray
from ckpt.storage.regions import Region, chunk_sizes, regions_from_documents
from tests.ckpt.storage.chunks import CASES, Case
from tests.support.calls import count_calls

ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


def columns(*runs: Any) -> dict[str, Any]:
    return dict(zip(("ranks", "files", "starts"), runs, strict=True))


def document() -> dict[str, Any]:
    """An index of four ranks: two tensors divided between all, one of ranks 1 and 3, a box, and a tensor of a rank."""
    even = {"dtype": "float32", "shape": [8, 6], "chunk": [2, 6], "inner": [1, 6], "region": 0}
    return {
        "arrays": [
            {"path": ["a"], "offset": 0, **even},  # chunks of 2 * 28 + 36 = 92 bytes
            {"path": ["b"], "offset": 96, **even},
            {"path": ["c", 0], "dtype": "int8", "shape": [3], "chunk": [2], "region": 1, "offset": 0},
            {"path": ["d"], "dtype": "int8", "shape": [0, 3], "chunk": [1, 3]},
            {
                "path": ["e"],
                "dtype": "int8",
                "shape": [2],
                "chunk": [2],
                "region": 2,
                "offset": 0,
                "box_offset": [1],
                "tensor_shape": [3],
            },
            {"path": ["f"], "dtype": "int8", "shape": [2], "chunk": [2], "region": 3, "offset": 16, "rank": 2},
        ],
        "regions": [
            columns([[0, 4, 1]], [[0, 4, 0]], [[0, 4, 0]]),
            columns([[1, 2, 2]], [[0, 2, 0]], [[192, 2, 0]]),
            columns([[0, 1, 0]], [[1, 1, 0]], [[0, 1, 0]]),
            columns([[2, 1, 0]], [[0, 1, 0]], [[192, 1, 0]]),
        ],
    }


def parsed(changed: dict[str, Any]) -> PackIndex:
    return PackIndex.from_document(changed, 4)


def test_what_the_index_says() -> None:
    index = parsed(json.loads(json.dumps(document())))
    assert index.to_document() == document()
    assert index.place(index.arrays[1], (2, 0)) == ("packs/000/rank_00002_000", 96, 92)
    assert index.place(index.arrays[2], (0,)) == ("packs/000/rank_00001_000", 192, 6)
    assert index.place(index.arrays[2], (1,)) == ("packs/000/rank_00003_000", 192, 6)
    assert index.place(index.arrays[5], (0,)) == ("packs/000/rank_00002_000", 208, 6)
    assert index.files() == {(0, 0): 188, (1, 0): 198, (2, 0): 214, (3, 0): 198, (0, 1): 6}
    assert index.arrays[4].box_offset == (1,)
    assert not index.arrays[4].is_whole
    assert index.arrays[5].rank == 2
    assert pack_file(513, 2) == "packs/001/rank_00513_002"


Change = Callable[[dict[str, Any]], Any]


def array(number: int, **members: Any) -> Change:
    return lambda document: document["arrays"][number].update(members)


def without(number: int, *names: str) -> Change:
    return lambda document: [document["arrays"][number].pop(name) for name in names]


def region(number: int, **members: Any) -> Change:
    return lambda document: document["regions"][number].update(members)


HUGE = 1 << 70
CHANGES: dict[str, Change] = {
    "no arrays": lambda document: document.pop("arrays"),
    "arrays that are an object": lambda document: document.update(arrays={}),
    "regions that are text": lambda document: document.update(regions="text"),
    "a region that is a list": lambda document: document["regions"].__setitem__(0, []),
    "a region more": lambda document: document["regions"].append(columns([[0, 1, 0]], [[7, 1, 0]], [[0, 1, 0]])),
    "a region less": lambda document: document["regions"].pop(),
    "arrays that overlap": array(1, offset=80),
    "arrays in the same place": array(1, offset=0),
    "regions that overlap": region(1, starts=[[176, 2, 0]]),
    "a region that overlaps with itself": region(1, ranks=[[1, 2, 0]]),
    "regions in the same place": region(2, files=[[0, 1, 0]]),
    "an offset that is not aligned": array(1, offset=100),
    "a start that is not aligned": region(1, starts=[[200, 2, 0]]),
    "a start below 0": region(1, starts=[[-16, 2, 0]]),
    "a start that falls below 0": region(1, starts=[[192, 2, -208]]),
    "a start of 2**70": region(1, starts=[[HUGE, 2, 0]]),
    "a start of 2**62": region(1, starts=[[1 << 62, 2, 0]]),
    "a step of 2**62": region(1, starts=[[0, 2, 1 << 62]]),
    "steps that overflow": region(0, starts=[[0, 4, (1 << 63) - 16]]),
    "a file below 0": region(1, files=[[-1, 2, 0]]),
    "file 2**40": region(1, files=[[1 << 40, 2, 0]]),
    "a rank that did not write": region(0, ranks=[[1, 4, 1]]),
    "a rank below 0": region(0, ranks=[[2, 4, -1]]),
    "too few copies": region(0, ranks=[[0, 3, 1]], files=[[0, 3, 0]], starts=[[0, 3, 0]]),
    "too many copies": region(1, ranks=[[1, 3, 1]], files=[[5, 3, 0]], starts=[[192, 3, 0]]),
    "columns of different lengths": region(1, files=[[0, 1, 0]]),
    "no copies": region(1, ranks=[], files=[], starts=[]),
    "a run of no numbers": region(1, files=[[0, 0, 0], [0, 2, 0]]),
    "a run of -1 numbers": region(1, files=[[0, -1, 0], [0, 3, 0]]),
    "2**40 copies": region(1, ranks=[[0, 1 << 40, 0]], files=[[0, 1 << 40, 0]], starts=[[0, 1 << 40, 16]]),
    "2**62 copies in runs": region(1, ranks=[[0, 1 << 60, 0]] * 4),
    "a run of two": region(1, files=[[0, 2]]),
    "a run of true": region(1, files=[[False, 2, 0]]),
    "a run of a fraction": region(1, files=[[0.0, 2, 0]]),
    "a run of text": region(1, files=["012", "012"]),
    "runs that are a number": region(1, files=3),
    "a column that is missing": lambda document: document["regions"][1].pop("files"),
    "a column more": region(1, more=[]),
    "a region that does not exist": array(0, region=9),
    "region -1": array(0, region=-1),
    "a region of true": array(2, region=True),
    "a region of text": array(0, region="0"),
    "no region": without(0, "region", "offset"),
    "no offset": without(0, "offset"),
    "a region without elements": array(3, region=0, offset=192),
    "an offset of text": array(0, offset="0"),
    "an offset of a fraction": array(0, offset=0.0),
    "an offset of 2**70": array(1, offset=HUGE),
    "an offset below 0": array(0, offset=-16),
    "a path of text": array(0, path="a"),
    "a path of true": array(0, path=[True]),
    "a path of a list": array(0, path=[["a"]]),
    "a dtype that does not exist": array(0, dtype="float7"),
    "a dtype that is a list": array(0, dtype=["float32"]),
    "a compression that does not exist": array(0, compression="gzip"),
    "a codec that does not exist": array(0, compression={"codec": "gzip", "level": 1, "shuffle": "byte"}),
    "a level that does not exist": array(0, compression={"codec": "zstd", "level": 10, "shuffle": "byte"}),
    "a compression without shuffle": array(0, compression={"codec": "zstd", "level": 1}),
    "a shuffle that is none": array(0, compression={"codec": "zstd", "level": 1, "shuffle": None}),
    "a compression that is none": array(0, compression=None),
    "a shape of true": array(2, shape=[True]),
    "a shape of a fraction": array(2, shape=[3.0]),
    "a shape below 0": array(2, shape=[-3]),
    "a shape of 2**70": array(2, shape=[HUGE], chunk=[HUGE - 1]),
    "a shape of 2**61 elements": array(2, shape=[1 << 59, 4], chunk=[1 << 58, 4]),
    "a shape of many dimensions": array(2, shape=[1] * 65, chunk=[1] * 65),
    "a chunk of 0": array(2, chunk=[0]),
    "a chunk of 2**62": array(2, chunk=[1 << 62]),
    "a chunk of other dimensions": array(2, chunk=[2, 1]),
    "an inner chunk that does not divide": array(0, inner=[3, 6]),
    "an inner chunk that is none": array(0, inner=None),
    "inner chunks so small that the index of a shard is huge": array(2, shape=[1 << 58], chunk=[1 << 57], inner=[1]),
    "a chunk that is mostly outside": array(5, chunk=[5]),
    "a rank of 4": array(5, rank=4),
    "a rank of -1": array(5, rank=-1),
    "a rank of true": array(5, rank=True),
    "a rank of none": array(5, rank=None),
    "a box of other dimensions": array(4, box_offset=[0, 0]),
    "a box below 0": array(4, box_offset=[-1]),
    "a box of text": array(4, box_offset="1"),
    "a box of the whole": array(4, tensor_shape=[2]),
    "a box without a tensor": without(4, "tensor_shape"),
    "a tensor without a box": without(4, "box_offset"),
    "a tensor of 2**70": array(4, tensor_shape=[HUGE]),
    "a member more": array(0, more=1),
    "no shape": without(0, "shape"),
    "an array that is text": lambda document: document["arrays"].__setitem__(0, "a"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_is_refused(name: str) -> None:
    changed = copy.deepcopy(document())
    CHANGES[name](changed)
    with pytest.raises(ILL_FORMED):
        parsed(changed)


_STRANGE = st.sampled_from([None, True, 0, 1, -1, 3, 16, 96, 1 << 40, 1 << 63, 0.5, "a", [], [[0, 1, 0]], {}])


def places(node: Any) -> list[tuple[Any, Any]]:
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [place for key in keys for place in [(node, key), *places(node[key])]]


@given(data=st.data(), changes=st.integers(1, 3))
def test_what_is_accepted_is_consistent(data: st.DataObject, changes: int) -> None:
    changed = copy.deepcopy(document())
    for _ in range(changes):
        node, key = data.draw(st.sampled_from(places(changed)))
        node[key] = copy.deepcopy(data.draw(_STRANGE))
    try:
        index = parsed(changed)
    except ILL_FORMED:
        return
    sizes, ends = index.files(), dict[str, int]()
    all_places = sorted(index.place(one, number) for one in index.arrays for number in one.meta.chunk_indices())
    for place in all_places:
        assert place.offset % ALIGNMENT == 0
        assert place.nbytes > 0
        assert place.offset >= ends.get(place.file, 0), "two chunks overlap"
        ends[place.file] = place.offset + place.nbytes
    assert ends == {pack_file(*key): size for key, size in sizes.items()}


def many_copies(count: int) -> dict[str, Any]:
    """An index of some hundred bytes that describes very many chunks."""
    many = {"path": ["a"], "dtype": "int8", "shape": [count], "chunk": [1], "region": 0, "offset": 0}
    return {"arrays": [many], "regions": [columns([[0, count, 0]], [[0, count, 0]], [[0, count, 16]])]}


def test_an_index_describes_no_more_than_the_files_can_have() -> None:
    def peak(count: int, stored_bytes: int) -> int:
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="copies"):
                PackIndex.from_document(many_copies(count), 1, stored_bytes=lambda: stored_bytes)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for count in (1 << 20, 1 << 24, 1 << 40, 1 << 62):
        assert peak(count, 4096) < 1 << 20
    few = PackIndex.from_document(many_copies(1 << 16), 1, stored_bytes=lambda: 0)
    assert len(few.regions[0].ranks) == 1 << 16
    many = PackIndex.from_document(many_copies(1 << 19), 1, stored_bytes=lambda: 16 << 19)
    assert len(many.regions[0].ranks) == 1 << 19


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=20), max_size=8))
def test_regions_come_back(numbers: list[list[int]]) -> None:
    regions = [Region(np.array(n), np.array(n[::-1]), np.array(n) * 16) for n in numbers]
    again = regions_from_documents([json.loads(json.dumps(region.to_document())) for region in regions], 41)
    assert len(again) == len(regions)
    for one, other in zip(regions, again, strict=True):
        for name in ("ranks", "files", "starts"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sizes_of_all_chunks(case: Case) -> None:
    meta = case.meta
    assert chunk_sizes(meta).tolist() == [meta.layout(index).encoded_bytes for index in meta.chunk_indices()]
    grid = meta.grid_shape
    assert [unravel_index(number, grid) for number in range(int(np.prod(grid)))] == list(meta.chunk_indices())


def large_index(ranks: int, tensors: int) -> PackIndex:
    """Tensors that are divided evenly between the ranks, in files of 64 MiB."""
    arrays, regions, offset = [], [], 0
    for number in range(tensors):
        shape, path = (ranks * 4, 1024 + 8 * (number % 7)), ("model", f"layers.{number}.weight")
        meta = ArrayMeta(shape, "float32", (4, shape[1]), (1, shape[1]), None, {"ckpt": {"name": list(path)}})
        if not regions or offset >= 64 << 20:
            same = np.zeros(ranks, np.int64)
            regions.append(Region(np.arange(ranks), same + len(regions), same))
            offset = 0
        arrays.append(StoredArray(number, path, meta, len(regions) - 1, offset, (0, 0), shape))
        offset += -(-meta.largest_encoded_bytes // ALIGNMENT) * ALIGNMENT
    return PackIndex(tuple(arrays), tuple(regions))


def test_the_index_of_a_large_job_is_small_and_read_at_once() -> None:
    """Of 4,096 ranks and 2,160 tensors: no Python code runs for each rank of a tensor."""
    document = large_index(4096, 2160).to_document()
    data = json.dumps(document)
    assert len(data) < 4 << 20
    index, calls = count_calls(PackIndex.from_document, json.loads(data), 4096)
    assert calls < 100 * 2160
    files, calls = count_calls(index.files)
    assert calls < 5 * len(files)
    assert len(files) == 4096 * len(index.regions)
    tracemalloc.start()
    try:
        index = PackIndex.from_document(json.loads(data), 4096)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20
