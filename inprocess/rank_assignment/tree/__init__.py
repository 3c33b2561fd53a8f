"""Rank assignment along the topology of the job: which ranks fail together, which replace each other.

    layer.py        what the user says about each level
    exchange.py     every rank learns the groups of all ranks (once, through the store)
    nodes.py        the tree itself: nodes, leaves, who is live, active or a spare
    activation.py   who starts active; how the active world shrinks
    replacement.py  what a fault does to the tree
    assignment.py   `Tree`, which ties them together

After the exchange every rank has a copy of the tree and changes it by itself at each restart. The copies stay equal
because a change depends on nothing but the tree and the terminated ranks, which are the same everywhere.
"""

from inprocess.rank_assignment.tree.assignment import Tree
from inprocess.rank_assignment.tree.layer import Layer, LayerFlag

__all__ = ["Layer", "LayerFlag", "Tree"]
