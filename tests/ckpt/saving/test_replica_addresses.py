"""Which address a rank sends its replicas to, and why there may be none."""

import pytest

from ckpt.replication.replica import Address
from ckpt.saving.replica_addresses import addresses_of_buddies, own_address


def at(*hosts: str | None) -> list[Address | None]:
    return [None if host is None else Address(host, 1000 + rank) for rank, host in enumerate(hosts)]


def test_each_rank_sends_to_its_buddy() -> None:
    found = addresses_of_buddies(at("10.0.0.1", "10.0.0.2"), ["a", "b"], ["a", "b"])
    assert found == [Address("10.0.0.2", 1001), Address("10.0.0.1", 1000)]


def test_places_on_one_node_may_use_loopback() -> None:
    assert len(addresses_of_buddies(at("127.0.0.1", "127.0.0.1"), ["rack 0", "rack 1"], ["a", "a"])) == 2


@pytest.mark.parametrize(
    ("hosts", "places", "why"),
    [
        (("10.0.0.1", "10.0.0.1"), ["a", "a"], "all ranks are in one place"),
        (("10.0.0.1", None), ["a", "b"], "rank 1, the buddy of rank 0, can receive none"),
        (("10.0.0.1", "127.0.0.1"), ["a", "b"], "listens at 127.0.0.1: set Snapshots"),
    ],
)
def test_why_there_are_none(hosts: tuple[str | None, ...], places: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        addresses_of_buddies(at(*hosts), places, places)


def test_the_address_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_REPLICA_HOST", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("CKPT_REPLICA_HOST", "10.1.2.3")
    assert own_address() == "10.1.2.3"
