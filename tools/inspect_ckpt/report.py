"""`report`: one page about a root, or only the goodput of its job."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from .findings import Limits, find
from .goodput import PAUSES, Event, Events, goodput, read_events
from .output import CannotReadError, Exit, Output, duration, one_line, size
from .restarts import restarts_of, summary
from .root import any_root
from .sections import report_page

HELP = "write a page about a root: saves over time, slow ranks, changes, health, branches, goodput"

_MOST_RESTARTS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("-o", dest="file", metavar="FILE", default="report.html", help="the page (report.html)")
    parser.add_argument("--events", nargs="+", default=[], metavar="FILE", help="what ckpt.sinks.JsonLines has written")
    parser.add_argument("--goodput", action="store_true", help="only print what the time of --events was for")
    parser.add_argument("--last", type=_positive, default=60, metavar="N", help="show the newest N steps (default 60)")
    parser.add_argument(
        "--validate", type=_number, metavar="N", help="read the newest N steps in full (default: up to 3, and 4 GiB)"
    )
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="compare the tensors of the two newest steps (default: if they have up to 4 GiB)",
    )


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = any_root(arguments.root)
    if arguments.goodput and not arguments.events:
        raise CannotReadError("--goodput needs --events FILE, the lines that ckpt.sinks.JsonLines has written")
    events = read_events(arguments.events) if arguments.events else Events((), 0)
    times = goodput(events.events)
    if arguments.goodput:
        output.table(("", ">time", ">share"), [*times.rows(), ("in all", duration(times.wall_s), "")])
        if any(map(times.seconds, PAUSES)):
            output.line(f"goodput: {times.share}")
        chosen = next((event for event in reversed(events.events) if event["event"] == "PaceChanged"), None)
        if chosen is not None:
            output.line(_pace_line(chosen))
        restarts = restarts_of(events.events)
        if restarts:
            output.line(summary(restarts))
        for restart in restarts[-_MOST_RESTARTS:]:
            output.line(one_line(f"  {restart.at}  {restart.fault_class}: {restart.cause}; {restart.advice}"))
        pace = {} if chosen is None else {"pace": chosen}
        output.json(times.document() | pace | {"restarts": [each.document() for each in restarts]})
        return Exit.WHOLE
    if not os.path.isdir(os.path.dirname(os.path.abspath(arguments.file))):
        raise CannotReadError(f"cannot write {arguments.file}: there is no such directory")
    found = find(root, Limits(arguments.last, arguments.validate, arguments.compare), output)
    page = report_page(found, events, times).encode()
    with open(arguments.file, "wb") as stream:
        stream.write(page)
    output.line(f"wrote {arguments.file} ({size(len(page))})", "bold")
    output.json(
        {
            "root": root.path,
            "file": arguments.file,
            "steps": [step.step for step in found.steps],
            "health": [asdict(health) for health in found.health],
            "goodput": times.document() if events.events else None,
        }
    )
    return Exit.DAMAGED if any(health.state == "damaged" for health in found.health) else Exit.WHOLE


def _pace_line(chosen: Event) -> str:
    """Return what the interval costs that the policy of `save_every` has chosen last, and what a fault destroys."""
    known = (chosen.get(name) for name in ("interval_s", "cost_s", "mtbf_s"))
    interval_s, cost_s, mtbf_s = (
        max(float(value), 1e-6) if isinstance(value, int | float) else 1e-6 for value in known
    )
    return (
        f"saves: every {duration(interval_s)}, by {chosen.get('policy')}; each takes {duration(cost_s)} of training, "
        f"{100 * cost_s / interval_s:.2f}%; a fault every {duration(mtbf_s)} destroys half an interval on average, "
        f"{50 * interval_s / mtbf_s:.2f}%"
    )


def _number(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return number


def _positive(text: str) -> int:
    if not (number := _number(text)):
        raise argparse.ArgumentTypeError("0 is too few")
    return number
