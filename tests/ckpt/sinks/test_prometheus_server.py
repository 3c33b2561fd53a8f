"""A Prometheus server scrapes a running job; the dashboard and the alerts of docs/operations work on it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import ckpt
from ckpt import events
from tests.support import launch_ranks
from tests.support.ranks import free_port

pytest.importorskip("prometheus_client")

from ckpt.sinks import Prometheus

REPOSITORY = Path(__file__).resolve().parents[3]
OPERATIONS = REPOSITORY / "docs" / "operations"
ALERTS_TEST = Path(__file__).with_name("alerts_test.yml")

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs a Prometheus server: apt-get install prometheus",
)


def _until(deadline_s: float, look: Callable[[], Any]) -> Any:
    """Return what `look` returns, as soon as it does not raise AssertionError."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return look()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


class Server:
    """The HTTP API of a Prometheus server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/{path}?{query}", timeout=10) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code == 503:  # the server is only just starting
                raise AssertionError("not ready") from None
            raise ValueError(error.read().decode()) from None
        except OSError as error:
            raise AssertionError(f"no answer: {error}") from None

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """Return the values of an instant query, by the values of their labels other than those of the target."""
        found = self.get("api/v1/query", query=expression)["data"]["result"]
        ignored = {"__name__", "instance", "job"}
        return {
            tuple(value for name, value in sorted(each["metric"].items()) if name not in ignored): float(
                each["value"][1]
            )
            for each in found
        }


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Server]:
    """Run a server that scrapes a port of this host."""
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "500ms"},
        "rule_files": [str(OPERATIONS / "alerts.yml")],
        "scrape_configs": [{"job_name": "training", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        server = Server(port)
        _until(30, lambda: server.get("api/v1/status/buildinfo"))
        yield server
    finally:
        process.kill()
        process.wait()


def _job(rank: int, world_size: int, folder: Path) -> None:
    """Save until told to stop; some saves fail, one restore is made now and then. Print what was counted."""
    import torch.distributed as dist

    seen: list[events.Event] = []
    sink = Prometheus("lm", port=0, directory=folder)
    state = {"w": torch.ones(200_000)}
    with ckpt.observe(sink), ckpt.observe(seen.append) as counting:
        with ckpt.Checkpointer(folder / "root", keep=2) as checkpointer:
            step, stop = 0, torch.zeros(1)
            while not stop:
                step += 1
                with suppress(ckpt.StateError, ckpt.SaveAbandonedError):
                    checkpointer.save(state if step % 7 or rank == 0 else {"w": object()}, step)
                if step % 10 == 0:
                    checkpointer.restore(state)
                if step == 2 and sink.port is not None:
                    print(f"port {sink.port}", flush=True)
                stop.fill_((folder / "stop").exists())
                dist.all_reduce(stop)
        counting.close()
        print(f"stopped {json.dumps(_counted(seen))}", flush=True)
        while not (folder / "end").exists():  # meanwhile the test looks at the metrics
            time.sleep(0.05)


def _counted(seen: list[events.Event]) -> dict[str, float]:
    counts = Counter(type(event).__name__ for event in seen)
    published = [event for event in seen if isinstance(event, events.SavePublished)]
    return {
        **counts,
        "step": max(event.step for event in published),
        "at": max(event.time for event in published),
        "bytes": sum(event.bytes for event in published),
        "stall_s": sum(event.stall_s for event in seen if isinstance(event, events.SaveStaged)),
    }


def _expressions() -> dict[str, str]:
    """The queries of the dashboard as Grafana sends them, by the titles of their panels."""
    dashboard = json.loads((OPERATIONS / "grafana.json").read_text())
    found = {}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "15s").replace("$__range", "1h").replace("$run", "l.*")
            assert "$" not in text, text
            found[f"{panel['id']} {panel['title']} {target['refId']}"] = text
    return found


def _assert_panels_have_data(server: Server) -> None:
    for title, expression in _expressions().items():
        found = server.query(expression)
        assert found, f"{title}: {expression}"
        assert all(value == value for value in found.values()), f"{title}: {found}"  # none is NaN


@needs_prometheus
@pytest.mark.timeout(200)
def test_a_server_has_the_figures_that_the_job_counted(tmp_path: Path) -> None:
    with launch_ranks(_job, 2, tmp_path, init_process_group=True) as group:

        def port() -> int:
            for rank in range(2):
                if match := re.search(r"port (\d+)", group.stdout(rank)):
                    return int(match[1])
            raise AssertionError("no rank serves metrics")

        with prometheus(tmp_path, _until(60, port)) as server:
            _until(60, lambda: _assert_panels_have_data(server))
            (tmp_path / "stop").touch()
            counted = [json.loads(group.wait_for_output(rank, r"stopped (.*)")[1]) for rank in range(2)]
            _until(30, lambda: _assert_figures(server, counted))
            alerts = server.get("api/v1/rules")["data"]["groups"][0]["rules"]
            assert {alert["health"] for alert in alerts} == {"ok"}
        (tmp_path / "end").touch()
        group.wait()


def _assert_figures(server: Server, counted: list[dict[str, float]]) -> None:
    def of_ranks(name: str) -> dict[tuple[str, ...], float]:
        return {(str(rank), "lm"): counts.get(name, 0) for rank, counts in enumerate(counted)}

    for query, name in (
        ("ckpt_saves_started_total", "SaveStarted"),
        ('sum by (run, rank) (ckpt_saves_total{outcome="published"})', "SavePublished"),
        ('sum by (run, rank) (ckpt_saves_total{outcome="abandoned"})', "SaveAbandoned"),
        ('sum by (run, rank) (ckpt_restores_total{outcome="restored"})', "Restored"),
        ("ckpt_save_stall_seconds_count", "SaveStaged"),
        ("ckpt_newest_step", "step"),
        ("ckpt_written_bytes_total", "bytes"),
    ):
        assert server.query(query) == of_ranks(name), query
    for query, name in (
        ("ckpt_newest_step_timestamp_seconds", "at"),
        ("ckpt_save_stall_seconds_sum", "stall_s"),
    ):
        assert server.query(query) == pytest.approx(of_ranks(name)), query
    assert set(server.query("ckpt_saves_in_flight").values()) == {0}
    assert set(server.query("ckpt_events_dropped_total").values()) == {0}


@needs_prometheus
def test_each_alert_fires_where_it_should_and_only_there(tmp_path: Path) -> None:
    rules = OPERATIONS / "alerts.yml"
    subprocess.run(["promtool", "check", "rules", str(rules)], check=True, capture_output=True)
    series = tmp_path / "series.yml"
    series.write_text(ALERTS_TEST.read_text().replace("RULES", str(rules)))
    done = subprocess.run(["promtool", "test", "rules", str(series)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested_and_has_instructions() -> None:
    alerts = [rule["alert"] for rule in yaml.safe_load((OPERATIONS / "alerts.yml").read_text())["groups"][0]["rules"]]
    tests = [case for test in yaml.safe_load(ALERTS_TEST.read_text())["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in tests if case.get("exp_alerts")}
    does_not = {case["alertname"] for case in tests if not case.get("exp_alerts")}
    assert fires == does_not == set(alerts)
    page = (OPERATIONS / "metrics.md").read_text()
    assert [alert for alert in alerts if f"| `{alert}` |" not in page] == []


def test_the_page_lists_the_metrics_that_there_are() -> None:
    from prometheus_client import CollectorRegistry

    from ckpt.sinks.prometheus import Metrics

    registry = CollectorRegistry()
    client = __import__("prometheus_client")
    Metrics(client, "lm", registry)
    kinds = {family.name + ("_total" if family.type == "counter" else ""): family.type for family in registry.collect()}
    page = (OPERATIONS / "metrics.md").read_text()
    assert dict(re.findall(r"^\| `(ckpt_\w+)` \| (\w+) \|", page, re.MULTILINE)) == kinds
    used = set(
        re.findall(r"ckpt_\w+", (OPERATIONS / "grafana.json").read_text() + (OPERATIONS / "alerts.yml").read_text())
    )
    known = {name + suffix for name in kinds for suffix in ("", "_bucket", "_sum", "_count")}
    assert used <= known
