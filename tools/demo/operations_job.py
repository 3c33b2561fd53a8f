"""One rank of examples/train_lm.py, with planned faults and with metrics.

    python -m tools.demo.operations_job FOLDER PORT URL [STEP:KIND ...] -- ARGUMENTS OF train_lm.py

Metrics of all ranks of this node are served at PORT. Before it ends, the process waits until the Prometheus at URL has
scraped them again, for what is counted last.
"""

import json
import logging
import os
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import ckpt
from ckpt.sinks import Prometheus
from examples import train_lm
from tools.demo.faults import Fault, FaultInjector

RUN = "demo"
_SCRAPED_S = 20.0


def main() -> int:
    end = sys.argv.index("--")
    folder, port, url, *plan = sys.argv[1:end]
    sys.argv[1:] = sys.argv[end + 1 :]
    logging.basicConfig(
        filename=Path(folder) / f"rank_{os.environ['RANK']}.log",
        level=logging.INFO,
        format="%(created).3f %(levelname)s %(name)s %(message)s",
    )
    metrics = Prometheus(RUN, port=int(port))
    with ckpt.observe(metrics):
        code = train_lm.main(FaultInjector(Path(folder), [Fault.parse(fault) for fault in plan]))
        _wait_for_scrape(url, int(port))
    return code


def _wait_for_scrape(url: str, port: int) -> None:
    """Wait until a scrape has succeeded that began after this call, for `_SCRAPED_S` seconds at most.

    `ckpt.observe` hands events to the sinks from a thread, which has this second, too.
    """
    time.sleep(1)
    counted = time.time()
    query = f'timestamp(up{{instance="127.0.0.1:{port}"}} == 1)'
    while time.time() < counted + _SCRAPED_S:
        with urllib.request.urlopen(
            f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10
        ) as answer:
            result = json.load(answer)["data"]["result"]
        if result and float(result[0]["value"][1]) > counted:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
