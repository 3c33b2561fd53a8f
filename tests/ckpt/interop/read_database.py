"""Read every array of steps as a database of tensorstore. A program with nothing but tensorstore and numpy.

    python read_database.py OUTPUT BASE...

BASE is a key-value store of tensorstore, as JSON or as a URL: the place of a step. For each, OUTPUT gets
``<number>.npz`` with the bytes of each array by its name, and ``<number>.json`` with the metadata of each.
"""

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts


class Refusal(MetaPathFinder):
    """Lets nothing of this package be imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] in ("ckpt", "inprocess", "torch", "zarr"):
            raise ImportError(f"{fullname} is not there")


def read(base: Any) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    keys = [key.decode() for key in ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()]
    about, data = {}, {}
    for name in [key.removesuffix("/zarr.json") for key in keys if key.endswith("/zarr.json")]:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        node = json.loads(ts.KvStore.open(kvstore).result()["zarr.json"])
        if node["node_type"] == "group":
            continue
        whole = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True).result().read().result()
        if isinstance(base, str):
            same = ts.open(f"{base}|ocdbt:{quote(name)}|zarr3:", open=True, read=True).result()
            part = tuple(slice(size // 3, -(-5 * size // 6)) for size in whole.shape)
            assert same[part].read().result().tobytes() == whole[part].tobytes()
        about[name] = {**node, "keys": sum(key.startswith(f"{name}/") for key in keys)}
        data[name] = np.frombuffer(whole.tobytes(), np.uint8)
    return about, data


def main(output: str, *bases: str) -> None:
    for number, base in enumerate(bases):
        about, data = read(json.loads(base) if base.startswith("{") else base)
        np.savez(Path(output, f"{number}.npz"), **data)
        Path(output, f"{number}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    assert "ckpt" not in sys.modules
    sys.meta_path.insert(0, Refusal())
    main(*sys.argv[1:])
