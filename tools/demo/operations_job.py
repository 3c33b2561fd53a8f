"""One rank of examples/train_lm.py, with planned faults and with metrics.

    python -m tools.demo.operations_job FOLDER PORT [STEP:KIND ...] -- ARGUMENTS OF train_lm.py

Metrics of all ranks of this node are served at PORT. Before it ends, the process waits until Prometheus has come twice,
for what is counted last.
"""

import logging
import os
import sys
import time
from pathlib import Path

import ckpt
from ckpt.sinks import Prometheus
from examples import train_lm
from tools.demo.faults import Fault, FaultInjector

SCRAPE_S = 1.0
RUN = "demo"


def main() -> int:
    end = sys.argv.index("--")
    folder, port, *plan = sys.argv[1:end]
    sys.argv[1:] = sys.argv[end + 1 :]
    logging.basicConfig(
        filename=Path(folder) / f"rank_{os.environ['RANK']}.log",
        level=logging.INFO,
        format="%(created).3f %(levelname)s %(name)s %(message)s",
    )
    metrics = Prometheus(RUN, port=int(port))
    with ckpt.observe(metrics):
        code = train_lm.main(FaultInjector(Path(folder), [Fault.parse(fault) for fault in plan]))
        time.sleep(2.5 * SCRAPE_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
