"""The command lists its kinds, and refuses what not all kinds that are named can do."""

from pathlib import Path

import pytest

from tools.bench.__main__ import KINDS, main
from tools.bench.harness import Row, print_table


@pytest.mark.parametrize("option", ["--list", "--help"])
def test_every_kind_is_listed(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed and kind.summary in printed for name, kind in KINDS.items())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_options(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([kind, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["save", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err


def test_an_option_that_one_of_the_kinds_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["save", "restart", "--gb", "0.004"])
    assert "--gb" in capsys.readouterr().err


def test_one_document_for_several_kinds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["save", "validate", "--json", str(tmp_path / "result.json")]) == 2
    assert "--json" in capsys.readouterr().err


def test_a_table_in_a_file_is_as_wide_as_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    title = "a row " * 20 + "with long figures"
    print_table("all", [Row(title, [123_456.789] * 3, [1e-5] * 3, 1.5)])
    assert title in capsys.readouterr().out
