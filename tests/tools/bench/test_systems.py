"""The comparison of systems runs once, with the smallest sizes, and its tables, plots and document are complete."""

import json
import re
from pathlib import Path

import pytest

from tests.support.selection import full_only
from tools.bench.__main__ import main
from tools.bench.harness import publish, replace_between_markers
from tools.bench.systems import SYSTEMS
from tools.bench.systems.figures import Measured, Scenario, Verdict, verdicts
from tools.bench.systems.report import BEGIN, END

_OURS = ("stall, first save", "stall, steady", "extra time of the step window", "durable and committed", "load, cold")


@full_only
@pytest.mark.timeout(600)
def test_every_job_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk, result, plots = tmp_path / "disk", tmp_path / "result.json", tmp_path / "plots"
    disk.mkdir()
    document = tmp_path / "benchmarks.md"
    document.write_text(f"before\n{BEGIN}\nwhat was here\n{END}\nafter\n")
    command = ["systems", "--tiny", "--systems", "ckpt,dcp", "--folder", str(disk), "--json", str(result)]
    assert main([*command, "--plots", str(plots), "--table", str(document), "--note", "A test."]) == 0
    assert list(disk.iterdir()) == []

    read = json.loads(result.read_text())
    assert [scenario["kind"] for scenario in read["scenarios"]] == ["saving", "small", "reshard_load"]
    for scenario in read["scenarios"]:
        assert scenario["failures"] == {}
        assert set(scenario["turns"]) == {"ckpt", "dcp"}
        assert all(len(turns) == 1 for turns in scenario["turns"].values())
    ours = read["scenarios"][0]["turns"]["ckpt"][0]
    assert ours["fsyncs"] > ours["files"] > 10
    assert ours["file_bytes"] > 0.9 * ours["staged_bytes"]
    assert ours["memory_bytes"] > ours["staged_bytes"]
    assert all(value > 0 for key, value in ours.items() if key.endswith("_s") and key != "extra_s")
    assert set(read["scale"]) == {"planning", "commit", "open"}

    titles = {verdict["title"] for verdict in read["verdicts"]}
    assert titles.issuperset(_OURS)
    assert {picture.name for picture in plots.iterdir()} == {"systems-1.png", "targets.png"}
    written = capsys.readouterr().out
    assert main(["--from-json", str(result), "--note", "A test."]) == 0
    assert capsys.readouterr().out == written
    table = document.read_text()
    assert table.startswith("before\n")
    assert table.endswith("after\n")
    assert "what was here" not in table
    assert "### In short" in table
    assert "### Targets" not in table
    targets = (tmp_path / "benchmarks" / "systems-targets.csv").read_text()
    assert all(title in targets for title in titles)
    assert "A test." in written


def _turn(stall: float, copy: float) -> dict[str, float]:
    return {"stall_s": stall, "limit_copy_s": copy}


def _stall(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> Verdict:
    scenario = Scenario("1 GB", "saving", 1e9, 1, False, {"ckpt": ours, "dcp": theirs})
    found = [verdict for verdict in verdicts(Measured([scenario])) if verdict.title == "stall, steady"]
    assert len(found) == 1
    return found[0]


def test_a_ratio_is_the_median_of_those_within_a_round() -> None:
    ours = [_turn(1.0, 1.0), _turn(10.0, 9.0), _turn(1.0, 5.0)]
    verdict = _stall(ours, [_turn(2.0, 1.0)])
    assert (verdict.median, verdict.spread) == (1.0, (0.2, 10 / 9))
    assert verdict.met
    assert verdict.ahead == ()


def test_a_missed_target_and_a_faster_peer_are_said() -> None:
    verdict = _stall([_turn(3.0, 1.0)], [_turn(2.0, 1.0)])
    assert verdict.met is False
    assert verdict.ahead == (SYSTEMS["dcp"].title,)


def test_a_document_without_markers_stays(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("nothing here\n")
    with pytest.raises(ValueError, match=re.escape(BEGIN)):
        replace_between_markers(path, "new", BEGIN, END)
    assert path.read_text() == "nothing here\n"


def test_a_page_gets_what_decides_and_tables_are_data_beside_it(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "page"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    folder.mkdir()
    (folder / "run-of-before.csv").write_text("")
    (folder / "other.png").write_text("")
    short = "All of it.\n\n### In short\n\n| | a, b |\n|---|---|\n| **x** | 1 |"
    rest = "### The rest, too\n\n| c |\n|---|\n| 2 |\n\nSaid."
    publish(page, f"{short}\n\n{rest}", BEGIN, END, "run", {"In short"})
    assert page.read_text() == f"before\n{BEGIN}\n\n{short}\n\n{END}\nafter\n"
    assert {path.name for path in folder.iterdir()} == {"other.png", "run-in-short.csv", "run-the-rest-too.csv"}
    assert (folder / "run-in-short.csv").read_text() == ',"a, b"\nx,1\n'
    assert (folder / "run-the-rest-too.csv").read_text() == "c\n2\nSaid.\n"


def test_the_page_of_benchmarks_is_short_and_links_its_data() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    page = (docs / "benchmarks.md").read_text()
    assert len(page.split()) < 1500
    linked = re.findall(r"\]\(([\w-]+\.csv)\)", (docs / "benchmarks" / "methods.md").read_text())
    assert set(linked) == {path.name for path in (docs / "benchmarks").glob("*.csv")}


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--systems", "abacus"], ["--gb", "0"], ["--full", "--tiny"], ["--only", "rest"]]
)
def test_invalid_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err
