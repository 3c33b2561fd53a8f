"""A rank under `ckpt_launcher`: trains with snapshots, and is killed in step 5 if it is one of the ranks given."""

import os
import sys
import time
from pathlib import Path

from tests.ckpt.saving.snapshot_jobs import Faults, restarted


def main(folder: Path, *victims: str) -> None:
    """Print a line for each iteration: its number, rank, step and tier that it began with, and whether that is right.

    While there are fewer ranks, they wait until all replacements have been started, and restart.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"started-{os.getpid()}").touch()
    processes = world_size + len(victims)

    def wait_for_all() -> None:
        while len(list(folder.glob("started-*"))) < processes:
            time.sleep(0.05)

    faults = Faults(*(("kill", 0, int(victim), 5) for victim in victims))
    for entry in restarted(rank, world_size, folder / "root", faults, wait_for=wait_for_all):
        os.write(1, f"began {' '.join(map(str, entry))}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
