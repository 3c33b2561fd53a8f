"""A store of another kind, and the refusal of one that ignores the conditions of puts: both are real servers."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support import run_ranks
from tests.support.other_object_servers import azure_container, missing_server, s3rver_bucket

pytestmark = pytest.mark.timeout(120)


def _needs(server: str) -> pytest.MarkDecorator:
    missing = missing_server(server)
    return pytest.mark.skipif(missing is not None, reason=str(missing))


_needs_azurite, _needs_s3rver = _needs("azurite-blob"), _needs("s3rver")


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with azure_container(tmp_path_factory.mktemp("server") / "azurite") as container:
        yield container


@pytest.fixture
def azure(
    azurite: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, str]]:
    """The URL of a root of this test, and the environment that opens it."""
    url, env = azurite
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return f"{url}/{tmp_path.name}", env


def _state(step: int, world_size: int = 1) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.arange(64.0 * 300).reshape(-1, 64) * step
    if world_size == 1:
        return {"weight": full, "step": step}
    return {"weight": distribute_tensor(full, init_device_mesh("cpu", (world_size,)), [Shard(0)]), "step": step}


def _save(rank: int, world_size: int, url: str) -> None:
    with ckpt.Checkpointer(url, staging=ckpt.Staging(file_bytes=20_000), keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(_state(step, world_size), step)


@_needs_azurite
def test_azure_saved_on_two_ranks_and_restored_on_one(azure: tuple[str, dict[str, str]]) -> None:
    url, env = azure
    run_ranks(_save, 2, url, env=env)
    state = _state(0)
    with ckpt.Checkpointer(url) as checkpointer:
        assert checkpointer.all_steps() == [2, 3]
        assert checkpointer.restore(state) == 3
        assert torch.equal(state["weight"], _state(3)["weight"])
        assert state["step"] == 3
        checkpointer.delete(2)
        assert checkpointer.all_steps() == [3]
    assert torch.equal(ckpt.load(url)["weight"], _state(3)["weight"])


@_needs_azurite
def test_azure_by_a_writer_that_began_before_the_variables_were_set(
    azurite: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.AsyncCallsQueue() as queue:
        with ckpt.Checkpointer(tmp_path / "first", queue=queue) as checkpointer:
            checkpointer.save(_state(1), 1)
        for name, value in azurite[1].items():
            monkeypatch.setenv(name, value)
        with ckpt.Checkpointer(f"{azurite[0]}/{tmp_path.name}", queue=queue) as checkpointer:
            checkpointer.save(_state(1), 1)
            assert checkpointer.all_steps() == [1]


@_needs_azurite
def test_azure_lets_one_of_two_jobs_own_a_root(azure: tuple[str, dict[str, str]], queue: ckpt.AsyncCallsQueue) -> None:
    job = functools.partial(ckpt.Checkpointer, azure[0], queue=queue)
    with job() as first, job() as second:
        first.save(_state(1), 1)
        second.restore(_state(0))
        second.save(_state(2), 2)
        with pytest.raises(ckpt.FencedError):
            first.save(_state(3), 3)
        assert second.all_steps() == [1, 2]


@_needs_azurite
def test_azure_without_the_container(azure: tuple[str, dict[str, str]]) -> None:
    with (
        ckpt.Checkpointer(
            "az://absent/run7", storage_options={k.lower(): v for k, v in azure[1].items()}
        ) as checkpointer,
        pytest.raises(ckpt.StorageError, match="the container does not exist"),
    ):
        checkpointer.save(_state(1), 1)


@_needs_s3rver
def test_a_store_that_ignores_conditions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: ckpt.AsyncCallsQueue
) -> None:
    with s3rver_bucket(tmp_path / "s3rver") as (url, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with (
            ckpt.Checkpointer(url, queue=queue) as checkpointer,
            pytest.raises(ckpt.StorageError, match="ignores the condition of puts"),
        ):
            checkpointer.save(_state(1), 1)
        assert ckpt.Checkpointer(url, read_only=True).all_steps() == []
