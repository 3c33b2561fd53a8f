"""How the filters by number divide the live ranks into active ones and spares."""

from __future__ import annotations

from inprocess.state import Mode, State

__all__ = ["active_size", "activate_below"]


def active_size(state: State) -> int:
    """Return how many ranks are active so far: all live ones if nobody has decided, never more than there are.

    The bound matters after a numbering that left the active size of the previous, larger world in the state.
    """
    if state.active_world_size is None:
        return state.world_size
    return min(state.active_world_size, state.world_size)


def activate_below(state: State, size: int) -> None:
    """Make the dense ranks below `size` active with the same number and the others spares."""
    if state.rank is None:
        raise ValueError("a terminated rank can be neither active nor a spare")
    is_active = state.rank < size
    state.active_rank = state.rank if is_active else None
    state.active_world_size = size
    state.mode = Mode.ACTIVE if is_active else Mode.INACTIVE
