"""Each line about failing nodes in docs/restart.md is a scenario of the tests."""

from pathlib import Path

from tests.inprocess.nodes.scenarios import SCENARIOS

_RESTART = Path(__file__).parents[2] / "docs" / "restart.md"


def test_every_line_of_the_table_is_a_scenario() -> None:
    names = {scenario.name for scenario in SCENARIOS}
    for title, least in (("### When nodes fail", 10), ("### etcd", 4)):
        text = _RESTART.read_text().split(title)[1].split("###")[0]
        rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")][1:]
        told = [name.strip() for row in rows for name in row.split(";")]
        assert len(rows) >= least
        assert set(told) <= names
