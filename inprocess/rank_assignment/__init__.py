"""Who goes on after a fault, under which number, and who works.

*Numberings* (`ShiftRanks`, `FillGaps`) give the survivors dense ranks. *Filters* stand left of them in `Compose` and
decide who is active (`ActivateAllRanks`, `MaxActiveWorldSize`, `ActiveWorldSizeDivisibleBy`); `FilterCountGroupedByKey`
stands right of them and decides who does not survive. `Tree` does all of it along the topology of the job, alone.
"""

from inprocess.rank_assignment.activate_all_ranks import ActivateAllRanks
from inprocess.rank_assignment.active_world_size_divisible_by import ActiveWorldSizeDivisibleBy, WorldSizeDivisibleBy
from inprocess.rank_assignment.base import AssignmentStore, RankAssignment, RankAssignmentCtx, RankDiscarded
from inprocess.rank_assignment.fill_gaps import FillGaps
from inprocess.rank_assignment.filter_grouped_by_key import FilterCountGroupedByKey, FilterGroupedByKey
from inprocess.rank_assignment.max_active_world_size import MaxActiveWorldSize
from inprocess.rank_assignment.shift_ranks import ShiftRanks
from inprocess.rank_assignment.tree import Layer, LayerFlag, Tree

__all__ = [
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "AssignmentStore",
    "ShiftRanks",
    "FillGaps",
    "ActivateAllRanks",
    "MaxActiveWorldSize",
    "ActiveWorldSizeDivisibleBy",
    "WorldSizeDivisibleBy",
    "FilterCountGroupedByKey",
    "FilterGroupedByKey",
    "Tree",
    "Layer",
    "LayerFlag",
]
