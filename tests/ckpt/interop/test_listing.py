"""Listing a step takes one read for any number of tensors: their metadata are inline in the root."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.ckpt.interop.conftest import Saved

_LIST = """
import json, os, sys
step, opened = sys.argv[1], []
def watch(event, arguments):
    name = arguments[0] if event in ("open", "os.listdir", "os.scandir") else None
    if isinstance(name, (str, os.PathLike)) and os.fspath(name).startswith(step):
        opened.append([event, os.fspath(name)])
import zarr
from ckpt.storage.zarr_plugin import register
register()
sys.addaudithook(watch)
group = zarr.open_group(step, mode="r")
arrays = {name: node for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
shapes = {name: [list(array.shape), array.metadata.to_dict()["data_type"]] for name, array in arrays.items()}
listing = list(opened)
arrays["matrix/float32"][...]
then = [path for _, path in opened[len(listing) :]]
print(json.dumps({"shapes": shapes, "listing": listing, "then": then, "summary": group.attrs["ckpt"]}))
"""


def test_the_root_document_is_all_that_is_read(saved: Saved) -> None:
    step = saved.steps["plain"]
    command = [sys.executable, "-c", _LIST, str(step)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    found = json.loads(result.stdout)

    nodes = json.loads((step / "zarr.json").read_bytes())["consolidated_metadata"]["metadata"]
    expected = {
        name: [node["shape"], node["data_type"]] for name, node in nodes.items() if node["node_type"] == "array"
    }
    assert found["shapes"] == expected
    assert len(expected) > 100
    assert found["summary"]["world_size"] == 2

    # zarr-python also asks for the documents of Zarr version 2, which do not exist.
    version_2 = {str(step / name) for name in (".zgroup", ".zattrs", ".zmetadata")}
    listing = [(event, path) for event, path in found["listing"] if path not in version_2]
    assert listing == [("open", str(step / "zarr.json"))]
    chunks = {str(path) for path in (step / "matrix/float32").glob("c.*")}
    assert set(found["then"]) == chunks, "the watch sees what reads open"
