"""Stragglers: ranks that are slower than the others, or than they were.

    with Detector() as detector:
        for batch in batches:
            with detector.section("forward"): ...
            detector.step()

Importing this package is cheap and does not import torch.

    detector       `Detector`, which measures, and exchanges summaries through the store of the job
    durations      durations of one section on this rank, and their summary
    cuda_times     the same, measured on a stream of CUDA
    comparison     `StragglerReport`, made of the summaries of all ranks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inprocess.ipc.lazy_names import lazy_names

if TYPE_CHECKING:
    from inprocess.straggler.comparison import Straggler, StragglerReport
    from inprocess.straggler.detector import Detector
    from inprocess.straggler.durations import SectionSummary

_DEFINED_IN = {
    "Detector": "inprocess.straggler.detector",
    "SectionSummary": "inprocess.straggler.durations",
    "Straggler": "inprocess.straggler.comparison",
    "StragglerReport": "inprocess.straggler.comparison",
}

__all__ = ["Detector", "SectionSummary", "Straggler", "StragglerReport"]

__getattr__, __dir__ = lazy_names(__name__, _DEFINED_IN)
