"""The health service of a node, asked by gRPC at a Unix socket."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from inprocess.node_health.interface import FAILED, NOT_APPLICABLE, OK
from inprocess.node_health.messages import NodeCheckSettings
from inprocess.node_health.node_probe import NodeProbe
from tests.support.selection import needs

needs("grpc", "google")


class Service:
    def __init__(self, path: Path) -> None:
        script = str(Path(__file__).with_name("health_service.py"))
        command = [sys.executable, script, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._expect("listening")

    def set(self, **answer: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(answer) + "\n")
        self.process.stdin.flush()
        self._expect("set")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with closing(Service(tmp_path / "nvhcd.sock")) as found:
        yield found


def test_the_service_decides(service: Service, tmp_path: Path) -> None:
    settings = NodeCheckSettings(60, limit_s=20, endpoint=f"unix://{tmp_path}/nvhcd.sock")
    with closing(NodeProbe(settings)) as probe:

        def asked() -> tuple[str, str]:
            (result,) = probe.run()
            assert result.name == "service"
            return result.outcome, result.why

        service.set(success=True, output='{"fail_count": 0, "failed_checks": []}')
        assert asked() == (OK, "")
        service.set(success=True, output='{"fail_count": 2, "failed_checks": ["gpu", "fan"]}')
        assert asked() == (FAILED, "2 failed: ['gpu', 'fan']")
        service.set(success=False, exit_code=-3, output='{"fail_count": 1}', error="no script \u00e4")
        assert asked() == (FAILED, 'no script \u00e4; {"fail_count": 1}')
        service.set(success=True, output="fine" + "!" * 300)
        assert asked() == (FAILED, f"its output is not JSON with a fail_count: {'fine' + '!' * 300!r}")
        service.close()
        found, why = asked()
        assert (found, "no service answers at" in why) == (NOT_APPLICABLE, True), "as where none is installed"


def test_a_service_that_is_late_has_failed(service: Service, tmp_path: Path) -> None:
    service.set(success=True, output='{"fail_count": 0}', sleep_s=60)
    with closing(NodeProbe(NodeCheckSettings(60, limit_s=0.5, endpoint=f"{tmp_path}/nvhcd.sock"))) as probe:
        (result,) = probe.run()
    assert result.outcome == FAILED
    assert "DEADLINE_EXCEEDED" in result.why


def test_where_no_service_is_installed_none_is_asked(tmp_path: Path) -> None:
    with closing(NodeProbe(NodeCheckSettings(60, limit_s=20, endpoint=f"{tmp_path}/none.sock"))) as probe:
        assert probe.run()[0].outcome == NOT_APPLICABLE
