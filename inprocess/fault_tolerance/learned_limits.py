"""Learned limits: saved in a dictionary, and agreed on by all ranks through a store.

Without a collective, at checkpoints:

    checkpoint n      every rank puts what it has measured into the store under n, and goes on
    a later one       every rank uses the newest earlier checkpoint for which all ranks have done so

No rank waits. Ranks that call it with the same number use the same values, except while a slow rank has not come to an
earlier checkpoint yet: then some use older values until the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalc
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = ["exchange_measured", "learned_state", "with_learned"]

_KEY = "current_timeouts"
_CHECKPOINTS_BACK = 3


def learned_state(beats: HeartbeatTimeouts | None, sections: SectionTimeouts | None) -> dict[str, Any]:
    """Return the learned limits, and nothing else, as JSON values."""
    current: dict[str, Any] = {}
    if beats is not None and beats.were_calculated:
        current["heartbeat"] = beats.to_json()
    if sections is not None and (sections.calculated_sections or sections.is_out_of_section_calculated):
        learned = {name: limit for name, limit in sections.section.items() if name in sections.calculated_sections}
        gap = sections.out_of_section if sections.is_out_of_section_calculated else None
        current["section"] = SectionTimeouts(
            learned, gap, sections.calculated_sections, sections.is_out_of_section_calculated
        ).to_json()
    return {_KEY: current}


def with_learned(
    beats: HeartbeatTimeouts, sections: SectionTimeouts, state: Mapping[str, Any]
) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
    """Return these limits, replaced where `learned_state` has others; unknown names are ignored.

    ValueError if the state is not that of `learned_state`.
    """
    current = state.get(_KEY) or {}
    try:
        if current.get("heartbeat"):
            loaded = HeartbeatTimeouts.from_json(current["heartbeat"])
            beats = loaded if loaded.were_calculated else beats
        if current.get("section"):
            sections = _with_sections(sections, SectionTimeouts.from_json(current["section"]))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a state of learned limits: {error}") from error
    return beats, sections


def _with_sections(sections: SectionTimeouts, loaded: SectionTimeouts) -> SectionTimeouts:
    names = [
        name for name in loaded.calculated_sections if name in sections.section and loaded.section.get(name) is not None
    ]
    gap = loaded.is_out_of_section_calculated
    return SectionTimeouts(
        {**sections.section, **{name: loaded.section[name] for name in names}},
        loaded.out_of_section if gap else sections.out_of_section,
        {*sections.calculated_sections, *names},
        sections.is_out_of_section_calculated or gap,
    )


def exchange_measured(store: Any, calc: TimeoutsCalc, checkpoint: int, rank: int, world_size: int) -> bool:
    """Put what `calc` has measured into the store; have it use what all ranks had measured by an earlier checkpoint.

    `store` has `set`, `get` and `check`, like torch's. False if no earlier checkpoint has values of all ranks.
    """
    store.set(_key(checkpoint, rank), json.dumps(calc.measured()))
    for earlier in range(checkpoint - 1, max(-1, checkpoint - 1 - _CHECKPOINTS_BACK), -1):
        keys = [_key(earlier, rank) for rank in range(world_size)]
        if store.check(keys):
            calc.agree([json.loads(store.get(key)) for key in keys])
            return True
    return False


def _key(checkpoint: int, rank: int) -> str:
    return f"section limits/{checkpoint}/{rank}"
