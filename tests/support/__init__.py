"""Helpers for tests that need several real processes, or that must show that nothing was left behind."""

from tests.support.leaks import LeakCheck, is_gone
from tests.support.ranks import RankGroup, RankResult, RanksFailed, free_port, launch_ranks, rank_values, run_ranks

__all__ = [
    "LeakCheck",
    "RankGroup",
    "RankResult",
    "RanksFailed",
    "free_port",
    "is_gone",
    "launch_ranks",
    "rank_values",
    "run_ranks",
]
