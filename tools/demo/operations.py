"""What an operator sees: train under Prometheus, with a fault, a preemption and a new start; compare the figures.

    make demo-operations

Two ranks train. An exception restarts them in their processes; then a signal to one rank makes both save and end, and
the job is started again, as a scheduler would. What Prometheus has scraped, what `inspect_ckpt report` makes of the
events, and what the ranks themselves have logged must be the same. Prometheus has to be installed.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import ckpt
from tools.bench.processes import free_port
from tools.demo.run import DemoError, Settings, TrainingRun

OUT = Path("demo-out") / "operations"
RULES = Path(__file__).resolve().parents[2] / "docs" / "operations" / "alerts.yml"
STEPS, SAVE_EVERY = 60, 4
FAULT = "10:exception"
PREEMPTED_AFTER = 24
LIMIT_S = 240.0
PREEMPTED = os.EX_TEMPFAIL
_SCRAPE_S = 1.0
_WIDTH = 110  # of tables that do not go to a terminal


def run(console: Console, out: Path = OUT, options: tuple[str, ...] = ()) -> None:
    """Run the scenario. `options` are further ones of train_lm.py. DemoError if a figure is not what it must be."""
    deadline = time.monotonic() + LIMIT_S
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    ports = [free_port(), free_port()]
    with _prometheus(out, ports, deadline) as url:
        stop = _until_preempted(_settings(out, "first", ports[0], url, options), out, deadline)
        console.print(
            f"one exception; then SIGUSR1 to rank 1: both ranks saved step {stop}, and ended with {PREEMPTED}"
        )
        second = _to_the_end(_settings(out, "second", ports[1], url, options), out, deadline)
        begun = second.of("start")[0]["step"]
        if begun != stop:
            raise DemoError(f"the job went on from step {begun}, and not from step {stop}, which it was stopped at")
        console.print(f"started again: went on from step {begun} to step {STEPS}")
        scraped = _scraped(url)
        alerts = _get(url, "/api/v1/rules")["groups"]
    own = _own_counts(out)
    table = Table("counted by", *own, title="both starts, both ranks")
    table.add_row("the ranks", *(f"{own[name]:g}" for name in own))
    table.add_row("Prometheus", *(f"{scraped[name]:g}" for name in own))
    console.print(table)
    for name, value in own.items():
        if scraped[name] != value:
            raise DemoError(f"Prometheus has {scraped[name]:g} for {name}, the ranks have counted {value:g}")
    unhealthy = [rule["name"] for group in alerts for rule in group["rules"] if rule["health"] == "err"]
    if unhealthy or not alerts:
        raise DemoError(f"Prometheus cannot evaluate these rules of {RULES.name}: {unhealthy or 'there are none'}")
    _report(console, out, own)


def _settings(out: Path, name: str, port: int, url: str, options: tuple[str, ...]) -> Settings:
    job = [sys.executable, "-m", "tools.demo.operations_job", str(out), str(port), url, FAULT, "--"]
    launcher = ("tools.demo.launch", "--ranks", "2", "--", *job)
    extra = ("--restart", "--preemptible", "--events", str(out / "events.jsonl"), *options)
    return Settings(name, str(out / "checkpoints"), STEPS, SAVE_EVERY, extra=extra, launcher=launcher)


def _until_preempted(settings: Settings, out: Path, deadline: float) -> int:
    """Run until a signal has ended the job, and return the step at which it stopped."""
    with TrainingRun(settings, out) as run:
        if run.follow(deadline, lambda record: record.get("step", 0) >= PREEMPTED_AFTER) is not None:
            raise DemoError(f"{settings.name}: ended too early\n{run.output()}")
        run.trainers()[1].send_signal(signal.SIGUSR1)
        code = run.follow(deadline, lambda record: False)
        if code != PREEMPTED:
            raise DemoError(f"{settings.name}: ended with {code}, and not with {PREEMPTED}\n{run.output()}")
        run.wait_for_silence(timeout=15)
    (stopped,) = run.of("preempted")
    if not run.is_published(stopped["step"]):
        raise DemoError(f"{settings.name}: step {stopped['step']} was not published before the job ended")
    return int(stopped["step"])


def _to_the_end(settings: Settings, out: Path, deadline: float) -> TrainingRun:
    with TrainingRun(settings, out) as run:
        code = run.follow(deadline, lambda record: False)
        if code != 0:
            raise DemoError(f"{settings.name}: ended with {code}\n{run.output()}")
        run.wait_for_silence(timeout=15)
    return run


# -- figures -----------------------------------------------------------------------------------------------------------


def _own_counts(out: Path) -> dict[str, float]:
    """Return what the ranks have logged themselves, without the events of `ckpt`."""
    records = [json.loads(line) for line in (out / "ranks.jsonl").read_text().splitlines()]
    restored = [record["restored"] for record in records if record["event"] == "start" and record["restored"]]
    from_memory = sum(each["own_memory_bytes"] + each["neighbour_memory_bytes"] for each in restored)
    faults = (out / "faults.jsonl").read_text().splitlines()
    saves = {(record["rank"], record["step"]) for record in records if record["event"] in ("save", "preempted")}
    # A stop may come at a step that is saved anyhow; the exception, when both ranks have staged the save before
    return {
        "saves published": len(saves),
        "saves abandoned": 0,
        "restarts": 2 * len(faults),
        "bytes from memory": from_memory,
        "bytes from storage": sum(each["storage_bytes"] for each in restored),
    }


_QUERIES = {
    "saves published": 'ckpt_saves_total{outcome="published"}',
    "saves abandoned": 'ckpt_saves_total{outcome="abandoned"}',
    "restarts": "ckpt_restarts_total",
    "bytes from memory": 'ckpt_restored_bytes_total{source=~".*_memory"}',
    "bytes from storage": 'ckpt_restored_bytes_total{source="storage"}',
}


def _scraped(url: str) -> dict[str, float]:
    """Return the same figures from Prometheus: a process counts from 0, so the last value of each is added up."""
    return {name: _query(url, f"sum(max_over_time({metric}[1h]))") for name, metric in _QUERIES.items()}


def _report(console: Console, out: Path, own: dict[str, float]) -> None:
    """Make the report, and check its figures."""
    events = str(out / "events.jsonl")
    command = [sys.executable, "-m", "tools.inspect_ckpt", "report", str(out / "checkpoints"), "--events", events]
    page = out / "report.html"
    subprocess.run([*command, "-o", str(page)], check=True, stdout=subprocess.DEVNULL)
    spent = json.loads(subprocess.run([*command, "--goodput", "--json"], check=True, capture_output=True).stdout)
    kinds = [name for name in spent if name.endswith("_s") and name != "wall_s"]
    table = Table("wall time", *(name.removesuffix("_s") for name in kinds), "goodput", title="where the time went")
    table.add_row(f"{spent['wall_s']:.1f} s", *(f"{spent[kind]:.2f} s" for kind in kinds), f"{spent['goodput']:.1%}")
    console.print(table)
    if abs(sum(spent[kind] for kind in kinds) - spent["wall_s"]) > 1e-3:
        raise DemoError(f"the parts of the wall time do not add up: {spent}")
    if not (spent["lost_s"] > 0 and spent["restarting_s"] > 0 and spent["saving_s"] > 0):
        raise DemoError(f"a fault, a new start and saves must have cost time: {spent}")
    stalls = [json.loads(line)["stall_s"] for line in Path(events).read_text().splitlines() if '"SaveStaged"' in line]
    if len(stalls) != own["saves published"]:
        raise DemoError(f"{len(stalls)} saves are in the events, and the ranks have made {own['saves published']:g}")
    with ckpt.Checkpointer(out / "checkpoints", read_only=True) as checkpointer:
        missing = [step for step in checkpointer.all_steps() if str(step) not in page.read_text()]
    if missing:
        raise DemoError(f"{page} does not show the steps {missing}")
    console.print(f"[green]ok[/]: Prometheus, the report and the ranks agree; look at {page}")


# -- Prometheus --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _prometheus(out: Path, ports: list[int], deadline: float) -> Iterator[str]:
    """Run a Prometheus that scrapes these ports, and give its address."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise DemoError("prometheus is not installed: install it, for example by `apt-get install prometheus`")
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    config = out / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: {_SCRAPE_S:g}s, evaluation_interval: {_SCRAPE_S:g}s}}\n"
        f"rule_files: [{json.dumps(str(RULES))}]\n"
        f"scrape_configs: [{{job_name: training, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    url = f"http://127.0.0.1:{free_port()}"
    options = {"config.file": config, "storage.tsdb.path": out / "prometheus", "web.listen-address": url[7:]}
    with (out / "prometheus.txt").open("wb") as output:
        process = subprocess.Popen(
            [binary, *(f"--{name}={value}" for name, value in options.items())], stdout=output, stderr=output
        )
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"prometheus did not start\n{(out / 'prometheus.txt').read_text()}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _query(url: str, query: str) -> float:
    """Return the one number that a query gives; 0 for no data."""
    result = _get(url, "/api/v1/query?" + urllib.parse.urlencode({"query": query}))["result"]
    return float(result[0]["value"][1]) if result else 0.0


def _get(url: str, path: str) -> Any:
    try:
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise DemoError(f"{path}: {error.read().decode(errors='replace')}") from error


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    try:
        run(console)
    except DemoError as error:
        console.print(f"[red]failed[/]: {error}", markup=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
