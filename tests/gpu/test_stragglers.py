"""Sections that are measured on a stream of CUDA. Skipped, cleanly, where there is no GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from inprocess.straggler import Detector
from inprocess.straggler.durations import LEAST_SAMPLES

pytestmark = pytest.mark.gpu

CYCLES = 100_000_000  # 50 ms or more of any GPU


@pytest.fixture
def detector() -> Iterator[Detector]:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Detector(store, rank=0, world_size=1, interval=None) as found:
        yield found


def sections(detector: Detector) -> Any:
    detector.publish()
    report = detector.report()
    assert report is not None
    return report.ranks[0].sections


def test_the_time_of_the_device_counts_and_the_host_does_not_wait(detector: Detector) -> None:
    import torch

    begun = time.monotonic()
    for _ in range(LEAST_SAMPLES):
        with detector.section("forward", cuda=True):
            torch.cuda._sleep(CYCLES)
    submitted_s = time.monotonic() - begun
    assert "forward" not in sections(detector), "nothing is ready, and nothing waits for it"
    torch.cuda.synchronize()
    total_s = time.monotonic() - begun
    found = sections(detector)["forward"]
    assert found.count == LEAST_SAMPLES
    assert submitted_s < total_s / 2
    assert 0.5 * total_s < LEAST_SAMPLES * found.median_s <= total_s


def test_events_are_used_again_and_pairs_beyond_the_limit_are_left_out(detector: Detector) -> None:
    import torch

    for _ in range(1000):
        with detector.section("forward", cuda=True):
            pass
    torch.cuda.synchronize()
    assert 64 <= sections(detector)["forward"].count <= 1000
    (times,) = detector._cuda.values()
    assert len(times._free) <= 64


def test_a_section_while_a_graph_is_captured_is_not_measured(detector: Detector) -> None:
    import torch

    tensor = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), detector.section("forward", cuda=True):
        tensor.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert "forward" not in sections(detector)
    assert tensor.tolist() == [2.0] * 4
