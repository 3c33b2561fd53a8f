"""Rank assignment: which ranks go on after a fault, under which numbers, and which of them are active.

*Numberings* (`ShiftRanks`, `FillGaps`, `LauncherOrder`) give the survivors dense ranks. *Filters* stand left of them in
`Compose` and decide who is active (`ActivateAllRanks`, `MaxActiveWorldSize`, `ActiveWorldSizeDivisibleBy`);
`FilterCountGroupedByKey` stands right of them and decides who does not survive. `WholeNodes` and `Tree` do all of this
along the topology of the job, alone.
"""

from inprocess.exception import RankDiscarded
from inprocess.rank_assignment.activity import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
    WorldSizeDivisibleBy,
)
from inprocess.rank_assignment.base import RankAssignment, RankAssignmentCtx, RankFilter
from inprocess.rank_assignment.filter_grouped_by_key import FilterCountGroupedByKey, FilterGroupedByKey
from inprocess.rank_assignment.numbering import FillGaps, LauncherOrder, ShiftRanks
from inprocess.rank_assignment.rank_tree import Layer, LayerFlag
from inprocess.rank_assignment.tree import Tree
from inprocess.rank_assignment.whole_nodes import WholeNodes

__all__ = [
    "RankAssignment",
    "RankAssignmentCtx",
    "RankFilter",
    "RankDiscarded",
    "ShiftRanks",
    "FillGaps",
    "LauncherOrder",
    "WholeNodes",
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
