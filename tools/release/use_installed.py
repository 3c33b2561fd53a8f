"""Save and restore a small state with the installed package, in C and in numpy; compare the checksums of both.

Where the compiled parts are installed, also end a wait of gloo.

    python -I use_installed.py ROOT SITE_PACKAGES

Fails if `ckpt` is imported from another folder than SITE_PACKAGES. Prints which code was used.
"""

import argparse
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt import native
from inprocess.unblock.gloo_waits import end_gloo_waits, watch_gloo_waits

PORTABLE, BEST = -1, 2  # of `native.choose`
SIZES = (0, 1, 63, 64, 4095, 4096, 1_000_003)


def check_checksums() -> None:
    for size in SIZES:
        data = random.Random(size).randbytes(size)
        found = {level: native.crc32c(data) for level in range(PORTABLE, BEST + 1) if native.choose(level) == level}
        assert len(set(found.values())) == 1, f"checksums of {size} bytes differ: {found}"


def save(root: Path, step: int, tensor: torch.Tensor) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.async_save({"weights": tensor, "step": step}, step)
        checkpointer.maybe_finalize(blocking=True)


def restore(root: Path, step: int, tensor: torch.Tensor) -> None:
    found: dict[str, Any] = {"weights": torch.zeros_like(tensor), "step": 0}
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(found, step) == step
    assert found["step"] == step, found["step"]
    assert torch.equal(found["weights"], tensor), "the restored tensor differs"


def end_a_wait() -> None:
    """Receive from a rank that does not send. Both ranks are in this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def group(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    with ThreadPoolExecutor() as threads:
        groups = list(threads.map(group, range(2)))
    work = groups[0].recv([torch.zeros(1)], 1, 0)
    threading.Timer(0.2, end_gloo_waits).start()
    try:
        work.wait()
    except RuntimeError as error:
        print("ended a wait of gloo:", str(error).splitlines()[0])
    else:
        raise SystemExit("a receive without a sender has succeeded")


def main() -> None:
    parser = argparse.ArgumentParser(description="Save and restore a small state with the installed package.")
    parser.add_argument("root", type=Path)
    parser.add_argument("site_packages", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig()
    if arguments.site_packages.resolve() not in Path(ckpt.__file__).resolve().parents:
        raise SystemExit(f"ckpt is imported from {ckpt.__file__}, not from {arguments.site_packages}")
    best = native.choose(BEST)
    check_checksums()
    weights = torch.arange(1 << 20, dtype=torch.float32)
    for step, saves, restores in ((1, best, PORTABLE), (2, PORTABLE, best)):
        native.choose(saves)
        save(arguments.root, step, weights * step)
        native.choose(restores)
        restore(arguments.root, step, weights * step)
    print("saved and restored:", "in numpy" if best == PORTABLE else f"in C (level {best}) and in numpy")
    if best != PORTABLE:
        assert watch_gloo_waits(), "waits of gloo cannot be ended"
        end_a_wait()


if __name__ == "__main__":
    main()
