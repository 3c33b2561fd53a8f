"""The example whose saves can be watched: what is scraped and what the files say is what the ranks have saved."""

import re
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

import ckpt
from tests.examples.pages import REPOSITORY
from tests.support import free_port, launch_ranks, run_ranks
from tools.inspect_ckpt.goodput import goodput, read_events

pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.timeout(180)  # it starts Python with torch several times

SCRIPT = REPOSITORY / "examples" / "metrics.py"


def _until_scraped(port: int, saves: int) -> None:
    """Scrape until both ranks have published so many saves: what they report is on its way."""
    pattern = r'^ckpt_saves_total\{outcome="published",rank="(\d)",run="example"\} (\S+)$'
    deadline = time.monotonic() + 30
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            found = dict(re.findall(pattern, answer.read().decode(), re.MULTILINE))
        if found == {"0": f"{saves}.0", "1": f"{saves}.0"}:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_both_ranks_are_scraped_and_their_events_are_in_files(tmp_path: Path) -> None:
    port = free_port()
    arguments = (f"--root={tmp_path}", f"--port={port}")
    with launch_ranks(SCRIPT, 2, *arguments, "--hold=150", init_process_group=False) as group:
        for rank in range(2):
            group.wait_for_output(rank, f"rank {rank} is done", timeout=90)
        _until_scraped(port, 5)
        for rank in range(2):
            group.kill(rank)
    results = run_ranks(SCRIPT, 2, *arguments, "--steps=70", init_process_group=False, timeout=90)
    assert [result.stdout.splitlines()[-1] for result in results] == [f"rank {r} has lost 0 events" for r in range(2)]
    found = read_events([str(tmp_path / f"events_{rank}.jsonl") for rank in range(2)])
    assert found.skipped == 0
    kinds = Counter((event["rank"], event["event"]) for event in found.events)
    for rank in range(2):
        assert kinds[rank, "SavePublished"] == 7
        assert kinds[rank, "Restored"] == 1
    assert 0 < goodput(found.events).goodput < 1
    kept = ckpt.Checkpointer(tmp_path / "root", read_only=True).all_steps()
    assert kept[-2:] == [60, 70]
    assert len(kept) <= 3, "the best one may be one of the newest"
