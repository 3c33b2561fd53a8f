"""The adapter for accelerate: jobs that are killed go on as if nothing had happened, bit for bit."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import ckpt
from tests.ckpt.integrations.jobs import KILLED, Ended, Job, assert_continued, run_program
from tests.support.loads import stopped_until_a_load_waits
from tests.support.selection import FULL, full_only, needs

needs("accelerate", "transformers", "peft")

pytestmark = pytest.mark.timeout(300)  # the first test waits for all jobs

ONE = [
    Job("whole", "whole"),
    Job("killed", "one", "kill:8"),
    Job("resumed", "one"),
    Job("whole-lora", "whole-lora", "lora"),
    Job("killed-lora", "lora", "lora kill:8"),
    Job("resumed-lora", "lora", "lora"),
    Job("killed-stateful", "stateful", "stateful kill:8"),
    Job("resumed-stateful", "stateful", "stateful"),
]
ACCUMULATING = [
    Job("whole-accumulate", "whole-accumulate", "accumulate"),
    Job("killed-accumulate", "accumulate", "accumulate kill:8"),
    Job("resumed-accumulate", "accumulate", "accumulate"),
]
TWO = [
    Job("whole", "whole", ranks=2),
    Job("killed", "two", "kill-saving:9", ranks=2),
    Job("resumed", "two", ranks=2),
]
DIED = [Job("died", "died", "kill:9@1", ranks=2), Job("went-on", "died", ranks=2)]
"""A rank that dies alone, and gradients that accumulate: with TESTS=full, `test_transformers` has them otherwise."""
FSDP = [
    Job("whole", "whole", "fsdp", ranks=2),
    Job("killed", "two", "fsdp kill:8", ranks=2),
    Job("resumed", "two", "fsdp", ranks=2),
    Job("on-1", "two", "steps:15"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Ended]:
    return run_program("accelerate_train.py", folder, [*ONE, *(ACCUMULATING if FULL else [])], timeout=280)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_program(
        "accelerate_train.py", tmp_path_factory.mktemp("two"), [*TWO, *(DIED if FULL else [])], timeout=280
    )


def test_a_killed_job_goes_on_from_the_last_save(one: dict[str, Ended]) -> None:
    assert one["killed"].codes == [KILLED]
    assert_continued(one["whole"], one["resumed"], start=6)


def test_of_a_model_with_adapters_only_they_are_saved(one: dict[str, Ended], folder: Path) -> None:
    assert_continued(one["whole-lora"], one["resumed-lora"], start=6)
    with ckpt.open(folder / "lora") as checkpoint:
        names = [name for name in checkpoint if name.startswith("model/")]
        assert len(names) == 8
        assert all(".lora_" in name for name in names)


def test_a_stateful_data_loader_needs_no_skipping(one: dict[str, Ended]) -> None:
    assert_continued(one["whole"], one["resumed-stateful"], start=6)


def test_names_tied_weights_and_metrics(one: dict[str, Ended], folder: Path) -> None:
    with ckpt.open(folder / "whole", 12) as checkpoint:
        assert {name.split("/")[0] for name in checkpoint} == {"model", "optimizer", "rng"}
        assert checkpoint.index.aliases["model", "lm_head.weight"] == ("model", "model.embed_tokens.weight")
        assert checkpoint.values_by_name["custom/batches"] == 2
        assert checkpoint.summary["metrics"] == {"loss": one["whole"].steps()[-1]["loss"]}


def test_a_save_that_all_ranks_have_staged_is_not_lost(two: dict[str, Ended]) -> None:
    assert two["killed"].codes == [KILLED, KILLED]
    assert_continued(two["whole"], two["resumed"], start=9)


@full_only
def test_a_save_that_a_rank_did_not_begin_is_abandoned(two: dict[str, Ended]) -> None:
    assert two["died"].codes[1] == KILLED
    assert_continued(two["whole"], two["went-on"], start=6)


@full_only
def test_gradient_accumulation(one: dict[str, Ended]) -> None:
    assert_continued(one["whole-accumulate"], one["resumed-accumulate"], start=6)


def test_fsdp_and_then_one_process(tmp_path: Path) -> None:
    ended = run_program("accelerate_train.py", tmp_path, FSDP, timeout=280)
    assert ended["killed"].codes == [KILLED, KILLED]
    assert_continued(ended["whole"], ended["resumed"], start=6)
    local = [lines[-1]["local"] for lines in ended["whole"].lines]
    assert local[0] + local[1] == ended["on-1"].lines[0][-1]["local"]
    assert (ended["on-1"].codes, ended["on-1"].start) == ([0], 12)
    assert [line["step"] for line in ended["on-1"].steps()] == [13, 14, 15]


def test_what_is_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from ckpt.integrations.accelerate import Checkpoints

    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        with pytest.raises(ValueError, match=f"{kind.value} is not supported"):
            Checkpoints(SimpleNamespace(distributed_type=kind), tmp_path)
    plugin = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    with pytest.raises(ValueError, match="FSDP1 is not supported"):
        Checkpoints(SimpleNamespace(distributed_type=DistributedType.FSDP, state=plugin), tmp_path)

    accelerator = Accelerator(cpu=True)
    try:
        with Checkpoints(accelerator, tmp_path) as checkpoints:
            accelerator.gradient_state._set_sync_gradients(False)
            with pytest.raises(ValueError, match="step 1: save_state was called while gradients are being accumulated"):
                checkpoints.save_state(1)
            accelerator.gradient_state._set_sync_gradients(True)
            handle = accelerator.register_save_state_pre_hook(print)
            with pytest.raises(ValueError, match="hooks of register_save_state_pre_hook"):
                checkpoints.save_state(1)
            handle.remove()
            assert checkpoints.load_state() is None
            checkpoints.save_state(1)
            assert checkpoints.maybe_finalize(blocking=True) == [1]
    finally:
        accelerator.state._reset_state(reset_partial_state=True)
        accelerator.gradient_state._reset_state()


def test_what_was_just_saved_is_loaded(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from ckpt.integrations.accelerate import Checkpoints

    accelerator = Accelerator(cpu=True)
    try:
        with Checkpoints(accelerator, tmp_path) as checkpoints, Checkpoints(accelerator, tmp_path) as other:
            for step in (1, 2):
                checkpoints.save_state(step)
                assert checkpoints.load_state() == step
            with stopped_until_a_load_waits():
                checkpoints.save_state(3)
                assert other.load_state() == 3
    finally:
        accelerator.state._reset_state(reset_partial_state=True)
        accelerator.gradient_state._reset_state()


def test_the_total_limit_of_the_project(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from ckpt.integrations.accelerate import Checkpoints

    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(tmp_path), total_limit=2))
    try:
        with Checkpoints(accelerator, tmp_path / "checkpoints") as checkpoints:
            for step in range(4):
                checkpoints.save_state(step)
                checkpoints.maybe_finalize(blocking=True)
            assert checkpoints.checkpointer.all_steps() == [2, 3]
    finally:
        accelerator.state._reset_state(reset_partial_state=True)
        accelerator.gradient_state._reset_state()
