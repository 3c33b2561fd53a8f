"""Read every array of a step through its references, with fsspec and zarr-python. A program without ckpt.

    python read_references.py STEP OUTPUT [simple]

OUTPUT gets a npz file with the bytes of each array by its name. With ``simple``, "gen" is ignored. Data types
that zarr-python lacks are read as unsigned integers.
"""

import json
import sys
from typing import Any

import fsspec
import numpy as np
import zarr

BITS = {"bfloat16": "uint16"} | dict.fromkeys(
    ("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), "uint8"
)


def main(step: str, output: str, simple: str = "") -> None:
    with open(f"{step}/references.json") as file:
        manifest = json.load(file)
    for key, text in manifest["refs"].items():
        if key.endswith("zarr.json"):
            node = json.loads(text)
            node.update(
                {"data_type": BITS[node["data_type"]], "fill_value": 0} if node.get("data_type") in BITS else {}
            )
            manifest["refs"][key] = json.dumps(node)
    files = fsspec.filesystem(
        "reference",
        fo=manifest,
        simple_templates=bool(simple),
        template_overrides={"step": f"file://{step}"},
        asynchronous=True,
    )
    group = zarr.open_group(zarr.storage.FsspecStore(files, read_only=True, path="step"), mode="r")
    arrays: dict[str, Any] = {
        name: array for name, array in group.members(max_depth=None) if isinstance(array, zarr.Array)
    }
    np.savez(output, **{name: np.frombuffer(array[...].tobytes(), np.uint8) for name, array in arrays.items()})
    assert not [name for name in sys.modules if name == "torch" or name.partition(".")[0] == "ckpt"]
    assert group.attrs["ckpt"]["format"] == 2


if __name__ == "__main__":
    main(*sys.argv[1:])
