"""Results of a run, and the figures made of them, each with the limit it is compared with and our target."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tools.bench.scale import BYTES, TARGETS, Figures
from tools.bench.systems import SYSTEMS
from tools.bench.systems.jobs import JobResult, Turn

OURS = ("ckpt", "ckpt_reuse")
_WRITER_BYTES = 100e6


@dataclass
class Scenario:
    """The results of one job, or of two that belong together. `failures` says why a system has none."""

    title: str
    kind: str
    total_bytes: float
    world_size: int
    sharded: bool
    turns: JobResult = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Measured:
    """The results of one run. `scale` has the seconds and bytes of the simulated large job, by what was done."""

    scenarios: list[Scenario] = field(default_factory=list)
    scale: dict[str, Figures] = field(default_factory=dict)
    scale_of: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One figure of one kind of job; less is always better.

    `limit` returns what the value is divided by. `target` is what our ratio should not exceed, None if there is none.
    """

    key: str
    title: str
    kind: str
    value: Callable[[Turn], float]
    limit: Callable[[Turn], float] | None = None
    target: float | None = None
    unit: str = "s"


def _value(key: str) -> Callable[[Turn], float]:
    return lambda turn: turn[key]


def _cold_limit(turn: Turn) -> float:
    return min(turn["limit_read_cold_s"], turn["limit_read_direct_s"])


def _bytes_read(turn: Turn) -> float:
    """Return the bytes from calls of read, or those from the device for mapped files if that is more."""
    return max(turn["other_asked_bytes"], turn["other_fetched_bytes"])


_COPY, _NEEDED, _LOCAL = (_value(key) for key in ("limit_copy_s", "limit_copy_needed_s", "other_local_bytes"))

FIGURES = (
    Figure("stall_first", "stall, first save", "saving", _value("stall_first_s"), _COPY, 1.5),
    Figure("stall", "stall, steady", "saving", _value("stall_s"), _COPY, 1.10),
    Figure("extra", "extra time of the step window", "saving", _value("extra_s"), _COPY, 1.5),
    Figure("durable", "durable and committed", "saving", _value("durable_s"), _value("limit_write_s"), 1.0),
    Figure("cold", "load, cold", "saving", _value("load_cold_s"), _cold_limit, 1.10),
    Figure("cold_read", "load, cold: reading alone", "saving", _value("load_cold_read_s"), _cold_limit),
    Figure("warm", "load, warm", "saving", _value("load_warm_s"), _NEEDED, 2.0),
    Figure("warm_read", "load, warm: reading alone", "saving", _value("load_warm_read_s"), _NEEDED),
    Figure("warm_cpu", "load, warm: processor time", "saving", _value("load_warm_cpu_s"), _NEEDED),
    Figure("memory_load", "load from staging memory", "saving", _value("load_memory_s"), _NEEDED, 1.3),
    Figure("memory", "memory beside the state", "saving", _value("memory_bytes"), _value("staged_bytes"), None, "B"),
    Figure("files", "files made", "saving", _value("files"), None, None, ""),
    Figure("fsyncs", "calls of fsync", "saving", _value("fsyncs"), None, None, ""),
    Figure("file_bytes", "bytes in files written", "saving", _value("file_bytes"), _value("staged_bytes"), None, "B"),
    Figure("small_stall", "small tensors, stall", "small", _value("many_stall_s"), _value("one_stall_s"), 1.5),
    Figure("small", "small tensors, durable", "small", _value("many_durable_s"), _value("one_durable_s"), 3.0),
    Figure("small_files", "small tensors, files", "small", _value("many_files"), None, None, ""),
    Figure("reshard", "load resharded", "reshard_load", _value("other_load_cold_s"), _value("same_load_cold_s"), 1.3),
    Figure("reshard_bytes", "bytes read, resharded", "reshard_load", _bytes_read, _LOCAL, 1.10, "B"),
)


@dataclass(frozen=True)
class Verdict:
    """Whether our figure met its target, and which peers were ahead of us.

    `spread` is the least and the most of the rounds. `job` is what was measured, `system` which of ours, and empty
    where there is only one.
    """

    job: str
    system: str
    title: str
    median: float
    spread: tuple[float, float]
    target: float | None
    met: bool | None
    ahead: tuple[str, ...] = ()
    compared: bool = False
    unit: str = ""

    @property
    def where(self) -> str:
        """Job and system."""
        return ", ".join(filter(None, (self.job, self.system)))


def values_of(scenario: Scenario, figure: Figure, system: str) -> list[float]:
    """Return the value of each round; empty if the system has no such figure."""
    turns = scenario.turns.get(system, [])
    try:
        return [figure.value(turn) for turn in turns]
    except KeyError:
        return []


def ratios_of(scenario: Scenario, figure: Figure, system: str) -> list[float]:
    """Return the ratio to the limit in each round; empty without a limit."""
    values = values_of(scenario, figure, system)
    if figure.limit is None:
        return []
    return [v / figure.limit(turn) for v, turn in zip(values, scenario.turns.get(system, []), strict=False)]


def verdicts(measured: Measured) -> list[Verdict]:
    """Compare every figure of every job with its target and with peers."""
    found = []
    for scenario in measured.scenarios:
        for figure in (figure for figure in FIGURES if figure.kind == scenario.kind):
            for system in OURS:
                values = values_of(scenario, figure, system)
                if values:
                    found.append(_verdict(scenario, figure, system, values))
    return found + _scale_verdicts(measured)


def _verdict(scenario: Scenario, figure: Figure, system: str, values: list[float]) -> Verdict:
    ratios = ratios_of(scenario, figure, system)
    shown = ratios or values
    target = _target(scenario, figure, system)
    met = None if target is None else median(shown) <= target
    peers = {name: values_of(scenario, figure, name) for name in scenario.turns if name not in OURS}
    ahead = [SYSTEMS[name].title for name, theirs in peers.items() if theirs and median(theirs) < median(values)]
    unit = "x" if ratios else figure.unit
    spread = (min(shown), max(shown))
    return Verdict(
        scenario.title,
        SYSTEMS[system].title,
        figure.title,
        median(shown),
        spread,
        target,
        met,
        tuple(ahead),
        any(peers.values()),
        unit,
    )


def _target(scenario: Scenario, figure: Figure, system: str) -> float | None:
    """Memory may be two slots, 5 %, and 100 MB for each writer; 10,000 small tensors may be in 200 files."""
    if figure.key == "memory":
        staged = median(turn["staged_bytes"] for turn in scenario.turns[system])
        return 1.05 * SYSTEMS[system].slots + _WRITER_BYTES * scenario.world_size / staged
    if figure.key == "durable" and system == "ckpt_reuse":
        return 0.7
    return 200.0 if figure.key == "small_files" else figure.target


def _scale_verdicts(measured: Measured) -> list[Verdict]:
    """Compare the simulated large job with its targets, in seconds and bytes."""
    of, found = measured.scale_of, []
    for what, key, title, target in TARGETS:
        if values := measured.scale.get(what, {}).get(key, []):
            many = f"{of.get('ranks')} ranks" if what == "planning" else f"{of.get('parts')} parts"
            job, unit = f"{of.get('tensors')} tensors, {many}", "B" if key in BYTES else "s"
            middle, spread = median(values), (min(values), max(values))
            found.append(Verdict(job, "", title, middle, spread, target, middle <= target, unit=unit))
    return found
