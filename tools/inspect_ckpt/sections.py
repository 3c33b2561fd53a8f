"""The page that `report` writes: what was found in a root, section by section."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from types import MappingProxyType

from .charts import Lane, Mark, Node, lineage, over_time, ranks
from .findings import Findings, SavedStep
from .goodput import WORDS, Event, Events, Goodput
from .output import count, duration, plural, size
from .page import Markup, bar, details, join, legend, page, pill, section, table, text, tiles
from .restarts import Restart, of_lowest_rank, restarts_of, summary
from .root import origin_of

_SHOWN = 12
_MOST_NODES = 100
_MOST_RESTARTS = 200
_PHASES = (
    ("plan, wait for a slot", "wait_s", "f"),
    ("stage", "stage_s", "b"),
    ("queue", "queue_s", "e"),
    ("write", "write_s", "a"),
    ("sync", "sync_s", "g"),
    ("commit", "commit_s", "d"),
)
_TONES = MappingProxyType(
    {"training": "a", "lost": "f", "saving": "b", "restarting": "d", "restoring": "c", "requeued": "g"}
    | {"not_running": "e"}
)
_STATES = MappingProxyType({"whole": "good", "damaged": "bad", "unreadable": "warn"})


def report_page(found: Findings, events: Events, times: Goodput) -> Markup:
    """Return the page about what was found in a root, and about its job if there are events."""
    name = os.path.basename(os.path.abspath(found.root)) or found.root
    parts = [_tiles(found, times), _timeline(found, events.events)]
    if times.wall_s:
        parts.append(_goodput(times, events))
    if restarts := restarts_of(events.events):
        parts.append(_restarts(restarts))
    parts += [_saves(found), _ranks(found), _changes(found), _health(found), _lineage(found), _kept(found)]
    versions = (found.readable[-1].summary or {})["versions"] if found.readable else {}
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(found.time))
    with_versions = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
    where = found.root if "://" in found.root else f"{os.path.abspath(found.root)} on {os.uname().nodename}"
    about = f"{where}, as of {made}"
    return page(
        f"Checkpoints of {name}",
        about,
        parts,
        f"inspect_ckpt report. The newest step was saved with {with_versions or 'unknown versions'}.",
    )


def _tiles(found: Findings, times: Goodput) -> Markup:
    saves = [step.times for step in found.steps if step.times is not None]
    values = [("published steps", count(len(found.steps) + found.older), "", "")]
    if found.steps:
        newest = found.steps[-1]
        age = duration(max(0.0, found.time - newest.published_at))
        values.append(("newest step", str(newest.step), f"published {age} ago", ""))
        if newest.summary is not None:
            on = f"{count(newest.summary['tensors'])} arrays, {plural(newest.summary['world_size'], 'rank')}"
            values.append(("size of a step", size(newest.bytes), on, ""))
    if saves:
        stalls = [save.stall_s for save in saves]
        values.append(("stall of a save", duration(median(stalls)), f"median; longest {duration(max(stalls))}", ""))
        rates = [save.rate for save in saves]
        values.append(("write and sync", f"{size(median(rates))}/s", f"median; slowest {size(min(rates))}/s", ""))
    if found.health:
        newest_health = found.health[0]
        values.append(
            ("newest step is", newest_health.state, f"checked: {newest_health.how}", _STATES[newest_health.state])
        )
    if times.wall_s:
        values.append(("goodput", f"{100 * times.goodput:.1f}%", f"of {duration(times.ran_s)}", ""))
    return tiles(values)


def _timeline(found: Findings, events: Sequence[Event]) -> Markup:
    saves = [
        Mark(
            step.times.begin,
            step.published_at,
            "a",
            f"step {step.step}: {duration(step.published_at - step.times.begin)} until published",
        )
        for step in found.steps
        if step.times is not None
    ]
    gone = [
        Mark(found.time - save.age_s, found.time - save.age_s, "f", f"step {save.id.step}: {save.note}")
        for save in found.abandoned
    ]
    known = {save.id.step for save in found.abandoned}
    gone += [
        Mark(event["time"], event["time"], "f", f"step {event['step']}: {event.get('kind')}: {event.get('cause')}")
        for event in of_lowest_rank(events, "SaveAbandoned")
        if event["step"] not in known
    ]
    began = [
        Mark(
            token / 1000,
            token / 1000,
            "d",
            f"a start or restart of the job claimed the root, and saved step {step.step} first",
        )
        for token, step in _owners(found.readable)
    ]
    restarts = [
        _mark(event, "d", f"restart {event.get('iteration')}: {event.get('cause')}")
        for event in of_lowest_rank(events, "Restarted")
    ]
    restores = [
        _mark(event, "c", f"step {event['step']} restored in {duration(event['seconds'])}")
        for event in of_lowest_rank(events, "Restored")
    ]
    rows = [
        ("saves", saves),
        ("abandoned", gone),
        ("claims", began),
        ("restarts", restarts),
        ("restores", restores),
    ]
    lanes = [Lane(name, marks) for name, marks in rows if marks]
    if not lanes:
        return section("Over time", "There is nothing to draw.")
    about = "Each save from its call until it was published, as recorded in the steps that are there."
    return section("Over time", about, over_time(lanes))


def _mark(event: Event, tone: str, title: str) -> Mark:
    return Mark(event["time"] - event["seconds"], event["time"], tone, title)


def _owners(steps: Sequence[SavedStep]) -> list[tuple[int, SavedStep]]:
    """Return the first step of each owner of the root, and the token, which is the time of its claim in ms."""
    groups = groupby(steps, key=lambda step: int((step.summary or {})["owner"]))
    return [(token, next(group)) for token, group in groups if 10**12 < token < 10**14]


def _saves(found: Findings) -> Markup:
    timed = [(step, step.times) for step in found.steps if step.times is not None]
    if not timed:
        return section("Saves", "There is no step with times.")

    def row(step: SavedStep) -> tuple[str | Markup, ...]:
        save = step.times
        assert save is not None
        lengths = [
            (getattr(save, name) or 0.0, tone, f"{word}: {duration(getattr(save, name) or 0.0)}")
            for word, name, tone in _PHASES
        ]
        cells = (
            size(save.bytes),
            duration(save.stall_s),
            duration(sum(each for each, _, _ in lengths)),
            f"{size(save.rate)}/s",
        )
        return (str(step.step), bar(lengths, longest), *cells)

    longest = max(sum(getattr(save, name) or 0.0 for _, name, _ in _PHASES) for _, save in timed)
    rows = [row(step) for step, _ in reversed(timed)]
    columns = (">step", "from the call until it is published", ">size", ">stall", ">in all", ">rate")
    parts = [legend([(word, tone) for word, _, tone in _PHASES]), table(columns, rows[:_SHOWN], markup=(1,))]
    if len(rows) > _SHOWN:
        parts.append(details(f"{len(rows) - _SHOWN} older ones", table(columns, rows[_SHOWN:], markup=(1,))))
    about = "Of each part the slowest rank. Training waits for the first two only, which are the stall."
    return section("Saves", about, *parts)


def _ranks(found: Findings) -> Markup:
    newest = next((step for step in reversed(found.steps) if step.parts), None)
    if newest is None:
        return section("Ranks", "No times of ranks are recorded.")
    seconds = [part.write_s + part.sync_s for part in newest.parts]
    order = sorted(range(len(seconds)), key=lambda rank: -seconds[rank])[:5]
    rows = []
    for rank in order:
        part = newest.parts[rank]
        rows.append(
            (str(rank), duration(seconds[rank]), duration(part.write_s), duration(part.sync_s), duration(part.stall_s))
        )
    often = _often_slowest(found)
    about = f"Step {newest.step}: how long each rank wrote and synced its part. {often}"
    return section(
        "Ranks", about, ranks(seconds, "rank"), table((">rank", ">write and sync", ">write", ">sync", ">stall"), rows)
    )


def _often_slowest(found: Findings) -> str:
    """Say which rank was the slowest most often, if one was much more often than by chance."""
    steps = [
        step for step in found.steps if len(step.parts) > 1 and len(step.parts) == (step.summary or {})["world_size"]
    ]
    slowest = [max(range(len(step.parts)), key=lambda rank: step.parts[rank].written) for step in steps]
    if len(slowest) < 4:
        return ""
    rank = max(set(slowest), key=slowest.count)
    share = slowest.count(rank) / len(slowest)
    if share < max(0.5, 3 / len(steps[-1].parts)):
        return ""
    return f"Rank {rank} was the last to be done in {slowest.count(rank)} of {len(slowest)} saves."


def _changes(found: Findings) -> Markup:
    if not found.changes:
        return section("Changes", found.compared)
    most = max(
        (change.relative for change in found.changes if change.relative is not None and change.order < 1e300),
        default=0.0,
    )
    rows: list[tuple[str | Markup, ...]] = []
    for change in found.changes[:_SHOWN]:
        relative, largest, elements, what = change.cells()
        length = bar([(min(change.relative or 0.0, most), "a", f"{relative or 'not a number'}")], most)
        rows.append((change.name, length, relative, largest, elements, what))
    columns = ("tensor", "relative change", ">", ">largest", ">elements", "what")
    about = f"{found.compared} Relative: norm of the difference / norm before; largest: of |a - b|."
    return section("Changes", about, table(columns, rows, markup=(1,)))


def _health(found: Findings) -> Markup:
    rows = [(str(each.step), pill(each.state, _STATES[each.state]), each.how, each.note) for each in found.health]
    parts = [table((">step", "state", "checked", "note"), rows, markup=(1,))] if rows else []
    lost = [(str(step.step), step.problem) for step in found.steps if step.problem]
    if lost:
        parts.append(table((">step", "cannot be read"), lost))
    waiting = [("pending", save) for save in found.pending] + [("abandoned", save) for save in found.abandoned]
    if waiting:
        lines = [(str(save.id.step), state, duration(save.age_s), save.note[:400]) for state, save in waiting]
        parts.append(table((">step", "not published", ">age", "note"), lines))
    return section("Health", "The newest steps." if rows else "There is no step to check.", *parts)


def _lineage(found: Findings) -> Markup:
    nodes = []
    owners = {id(step) for _, step in _owners(found.readable)}
    for step in found.readable:
        summary = step.summary or {}
        before = summary["continues"] or {}
        restart = "" if summary["restart"] is None else f", restart {summary['restart']}"
        title = f"step {step.step}{restart}, saved {_at(step.published_at)}"
        nodes.append(Node(summary["save"], before.get("save"), step.step, "a", title, id(step) in owners))
    for gone in found.moved:
        tone = "f" if gone.why == "damaged" else "e"
        save, before = origin_of(gone)
        title = f"step {gone.step}: {gone.why}, {gone.name}"
        nodes.append(Node(save or gone.name, str(before.get("save")), gone.step, tone, title))
    nodes = list({node.key: node for node in nodes}.values())
    if not nodes:
        return section("Branches", "There is no step.")
    nodes = sorted(nodes, key=lambda node: (node.step, node.tone != "a"))[-_MOST_NODES:]
    branches = sum(step.why == "superseded" for step in found.moved)
    about = (
        "Training went on in one line."
        if not branches
        else f"{plural(branches, 'step')} of other branches were moved aside."
    )
    key = legend(
        [
            ("published", "a"),
            ("of another branch", "e"),
            ("was damaged", "f"),
            ("ring: the first after a start or restart", "d"),
        ]
    )
    return section("Branches", about, key, lineage(nodes))


def _kept(found: Findings) -> Markup:
    pinned = [step.step for step in found.steps if step.pinned]
    pins = f"pinned: {', '.join(map(str, pinned))}" if pinned else "none is pinned"
    total = sum(step.bytes for step in found.steps)
    older = f" (the newest of {len(found.steps) + found.older})" if found.older else ""
    about = f"{plural(len(found.steps), 'step')}{older} with {size(total)} of tensors; {pins}."
    rows: list[tuple[str | Markup, ...]] = []
    for step in reversed(found.steps):
        summary = step.summary or {}
        metrics = json.dumps(summary["metrics"], ensure_ascii=False)[:200] if summary.get("metrics") else ""
        mark = pill("pinned", "b") if step.pinned else text("")
        rows.append((str(step.step), _at(step.published_at), size(step.bytes), mark, metrics))
    columns = (">step", "published", ">size", "", "metrics")
    parts = [table(columns, rows[:_SHOWN], markup=(3,))] if rows else []
    if len(rows) > _SHOWN:
        parts.append(details(f"{len(rows) - _SHOWN} older ones", table(columns, rows[_SHOWN:], markup=(3,))))
    return section("What is kept", about, *parts)


def _goodput(times: Goodput, events: Events) -> Markup:
    lengths = [
        (times.seconds(kind), _TONES[kind], f"{about}: {duration(times.seconds(kind))}")
        for kind, about in WORDS.items()
    ]
    marks = [
        Mark(span.begin, span.end, _TONES[span.kind], f"{span.kind}: {duration(span.end - span.begin)}")
        for span in sorted(times.spans, key=lambda span: span.kind != "training")
    ]
    skipped = f" {plural(events.skipped, 'line')} of the files were no events." if events.skipped else ""
    about = f"{times.share}, from the first event to the last, was training that counted."
    parts = [bar(lengths, times.wall_s), legend([(about, _TONES[kind]) for kind, about in WORDS.items()])]
    drawing = over_time([Lane("time", marks)])
    return section("Goodput", about + skipped, join(parts), drawing, table(("", ">time", ">share"), times.rows()))


def _restarts(restarts: Sequence[Restart]) -> Markup:
    rows = [
        (each.at, each.iteration, each.fault_class, each.cause, each.evidence, each.advice)
        for each in reversed(restarts)
    ]
    columns = ("restarted", ">iteration", "class", "cause: the rank that was first", "evidence", "what to do")
    parts = [table(columns, rows[:_SHOWN])]
    if len(rows) > _SHOWN:
        parts.append(details(f"{len(rows) - _SHOWN} older ones", table(columns, rows[_SHOWN:_MOST_RESTARTS])))
    return section("Restarts", f"{summary(restarts)}.", *parts)


def _at(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
