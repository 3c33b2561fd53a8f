"""Scores of ranks, from summaries of their sections. Pure functions.

    relative      median of the ranks of the same group / median of this rank
    individual    shortest median that this rank had / its median now

Both are between 0 and 1; 1 is as fast as the others, or as ever before. Of an even number of ranks the faster one in
the middle counts, so that of two ranks the slower one is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low

from inprocess.straggler.durations import SectionSummary

STEP = "step"
_LEAST_LOSS = 0.01  # of the median step: a section that costs less is not worth a message, however slow it is


@dataclass(frozen=True, slots=True)
class Contribution:
    """The summary that one rank has published: its group, and its sections by name."""

    group: str
    sections: Mapping[str, SectionSummary]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A section in which a rank is slow. `kind` is "relative" or "individual"; `reference_s` is what it should take."""

    rank: int
    section: str
    kind: str
    score: float
    median_s: float
    reference_s: float

    def __str__(self) -> str:
        compared = "other ranks take" if self.kind == "relative" else "it has taken"
        times = f"{self.median_s:.4g} s, {compared} {self.reference_s:.4g} s"
        return f"rank {self.rank} in {self.section!r}: {times}, score {self.score:.2f}"


@dataclass(frozen=True)
class StragglerReport:
    """Medians of all ranks that published lately, by rank; `silent` are the others.

    `restart_index` is how often the in-process wrapper has restarted the job, 0 without it.
    """

    restart_index: int
    ranks: Mapping[int, Contribution]
    silent: tuple[int, ...]

    @property
    def relative(self) -> dict[str, dict[int, float]]:
        """The relative score of each rank, by section. None of a section that only one rank of a group has."""
        return _scores(self._relative_references())

    @property
    def individual(self) -> dict[str, dict[int, float]]:
        """The individual score of each rank, by section."""
        return _scores(self._individual_references())

    def identify_stragglers(self, relative: float = 0.7, individual: float = 0.7) -> tuple[Straggler, ...]:
        """Return the sections in which a rank has a score below a threshold, lowest score first.

        If steps are measured, a section counts only if the rank loses at least 1 % of a step by it.
        """
        kinds = (
            ("relative", checked_threshold(relative), self._relative_references()),
            ("individual", checked_threshold(individual), self._individual_references()),
        )
        found = [
            Straggler(rank, section, kind, score, summary.median_s, reference_s)
            for kind, threshold, references in kinds
            for section, rank, summary, reference_s in references
            if (score := _score(summary, reference_s)) < threshold
            and self._matters(rank, summary, summary.median_s - reference_s)
        ]
        return tuple(sorted(found, key=lambda each: (each.score, each.rank, each.section, each.kind)))

    def _relative_references(self) -> Iterator[tuple[str, int, SectionSummary, float]]:
        by_section: dict[tuple[str, str], dict[int, SectionSummary]] = {}
        for rank, (group, section, summary) in self._summaries():
            by_section.setdefault((section, group), {})[rank] = summary
        for (section, _), summaries in by_section.items():
            if len(summaries) > 1:
                reference_s = median_low(summary.median_s for summary in summaries.values())
                for rank, summary in summaries.items():
                    yield section, rank, summary, reference_s

    def _individual_references(self) -> Iterator[tuple[str, int, SectionSummary, float]]:
        for rank, (_, section, summary) in self._summaries():
            yield section, rank, summary, summary.best_s

    def _summaries(self) -> Iterator[tuple[int, tuple[str, str, SectionSummary]]]:
        for rank, contribution in self.ranks.items():
            for section, summary in contribution.sections.items():
                yield rank, (contribution.group, section, summary)

    def _matters(self, rank: int, summary: SectionSummary, loss_s: float) -> bool:
        step = self.ranks[rank].sections.get(STEP)
        return step is None or loss_s * summary.count >= _LEAST_LOSS * step.median_s * step.count


def checked_threshold(threshold: float) -> float:
    """Return a threshold of scores. ValueError if no score could be on either side of it."""
    if not 0 < threshold <= 1:
        raise ValueError(f"a threshold of scores is above 0 and at most 1, not {threshold!r}")
    return threshold


def _score(summary: SectionSummary, reference_s: float) -> float:
    return min(1.0, reference_s / summary.median_s) if summary.median_s > 0 else 1.0


def _scores(references: Iterator[tuple[str, int, SectionSummary, float]]) -> dict[str, dict[int, float]]:
    scores: dict[str, dict[int, float]] = {}
    for section, rank, summary, reference_s in references:
        scores.setdefault(section, {})[rank] = _score(summary, reference_s)
    return scores
