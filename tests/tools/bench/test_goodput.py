"""The simulated fleet: its costs come from documents of other benchmarks, its rates from what was published."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main
from tools.bench.goodput.assumptions import BASE, SCENARIOS, SLOW_STORAGE, Assumptions, Job, rates, rows
from tools.bench.goodput.command import BEGIN, END
from tools.bench.goodput.costs import CopyCost, Costs, costs_from, costs_of
from tools.bench.goodput.simulation import Outcome, simulate, with_best_intervals
from tools.bench.goodput.systems import ASYNC, OURS, STORAGE, systems

_COSTS = Costs(
    save=CopyCost(0.006, 0.9),
    snapshot=CopyCost(0.005, 0.8),
    beside=1.5,
    durable=1.0,
    exception_s=0.07,
    kill_s=0.1,
    noticed_s=0.02,
    server_rank_s=5e-4,
    restore=1.4,
    start_s=3.5,
)
_ASSUMED = SCENARIOS[BASE]
_DAY_S = 86400.0
_SEED = 3


def _outcomes(job: Job, costs: Costs = _COSTS, assumed: Assumptions = _ASSUMED) -> dict[str, Outcome]:
    per_second = rates(job, assumed)
    best = [with_best_intervals(system, per_second) for system in systems(job, costs, assumed)]
    return {system.name: simulate(system, per_second, 2000, _SEED) for system in best}


# -- costs -------------------------------------------------------------------------------------------------------------


def _save_round(copy: float, stall: float, **more: Any) -> dict[str, Any]:
    return {"copy": copy, "disk": 0.5, "added": stall + 0.1, "steady": {"stall": stall, "durable": stall + 0.6}, **more}


def _documents() -> dict[str, Any]:
    """Return documents of the other kinds, without what is not read."""
    return {
        "save": {"rounds": [_save_round(0.1, 0.11), _save_round(0.1, 0.11), _save_round(0.2, 0.9)]},
        "save_small": {"rounds": [_save_round(0.001, 0.01)]},
        "snapshot": {"world_size_1": [{"copy": 0.1, "stall": 0.055}, {"copy": 0.2, "stall": 0.105}]},
        "snapshot_small": {"world_size_1": [{"copy": 0.001, "stall": 0.005}]},
        "restart": {
            "restarts": {
                "exception": [{"running": 0.07, "detected": 0.001}],
                "kill -9": [{"running": 0.1, "detected": 0.02}],
            }
        },
        "recover": {
            "rounds": [
                {
                    "memory": [{"restore": 0.3, "memcpy": 0.2}],
                    "relaunch": [{"phases": {"end and start processes": 1.0, "import": 2.0, "load": 9.0}}],
                }
            ]
        },
        "coordination": {"results": [{"ranks": 512, "one": [{"cpu_s": 0.256, "wall_s": 0.9}]}]},
    }


def test_costs_are_medians_of_what_was_measured() -> None:
    costs = costs_of(_documents())
    assert costs.save == CopyCost(0.01, pytest.approx(1.0))
    assert costs.snapshot == CopyCost(0.005, pytest.approx(0.5))
    assert (costs.beside, costs.durable) == (pytest.approx(1.0), pytest.approx(1.2))
    assert (costs.exception_s, costs.kill_s, costs.noticed_s) == (0.07, 0.1, 0.02)
    assert (costs.server_rank_s, costs.restore, costs.start_s) == (0.0005, pytest.approx(1.5), 3.0)


def test_costs_that_were_written_are_read() -> None:
    assert costs_from(json.loads(json.dumps({"costs": asdict(_COSTS)}))) == _COSTS


# -- assumptions -------------------------------------------------------------------------------------------------------


def test_every_assumption_has_a_unit_and_a_source() -> None:
    for name, value, unit, source in rows(Assumptions()):
        assert value > 0, name
        assert unit, name
        assert len(source) > 10, name


def test_the_rates_are_those_of_llama_3() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs, beside what is assumed of the job as a whole."""
    job = Job(16384, 405e9)
    assert 54 * _DAY_S * sum(rates(job, replace(_ASSUMED, jobs=0.0)).values()) == pytest.approx(419)
    for gpus in (1024, 65536):
        scaled = rates(Job(gpus, 405e9), _ASSUMED)
        assert sum(scaled.values()) == pytest.approx(sum(rates(job, _ASSUMED).values()) * gpus / 16384)
        assert min(scaled.values()) > 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_move_faults_without_losing_any(scenario: str) -> None:
    job = Job(16384, 405e9)
    total, base = (sum(rates(job, assumed).values()) for assumed in (SCENARIOS[scenario], _ASSUMED))
    if "takes" in scenario:
        assert total == pytest.approx(base)
    assert min(rates(job, SCENARIOS[scenario]).values()) >= 0


# -- systems -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [8e9, 400e9])
def test_more_gpus_lose_a_larger_share(parameters: float) -> None:
    found = [_outcomes(Job(gpus, parameters)) for gpus in (1024, 16384, 65536)]
    for name in (STORAGE, ASYNC, OURS):
        goodputs = [outcomes[name].goodput for outcomes in found]
        assert sorted(goodputs, reverse=True) == goodputs, name


def test_a_larger_state_costs_a_job_that_has_only_storage_more() -> None:
    small, large = (_outcomes(Job(16384, parameters))[STORAGE] for parameters in (8e9, 400e9))
    assert large.goodput < small.goodput - 4 * (large.error + small.error)


