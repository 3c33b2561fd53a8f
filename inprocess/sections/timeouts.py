"""Limits of heartbeats and sections, as users read and save them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

STEP = "step"  # the section whose limit may be another one in the first iterations
WARMUP = "warmup"  # the name under which that limit is configured


@dataclass(frozen=True)
class HeartbeatTimeouts:
    """Seconds to the first beat and between beats; None: never late."""

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool = False

    @property
    def are_valid(self) -> bool:
        """Whether both are set."""
        return self.initial is not None and self.subsequent is not None

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON knows them."""
        return {"initial": self.initial, "subsequent": self.subsequent, "were_calculated": self.were_calculated}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HeartbeatTimeouts:
        """Read what `to_json` returned; missing and unknown keys are accepted."""
        return cls(
            _seconds(values.get("initial")),
            _seconds(values.get("subsequent")),
            bool(values.get("were_calculated", False)),
        )


@dataclass(frozen=True)
class SectionTimeouts:
    """Seconds that each section, by name, and the time outside all sections may take; None: never late.

    `calculated_sections` (any collection; kept as a set) and `is_out_of_section_calculated` say what was learned.
    """

    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: Collection[str] = frozenset()
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "section", dict(self.section))
        object.__setattr__(self, "calculated_sections", set(self.calculated_sections))

    @property
    def were_calculated(self) -> bool:
        """Whether every limit was learned."""
        return self.is_out_of_section_calculated and set(self.calculated_sections) >= set(self.section)

    @property
    def are_valid(self) -> bool:
        """Whether every limit is set."""
        return self.out_of_section is not None and None not in self.section.values()

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON knows them."""
        return {
            "section": dict(self.section),
            "out_of_section": self.out_of_section,
            "calculated_sections": sorted(self.calculated_sections),
            "is_out_of_section_calculated": self.is_out_of_section_calculated,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SectionTimeouts:
        """Read what `to_json` returned; missing and unknown keys are accepted."""
        return cls(
            {str(name): _seconds(limit) for name, limit in dict(values.get("section") or {}).items()},
            _seconds(values.get("out_of_section")),
            {str(name) for name in values.get("calculated_sections") or ()},
            bool(values.get("is_out_of_section_calculated", False)),
        )


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
