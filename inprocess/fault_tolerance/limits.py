"""Learned limits as a dictionary that is saved, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = ["learned_state", "with_learned"]

_KEY = "current_timeouts"


def learned_state(beats: HeartbeatTimeouts | None, sections: SectionTimeouts | None) -> dict[str, Any]:
    """Return what was learned, and nothing else, as JSON knows it."""
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
    """Return these limits with those of `learned_state` in place of them; names that are not known are left out.

    ValueError for a state that holds something else than numbers.
    """
    current = state.get(_KEY) or {}
    try:
        if current.get("heartbeat"):
            loaded = HeartbeatTimeouts.from_json(current["heartbeat"])
            beats = loaded if loaded.were_calculated else beats
        if current.get("section"):
            sections = _with_sections(sections, SectionTimeouts.from_json(current["section"]))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not the state of limits: {error}") from error
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
