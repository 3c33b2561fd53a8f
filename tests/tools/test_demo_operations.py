"""`make demo-operations`: what Prometheus scraped, what the report says and what the ranks counted is the same."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.selection import full_only

pytest.importorskip("prometheus_client")


@full_only
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
@pytest.mark.timeout(300)
def test_the_scenario(tmp_path: Path) -> None:
    from tools.demo import operations

    output = io.StringIO()
    operations.run(Console(file=output, width=110), tmp_path / "operations")
    assert "Prometheus, the report and the ranks agree" in output.getvalue()
    assert (tmp_path / "operations" / "report.html").exists()
