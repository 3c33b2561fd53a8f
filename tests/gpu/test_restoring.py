"""Restores to a GPU, from staging memory and from storage. Skipped, cleanly, where there is none."""

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.loading.restore_step import RestoreReport
from tests.support import run_ranks

pytestmark = pytest.mark.gpu


def some_state(seed: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = {f"{n}": torch.randn(300 + n, 70, device=device) for n in range(5)}
    return {**state, "half": torch.randn(999, device=device).bfloat16(), "number": torch.tensor(seed, device=device)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def report_of(checkpointer: ckpt.Checkpointer) -> RestoreReport:
    report = checkpointer.last_restore
    assert report is not None
    return report


def test_from_staging_memory(tmp_path: Path) -> None:
    state = some_state(1)
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(inner_bytes=4096)) as checkpointer:
        checkpointer.save(state, 1)
        other = some_state(2)
        assert checkpointer.restore(other) == 1
        report = report_of(checkpointer)
    assert report.storage_bytes == report.neighbour_memory_bytes == 0
    assert report.own_memory_bytes == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert same(other, state)


def test_views_from_staging_memory(tmp_path: Path) -> None:
    state = {"view": torch.randn(70, 300, device="cuda"), "conjugate": torch.randn(900, dtype=torch.cfloat).cuda()}
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(inner_bytes=4096)) as checkpointer:
        checkpointer.save(state, 1)
        other = {
            "view": torch.zeros(300, 70, device="cuda").t(),
            "conjugate": torch.zeros(900, dtype=torch.cfloat, device="cuda").conj(),
        }
        assert checkpointer.restore(other) == 1
        assert report_of(checkpointer).storage_bytes == 0
    assert torch.equal(other["view"], state["view"])
    assert torch.equal(other["conjugate"], state["conjugate"])


def checkpointer_slots() -> list[Path]:
    """The staging memory of this process."""
    return [
        link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and "ckpt-slot" in str(link.readlink())
    ]


def test_damaged_staging_memory_is_not_used(tmp_path: Path) -> None:
    state = some_state(1)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1)
        for slot in checkpointer_slots():
            with slot.open("r+b", buffering=0) as stream:
                stream.seek(5000)
                stream.write(b"damage")
        other = some_state(2)
        assert checkpointer.restore(other) == 1
        report = report_of(checkpointer)
    assert report.own_memory_bytes == 0
    assert report.storage_bytes > 0
    assert same(other, state)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_more_than_is_read_at_once(tmp_path: Path, compression: str | None) -> None:
    """From storage; rows of one tensor, and one row that is longer than what there is room for at once."""
    torch.manual_seed(1)
    state = {
        "rows": torch.randint(99, (3001, 7001), dtype=torch.int32, device="cuda"),
        "row": torch.randint(99, (1, 12_000_001), dtype=torch.int32, device="cuda"),
        "run": torch.randint(99, (12_000_001,), dtype=torch.int32, device="cuda"),
    }
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(compression=compression)) as checkpointer:
        checkpointer.save(state, 1)
    other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(compression=compression)) as checkpointer:
        assert checkpointer.restore(other) == 1
        assert report_of(checkpointer).storage_bytes == sum(tensor.numel() * 4 for tensor in state.values())
    assert same(other, state)


def sharded(rank: int, world_size: int, whole: torch.Tensor) -> torch.Tensor:
    """As FSDP2 has it; what sends nothing over the process group, for NCCL refuses two ranks on one GPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cuda", (world_size,))
    local = whole.chunk(world_size)[rank].cuda()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def train_two(rank: int, world_size: int, root: Path) -> None:
    from torch.distributed.tensor import DTensor

    torch.cuda.set_device(0)
    torch.manual_seed(5)
    whole, copies = torch.randn(301, 40), torch.randn(50, 60)
    state = {"sharded": sharded(rank, world_size, whole), "copies": copies.cuda()}
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(state, 1)
        assert isinstance(state["sharded"], DTensor)
        state["sharded"].to_local().zero_()
        state["copies"].zero_()
        assert checkpointer.restore(state) == 1
        report = report_of(checkpointer)
        assert report.storage_bytes == 0
        assert report.own_memory_bytes + report.neighbour_memory_bytes == sum(
            tensor.numel() * tensor.element_size() for tensor in (state["sharded"].to_local(), state["copies"])
        )
        assert torch.equal(state["sharded"].to_local().cpu(), whole.chunk(world_size)[rank])
        assert torch.equal(state["copies"].cpu(), copies)


def test_two_ranks_and_then_one(tmp_path: Path) -> None:
    run_ranks(train_two, 2, tmp_path)
    state = {"sharded": torch.zeros(301, 40, device="cuda"), "copies": torch.zeros(50, 60, device="cuda")}
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
    torch.manual_seed(5)
    assert torch.equal(state["sharded"].cpu(), torch.randn(301, 40))
    assert torch.equal(state["copies"].cpu(), torch.randn(50, 60))
