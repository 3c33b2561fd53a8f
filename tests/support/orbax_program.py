"""Writes checkpoints with Orbax into the folder that is the first argument, and `expected.json`: what is in them.

A program of its own because jax takes seconds to import and starts threads. Its arrays are sharded over four devices.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1
from orbax.checkpoint.path import atomicity


class Moments(NamedTuple):
    mu: Any
    nu: Any


def sharded(array: Any, *axes: str | None) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


def tree() -> dict[str, Any]:
    numbers = np.random.default_rng(0).standard_normal((64, 48), dtype=np.float32)
    return {
        "params": {
            "layers": [{"w": sharded(numbers, "a", "b"), "b": sharded(numbers[0], "a")}, {"w": sharded(numbers.T)}],
            "bfloat16": sharded(numbers.astype(jnp.bfloat16), None, "b"),
            "float8_e4m3fn": sharded(numbers.astype(jnp.float8_e4m3fn), "a"),
            "float8_e5m2": jnp.asarray(numbers[:3], jnp.float8_e5m2),
            "float16": jnp.asarray(numbers[:3], jnp.float16),
            "complex64": jnp.asarray(numbers[:3] * 1j, jnp.complex64),
            "zeros": sharded(jnp.zeros((8, 8)), "a"),
            "not a number": jnp.array([np.nan, -np.inf, -0.0]),
            "gëwicht / ü~1 %2F": jnp.arange(3),
            "bool": jnp.array([True, False]),
            "uint8": jnp.arange(200, dtype=jnp.uint8),
            "zero dimensions": jnp.int32(5),
        },
        "opt": (Moments(jnp.ones(2), 3), jnp.zeros(1), None),
        "numpy": np.arange(5, dtype=np.int64),
        "int": 7,
        "float": 0.1,
        "true": True,
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "plain list": [1, 2.5],
    }


STRINGS = {"text": "wörter\n", "a/b": "c", "more": {"x": ""}}


def expected(node: Any) -> Any:
    """Describe a tree as JSON: arrays by their bytes, tuples as lists and named tuples as dicts, as Orbax restores."""
    if isinstance(node, Moments):
        node = node._asdict()
    if isinstance(node, dict):
        return {"dict": {key: expected(item) for key, item in node.items()}}
    if isinstance(node, list | tuple) and node:
        return {"list": [expected(item) for item in node]}
    if isinstance(node, jax.Array | np.ndarray):
        array = np.asarray(node)
        return {"dtype": array.dtype.name, "shape": array.shape, "bytes": array.tobytes().hex()}
    return (
        {"empty": "tuple"}
        if isinstance(node, tuple)
        else {"value": node.item() if isinstance(node, np.generic) else node}
    )


def failing(save: Callable[[Any], object], leaves: Path) -> None:
    """Begin a save that Orbax gives up, and wait until its directory is there."""
    try:
        save({"numbers": np.arange(5), "w": jnp.zeros((0, 4))})  # Orbax refuses arrays without elements
    except ValueError:
        deadline = time.monotonic() + 60
        while not (leaves / "_CHECKPOINT_METADATA").exists():
            assert time.monotonic() < deadline, f"{leaves} did not appear"
            time.sleep(0.01)


def main(folder: Path) -> None:
    state = {**tree(), "strings": STRINGS, "numpy scalar": np.float32(2.5)}
    layouts = {
        "ocdbt": ocp.PyTreeCheckpointHandler(),
        "files": ocp.PyTreeCheckpointHandler(use_ocdbt=False),
        "zarr3": ocp.PyTreeCheckpointHandler(use_zarr3=True),
        "zarr3 files": ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True),
    }
    for name, handler in layouts.items():
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder / name, args=ocp.args.PyTreeSave(state))
    with ocp.StandardCheckpointer() as standard:
        standard.save(folder / "standard", tree())
    v1.save(folder / "v1", {"params": tree()["params"], "strings": STRINGS})
    with ocp.CheckpointManager(folder / "manager") as manager:
        for step in (3, 12):
            manager.save(step, args=ocp.args.StandardSave({"w": sharded(np.full((4, 2), step), "a")}))
    with ocp.CheckpointManager(folder / "composite") as manager:
        items = {"params": ocp.args.StandardSave(tree()["params"]), "state": ocp.args.StandardSave({"step": 5})}
        manager.save(5, args=ocp.args.Composite(**items, about=ocp.args.JsonSave({"run": 7})))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        small = {"w": jnp.ones(2), "layers": {"quantized": jnp.ones((4, 4), jnp.int4)}}
        checkpointer.save(folder / "int4", args=ocp.args.PyTreeSave(small))
        dots = {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)}
        checkpointer.save(folder / "dots", args=ocp.args.PyTreeSave(dots))
        key = {"key": jax.random.key(3)}
        checkpointer.save(folder / "key", args=ocp.args.PyTreeSave(key))
    documents = {"state": state, "tree": tree(), "params": tree()["params"]}
    documents["v1"] = {"params": tree()["params"], "strings": STRINGS}
    documents["key"] = {"key": jax.random.key_data(key["key"])}
    (folder / "expected.json").write_text(json.dumps({name: expected(node) for name, node in documents.items()}))

    unfinished = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    failing(
        lambda t: unfinished.save(folder / "renamed", args=ocp.args.PyTreeSave(t)),
        folder / "renamed.orbax-checkpoint-tmp",
    )
    in_place = ocp.CheckpointManager(
        folder / "bucket",
        options=ocp.CheckpointManagerOptions(
            temporary_path_class=atomicity.CommitFileTemporaryPath, enable_async_checkpointing=False
        ),
    )
    in_place.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    failing(lambda t: in_place.save(2, args=ocp.args.StandardSave(t)), folder / "bucket" / "2")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # at its end Orbax would wait for minutes for the saves that it gave up
