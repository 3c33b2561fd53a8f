"""Malicious steps with correct checksums are rejected as damaged, quickly, by every way to read them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import CheckpointCorruptError, Checkpointer
from ckpt.native import crc32c
from ckpt.storage.documents import decode_document, decode_root, encode_document
from ckpt.validation import validate
from tests.ckpt.validation.forgery import reseal_root
from tests.support.saves import save_here
from tools.inspect_ckpt.__main__ import main

SIZES = {"file_bytes": 2048, "inner_bytes": 512}


def _state(value: float) -> dict[str, Any]:
    weight = torch.arange(960.0).view(32, 30) + value
    return {
        "weight": weight,
        "twin": weight + 1,
        "tied": weight,
        "bias": torch.full((5,), value),
        "more": torch.ones(9),
        "lr": value,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, compression in (("plain", None), ("zstd", "zstd")):
        staging = ckpt.Staging(compression=compression, **SIZES)
        with Checkpointer(folder / name, staging=staging) as checkpointer:
            save_here(checkpointer, _state(1.0), 1)
            save_here(checkpointer, _state(2.0), 2)
    return folder


Change = Callable[[Path], None]
_DEEP = "here goes what json cannot write"


def in_index(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda step: _change_document(step, "index", change)


def array(name: str, **members: Any) -> Change:
    """Change members of the entry of a tensor in the index."""
    return in_index(lambda index: _entry(index, name).update(members))


def region(**members: Any) -> Change:
    """Change the columns of the region that `weight` is in."""
    return in_index(lambda index: index["regions"][_entry(index, "weight")["region"]].update(members))


def _entry(index: dict[str, Any], name: str) -> dict[str, Any]:
    entry: dict[str, Any] = next(entry for entry in index["arrays"] if entry["path"] == [name])
    return entry


def _change_document(step: Path, kind: str, change: Callable[[dict[str, Any]], Any]) -> None:
    document = decode_document((step / f"{kind}.json").read_bytes(), kind)
    change(document)
    _vouched(step, encode_document(document), kind)


def in_summary(**members: Any) -> Change:
    return lambda step: reseal_root(step, lambda d: d["attributes"]["ckpt"].update(members))


def in_state(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda step: _change_document(step, "state", change)


def _vouched(step: Path, data: bytes, kind: str = "state") -> None:
    (step / f"{kind}.json").write_bytes(data)
    about = {"bytes": len(data), "crc32c": crc32c(data)}
    reseal_root(step, lambda d: d["attributes"]["ckpt"].update({kind: about}))


def deep_value(step: Path) -> None:
    """Nest a value 900 levels deep, which json.loads accepts but a recursive reader does not."""
    document = decode_document((step / "state.json").read_bytes(), "state.json")
    document["values"][0][2] = _DEEP
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    data = data.replace(b'"' + _DEEP.encode() + b'"', b"[" * 900 + b"]" * 900)
    _vouched(step, b'{"crc32c":%d,' % crc32c(data) + data[1:])


def deep_root(step: Path) -> None:
    document = decode_root((step / "zarr.json").read_bytes(), "zarr.json")
    document["attributes"]["ckpt"]["more"] = _DEEP
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    data = data.replace(b'"' + _DEEP.encode() + b'"', b'{"a":' * 900 + b"1" + b"}" * 900)
    at = data.index(b'"ckpt":{') + 8
    (step / "zarr.json").write_bytes(data[:at] + b'"crc32c":%d,' % crc32c(data) + data[at:])


def two_boxes(first: int, second: int) -> Change:
    """Make two tensors of 32 rows the boxes of one of 64, from these rows on."""

    def change(index: dict[str, Any]) -> None:
        weight, twin = _entry(index, "weight"), _entry(index, "twin")
        weight.update(box_offset=[first, 0], tensor_shape=[64, 30])
        twin.update(path=["weight"], box_offset=[second, 0], tensor_shape=[64, 30])

    return in_index(change)


def instead_of(name: str, make: Callable[[Path], Any]) -> Change:
    def apply(step: Path) -> None:
        (step / name).unlink()
        make(step / name)

    return apply


def aliases(*pairs: Any) -> Change:
    return in_state(lambda state: state.update(aliases=list(pairs)))


_FILE = "packs/000/rank_00000_000"

CHANGES: dict[str, Change] = {
    "boxes that overlap and leave a hole": two_boxes(0, 16),
    "a box outside": two_boxes(0, 33),
    "the same box twice": two_boxes(0, 0),
    "a value of 900 levels": deep_value,
    "a root of 900 levels": deep_root,
    "an offset that is text": array("bias", offset="x"),
    "an offset below 0": array("bias", offset=-16),
    "an offset of true": array("bias", offset=True),
    "an offset outside": array("bias", offset=1 << 50),
    "an offset that is no whole number": array("bias", offset=0.5),
    "arrays that overlap": in_index(
        lambda index: _entry(index, "twin").update(
            {key: _entry(index, "weight")[key] for key in ("region", "offset")},
        )
    ),
    "a dtype that does not exist": array("bias", dtype="float7"),
    "a dtype that is a list": array("bias", dtype=["float32"]),
    "a shape with a huge number": array("bias", shape=[1 << 62, 1 << 62], chunk=[1, 1]),
    "a shape below 0": array("bias", shape=[-5]),
    "a box of other dimensions": array("bias", box_offset=[0, 0], tensor_shape=[5]),
    "a chunk shape of 2**40": array("weight", chunk=[1 << 40, 30]),
    "a chunk shape of true": array("weight", chunk=[True, 30]),
    "a chunk shape of a fraction": array("weight", chunk=[4.0, 30]),
    "a chunk shape of 0": array("weight", chunk=[0, 30]),
    "a chunk shape of 10**30": array("weight", chunk=[10**30, 30]),
    "no chunk shape": array("weight", chunk=None),
    "a shape of 2**40 rows": array("weight", shape=[1 << 40, 30]),
    "a path that is text": array("weight", path="weight"),
    "a rank that did not write": array("weight", rank=7),
    "a region that does not exist": array("weight", region=99),
    "a region of another rank": region(ranks=[[1, 1, 0]]),
    "a region in another file": region(files=[[9, 1, 0]]),
    "a region at 2**50": region(starts=[[1 << 50, 1, 0]]),
    "a region of 2**40 copies": region(ranks=[[0, 1 << 40, 0]], files=[[0, 1 << 40, 0]], starts=[[0, 1 << 40, 16]]),
    "a run that overflows": region(starts=[[0, 1 << 20, 1 << 62]]),
    "a region without copies": region(ranks=[], files=[], starts=[]),
    "a region of text": region(ranks="012"),
    "an index without regions": in_index(lambda index: index.pop("regions")),
    "an index without arrays": in_index(lambda index: index.update(arrays=[])),
    "an alias of an alias": aliases([["tied"], ["again"]], [["again"], ["weight"]]),
    "aliases in a circle": aliases([["tied"], ["again"]], [["again"], ["tied"]]),
    "an alias of itself": aliases([["tied"], ["tied"]]),
    "an alias of nothing": aliases([["tied"], ["nothing"]]),
    "an alias twice": aliases([["tied"], ["weight"]], [["tied"], ["bias"]]),
    "an alias of a number": aliases([["tied"], 3]),
    "a value twice": in_state(lambda state: state["values"].append([["lr"], None, 3.0])),
    "a value of a tensor": in_state(lambda state: state["values"].append([["weight"], None, 3.0])),
    "a value of two": in_state(lambda state: state["values"].append([["x"], None])),
    "a value of an unknown type": in_state(lambda state: state["values"].append([["x"], None, {"$": "code"}])),
    "values that are none": in_state(lambda state: state.update(values={})),
    "a step that is text": in_summary(step="2"),
    "no ranks": in_summary(world_size=0, parts=[]),
    "a world of 2**40": in_summary(world_size=1 << 40),
    "a format of true": in_summary(format=True),
    "a format that is text": in_summary(format="2"),
    "an index of another size": in_summary(index={"bytes": 3, "crc32c": 0}),
    "files that are not there": in_summary(files=12),
    "bytes that are infinite": in_summary(bytes=[1]),
    "a root that is a pipe": instead_of("zarr.json", os.mkfifo),
    "a state that is a pipe": instead_of("state.json", os.mkfifo),
    "a state that is a device": instead_of("state.json", lambda file: file.symlink_to("/dev/zero")),
    "a root of 2**40 bytes": lambda step: os.truncate(step / "zarr.json", 1 << 40),
    "an index that is a pipe": instead_of("index.json", os.mkfifo),
    "a pack that is a pipe": instead_of(_FILE, os.mkfifo),
    "a pack that is a link": instead_of(_FILE, lambda file: file.symlink_to(file.with_name("rank_00000_001"))),
    "a pack that is a directory": instead_of(_FILE, Path.mkdir),
    "a pack that is short": lambda step: os.truncate(step / _FILE, 60),
}


def _read_all(step: Path) -> None:
    for tensor in ckpt.open(step).values():
        tensor.read()


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        *((name, "plain") for name in CHANGES),
        *((name, "zstd") for name in CHANGES if "chunk" in name or "pack" in name or "region" in name),
    ],
)
def test_whoever_reads_it_says_damaged(
    saved: Path, tmp_path: Path, name: str, compression: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved / compression, root)
    step = root / "step_00000002"
    CHANGES[name](step)
    with pytest.raises(CheckpointCorruptError, match="step_00000002"):
        _read_all(step)
    assert not validate(str(step)).restorable
    with Checkpointer(root) as checkpointer:
        state = _state(0.0)
        assert checkpointer.restore(state) == 1
        assert str(state) == str(_state(1.0))
    assert main(["ls", str(root)]) == 1
    assert main(["validate", str(step)]) == 1
    assert main(["diff", str(step), str(step)]) == 2
    assert main(["export", str(step), str(tmp_path / "exported")]) == 1
    assert main(["show", str(step)]) in (0, 1)  # it does not read chunks
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err


def test_boxes_that_tile_the_tensor(saved: Path, tmp_path: Path) -> None:
    """The cases above are rejected because of the overlap and the gap."""
    shutil.copytree(saved / "plain" / "step_00000002", tmp_path / "step_00000002")
    two_boxes(32, 0)(tmp_path / "step_00000002")
    opened = ckpt.open(tmp_path / "step_00000002")
    state = _state(2.0)
    assert (opened["weight"].read() == torch.cat([state["twin"], state["weight"]]).numpy()).all()
