import pytest

from inprocess.ipc.shared_memory import SharedMemory


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[SharedMemory]:
    """The staging slots that are made during the test."""
    made: list[SharedMemory] = []
    create = SharedMemory.create

    def recorded(name: str, size: int) -> SharedMemory:
        region = create(name, size)
        if name.startswith("ckpt-slot"):
            made.append(region)
        return region

    monkeypatch.setattr(SharedMemory, "create", recorded)
    return made
