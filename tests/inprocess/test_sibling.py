"""How often heartbeats are stamped."""

from inprocess.monitor_process.sibling import heartbeat_interval_s


def test_a_small_job_gets_the_interval_it_wants() -> None:
    assert heartbeat_interval_s(1.0, 30.0, 512) == 1.0


def test_a_large_job_stamps_less_often() -> None:
    assert heartbeat_interval_s(1.0, 30.0, 1024) == 2.0
    assert heartbeat_interval_s(1.0, 30.0, 100_000) == 5.0
    assert heartbeat_interval_s(10.0, 30.0, 100_000) == 10.0
