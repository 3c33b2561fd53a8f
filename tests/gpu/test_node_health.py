"""Checks of the GPUs of this machine, by the real NVML."""

from contextlib import closing

import pytest

from inprocess.node_health.interface import FAILED, OK
from inprocess.node_health.messages import NodeCheckSettings
from inprocess.node_health.node_probe import NodeProbe

pytest.importorskip("pynvml")
pytestmark = pytest.mark.gpu


def test_the_gpus_of_this_machine_are_fit() -> None:
    with closing(NodeProbe(NodeCheckSettings(60, limit_s=60, checks_gpus=True, checks_network_cards=True))) as probe:
        found = {result.name: result for result in probe.run()}
    assert found["gpu"].outcome == OK, str(found["gpu"])
    assert FAILED not in {found[name].outcome for name in ("nvlink", "xid", "network card")}
