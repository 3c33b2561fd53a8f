"""`watch`: show a root while a job saves to it. Reads only; see `live` for what it costs."""

from __future__ import annotations

import argparse
import textwrap
import time
from dataclasses import asdict

from .live import Owner, PendingProgress, RootWatch, Snapshot, StepLine
from .output import CannotReadError, Exit, Frame, Output, count, duration, plural, size

HELP = "show published steps, saves in flight, failures, space and owner of a root, again and again"

_LOOK_SHARE = 10  # between two looks, the time of so many of them passes
_BAR = 24
_REASON = 240  # characters; --json has all of it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root, which need not exist yet")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (default 1)"
    )
    parser.add_argument("--once", action="store_true", help="look once, print it and exit")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    watch = RootWatch(arguments.root)
    if arguments.once:
        found = watch.look()
        if found.problem:
            raise CannotReadError(f"{found.root}: {found.problem}")
        _draw(found, output)
        output.json(asdict(found))
        return Exit.WHOLE
    if not output.on_terminal:
        raise CannotReadError(
            "watch draws on a terminal, with rich (pip install 'ckpt-inprocess[tools]'); or use --once"
        )
    _follow(watch, arguments.interval)
    return Exit.WHOLE


def _follow(watch: RootWatch, interval_s: float) -> None:
    """Draw until Ctrl-C. The last picture stays on the terminal."""
    from rich.console import Group
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as live:
        try:
            while True:
                begin = time.monotonic()
                frame = Frame()
                _draw(watch.look(), frame)
                live.update(Group(*frame.parts), refresh=True)
                time.sleep(max(interval_s, _LOOK_SHARE * (time.monotonic() - begin)))
        except KeyboardInterrupt:
            pass


def _draw(found: Snapshot, output: Output) -> None:
    output.line(f"{found.root}  {time.strftime('%H:%M:%S', time.localtime(found.time))}", "bold")
    if found.problem:
        output.line(f"{found.problem}; waiting", "yellow")
        return
    output.line(_owner(found.owner), "" if found.owner is not None and found.owner.state == "running" else "dim")
    if found.free_bytes is not None:
        fits = "" if found.fits is None else f", room for {plural(found.fits, 'more step')}"
        output.line(f"space: {size(found.free_bytes)} free{fits}", "bold red" if found.fits == 0 else "")
    for save in found.pending:
        _draw_pending(save, output)
    if not found.pending:
        output.line("no save in flight", "dim")
    if found.newest:
        more = f", the newest {len(found.newest)}" if len(found.newest) < found.steps else ""
        output.line(f"published: {plural(found.steps, 'step')}{more}", "bold")
        columns = (">step", ">age", ">size", ">ranks", ">write", ">rate", "note")
        output.table(columns, [_cells(line) for line in found.newest])
    if found.abandoned:
        output.line("abandoned last:", "bold")
        for gone in found.abandoned:
            why = textwrap.shorten(gone.why or "no reason is recorded", _REASON, placeholder=" ...")
            output.line(f"  step {gone.step}, {duration(gone.age_s)} ago: {why}", "red")


def _owner(owner: Owner | None) -> str:
    if owner is None:
        return "owner: none"
    about = {"running": "job is running", "finishing": "job ended, its writers go on", "ended": "job has ended"}
    lease = "" if owner.lease_age_s is None else f", last sign of life {duration(owner.lease_age_s)} ago"
    writers = f", writers of {plural(owner.writers, 'rank')} alive" if owner.writers else ""
    return f"owner: {about[owner.state]}{writers}{lease}: {owner.who}"


def _draw_pending(save: PendingProgress, output: Output) -> None:
    head = f"in flight: step {save.step}, {duration(save.age_s)}"
    if save.ranks is None:
        output.line(f"{head}, not begun by rank 0 yet", "yellow")
        return
    output.line(f"{head}, {count(save.parts)} of {plural(save.ranks, 'rank')} done", "yellow")
    of = "" if save.bytes is None else f" of {'about ' if save.about else ''}{size(save.bytes)}"
    left = ""
    if save.bytes is not None and save.rate > 0 and save.bytes > save.written:
        left = f", {duration((save.bytes - save.written) / save.rate)} left"
    bar = "" if save.bytes is None else f"{_bar(save.written / max(save.bytes, 1), output)} "
    output.line(f"  {bar}{size(save.written)}{of}, {size(save.rate)}/s{left}")
    for rank in save.slowest:
        share = size(rank.written) if rank.bytes is None else f"{_bar(rank.fraction, output)} {size(rank.written)}"
        output.line(f"  rank {rank.rank:<6} {share}", "dim" if rank.fraction >= 1 else "")
    unfinished = save.ranks - save.parts
    if len(save.slowest) < unfinished:
        sample = "" if save.looked_at >= unfinished else f" of {plural(save.looked_at, 'rank')} looked at"
        output.line(f"  the slowest{sample}; {count(unfinished)} in all are not done", "dim")


def _cells(line: StepLine) -> tuple[str, ...]:
    if not line.ranks:
        return str(line.step), duration(line.age_s), "", "", "", "", line.note
    write = "" if line.write_s is None else duration(line.write_s)
    rate = "" if line.rate is None else f"{size(line.rate)}/s"
    note = "pinned" if line.pinned else ""
    return str(line.step), duration(line.age_s), size(line.bytes), count(line.ranks), write, rate, note


def _bar(fraction: float, output: Output) -> str:
    full, empty = ("━", "╌") if output.on_terminal else ("#", "-")
    done = int(_BAR * min(1.0, max(0.0, fraction)))
    return f"[{full * done}{empty * (_BAR - done)}] {100 * min(1.0, fraction):3.0f}%"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return seconds