def test_only_memory_makes_goodput_independent_of_storage() -> None:
    job = Job(16384, 400e9)
    base, slow = _outcomes(job), _outcomes(job, assumed=SCENARIOS[SLOW_STORAGE])
    lost = {name: base[name].goodput - slow[name].goodput for name in base}
    assert lost[OURS] < 0.002 < 0.015 < lost[ASYNC] < lost[STORAGE]


def test_a_snapshot_that_costs_more_is_taken_less_often_and_gives_less() -> None:
    job, dear = Job(16384, 400e9), replace(_COSTS, snapshot=CopyCost(2.0, 0.8))
    per_second = rates(job, _ASSUMED)
    found = [with_best_intervals(systems(job, costs, _ASSUMED)[2], per_second) for costs in (_COSTS, dear)]
    assert found[0].tiers[0].interval < found[1].tiers[0].interval
    assert _outcomes(job, dear)[OURS].goodput < _outcomes(job)[OURS].goodput


def test_no_system_writes_faster_than_the_storage() -> None:
    job = Job(16384, 400e9)
    assert systems(job, replace(_COSTS, durable=0.5), _ASSUMED) == systems(job, _COSTS, _ASSUMED)
    slower = systems(job, replace(_COSTS, durable=2.0), _ASSUMED)
    assert [system.name for system in systems(job, _COSTS, _ASSUMED) if system not in slower] == [ASYNC, OURS]


def test_published_goodput_is_near_that_of_storage_only() -> None:
    """Llama 3: more than 90 % on 16,384 GPUs. FT-HSDP: 44 % on 100,000 with a fault each 18 minutes."""
    assert 0.9 < _outcomes(Job(16384, 405e9))[STORAGE].goodput < 0.97
    job = Job(98304, 405e9)
    often = 24 * 60 / 18 / (_DAY_S * sum(rates(job, _ASSUMED).values()))
    names = ("exceptions", "hangs", "processes", "nodes", "jobs")
    assumed = replace(_ASSUMED, **{name: often * getattr(_ASSUMED, name) for name in names})
    assert sum(rates(job, assumed).values()) == pytest.approx(1 / (18 * 60))
    assert 0.4 < _outcomes(job, assumed=assumed)[STORAGE].goodput < 0.55


# -- command -----------------------------------------------------------------------------------------------------------


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, document, page = tmp_path / "costs.json", tmp_path / "result.json", tmp_path / "benchmarks.md"
    costs.write_text(json.dumps({"costs": asdict(_COSTS)}))
    page.write_text(f"before\n{BEGIN}\nwhat was here\n{END}\nafter\n")
    small = ["goodput", "--gpus", "16384", "1024", "--parameters", "0.1", "--recoveries", "100", "--seed", "5"]
    files = ["--costs", str(costs), "--json", str(document), "--plots", str(tmp_path), "--table", str(page)]
    assert main([*small, *files]) == 0

    result = json.loads(document.read_text())
    assert result["seed"] == 5
    assert costs_from(result) == _COSTS
    assert result["assumptions"] == asdict(_ASSUMED)
    assert len(result["jobs"]) == 3 * (2 + 2 + len(SCENARIOS) - 2)
    for job in result["jobs"]:
        assert 0 < job["goodput"] < 1
        assert job["faults"] >= 100
        assert min(job["intervals"].values()) >= 1
    assert result["jobs"][0]["error"] > 0

    table = capsys.readouterr().out
    assert table.startswith("Seed 5, ")
    assert all(name in table for name in (*SCENARIOS, *(f"`{name}`" for name in result["assumptions"])))
    written = page.read_text()
    assert written.startswith(f"before\n{BEGIN}\n\nSeed 5, ")
    assert written.endswith(f"{END}\nafter\n")
    assert "### Where the time goes" in written
    assert "### What was assumed" not in written
    data = {path.name for path in page.with_suffix("").iterdir()}
    assert {"goodput-what-was-measured.csv", "goodput-what-was-assumed.csv"} < data
    assert len(data) == table.count("### ")
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_a_document_without_costs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(SystemExit, match=r"other\.json"):
        main(["goodput", "--costs", str(path)])


@pytest.mark.parametrize("arguments", [["--gpus", "8"], ["--parameters", "0"], ["--recoveries", "99"]])
def test_invalid_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["goodput", *arguments])
    assert arguments[0] in capsys.readouterr().err


@full_only
@pytest.mark.timeout(600)  # it runs other kinds of measurement seven times
def test_costs_are_measured_once(tmp_path: Path) -> None:
    documents, first, second = tmp_path / "documents", tmp_path / "first.json", tmp_path / "second.json"
    small = ["goodput", "--gpus", "1024", "--parameters", "8", "--recoveries", "100"]
    measured = ["--gb", "0.004", "--rounds", "1", "--documents", str(documents), "--folder", str(tmp_path)]
    assert main([*small, *measured, "--json", str(first)]) == 0
    written = {path.name: path.read_bytes() for path in documents.iterdir()}
    assert main([*small, *measured, "--json", str(second)]) == 0
    assert {path.name: path.read_bytes() for path in documents.iterdir()} == written
    costs = costs_from(json.loads(first.read_text()))
    assert costs == costs_from(json.loads(second.read_text()))
    assert min(costs.exception_s, costs.kill_s, costs.server_rank_s, costs.start_s, costs.restore) > 0
