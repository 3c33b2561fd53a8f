"""The adapter for the Trainer: jobs that are killed go on as if nothing had happened, bit for bit."""

from pathlib import Path

import pytest

import ckpt
from tests.ckpt.integrations.jobs import KILLED, Ended, Job, assert_continued, run_program
from tests.support.selection import needs

needs("transformers", "accelerate", "peft")

pytestmark = pytest.mark.timeout(300)  # the first test of each fixture waits for its jobs

ONE = [
    Job("whole", "whole"),
    Job("killed", "one", "kill:8"),
    Job("resumed", "one"),
    Job("again", "whole", "resume:9"),
    Job("damaged", "whole", "damage:12"),
    Job("fresh", "whole", "resume:none"),
    Job("nothing", "nothing", "resume:newest"),
    Job("failed", "failed", "fail:6"),
]
MORE = [
    Job("whole-lora", "whole-lora", "lora"),
    Job("killed-lora", "lora", "lora kill:8"),
    Job("resumed-lora", "lora", "lora resume:newest"),
    Job("whole-accumulate", "whole-accumulate", "accumulate"),
    Job("killed-accumulate", "accumulate", "accumulate kill:8"),
    Job("resumed-accumulate", "accumulate", "accumulate"),
    Job("whole-best", "whole-best", "best"),
    Job("killed-best", "best", "best kill:11"),
    Job("resumed-best", "best", "best"),
]
TWO = [
    Job("whole", "whole", ranks=2),
    Job("killed", "two", "kill-saving:9", ranks=2),
    Job("resumed", "two", ranks=2),
    Job("died", "died", "kill:9@1", ranks=2),
    Job("went-on", "died", ranks=2),
    Job("on-1", "died", "steps:15"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Ended]:
    return run_program("transformers_train.py", folder, ONE, timeout=280)


@pytest.fixture(scope="module")
def more(folder: Path) -> dict[str, Ended]:
    return run_program("transformers_train.py", folder, MORE, timeout=280)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_program("transformers_train.py", tmp_path_factory.mktemp("two"), TWO, timeout=280)


def test_a_killed_training_goes_on_from_the_last_save(one: dict[str, Ended]) -> None:
    assert one["killed"].codes == [KILLED]
    assert_continued(one["whole"], one["resumed"], start=6)
    assert one["whole"].lines[0][-1]["steps"] == [9, 12]


def test_a_given_step(one: dict[str, Ended]) -> None:
    assert_continued(one["whole"], one["again"], start=9)


def test_a_damaged_step_is_skipped(one: dict[str, Ended]) -> None:
    assert_continued(one["whole"], one["damaged"], start=9)


def test_a_new_training_does_not_write_over_an_old_one(one: dict[str, Ended]) -> None:
    (error,) = [line["error"] for line in one["fresh"].lines[0] if "error" in line]
    assert "has published steps already, the newest is 12: continue with train(resume_from_checkpoint=True)" in error
    (error,) = [line["error"] for line in one["nothing"].lines[0] if "error" in line]
    assert "has no published step to resume from: train(resume_from_checkpoint='auto') begins anew" in error


def test_a_save_that_failed_can_be_left_behind(one: dict[str, Ended]) -> None:
    (failed,) = [line for line in one["failed"].lines[0] if "failed" in line]
    assert failed["failed"] == 6
    assert "the save of step 6 was abandoned on all ranks" in failed["text"]
    assert one["failed"].lines[0][-1] == one["whole"].lines[0][-1]


def test_of_a_model_with_adapters_only_they_are_saved(more: dict[str, Ended], folder: Path) -> None:
    assert_continued(more["whole-lora"], more["resumed-lora"], start=6)
    with ckpt.open(folder / "lora" / "checkpoints") as checkpoint:
        names = [name for name in checkpoint if name.startswith("model/")]
        assert len(names) == 8
        assert all(".lora_" in name for name in names)


def test_gradient_accumulation(more: dict[str, Ended]) -> None:
    assert_continued(more["whole-accumulate"], more["resumed-accumulate"], start=6)


def test_the_best_model_is_kept_and_loaded_at_the_end(more: dict[str, Ended], folder: Path) -> None:
    assert_continued(more["whole-best"], more["resumed-best"], start=9)
    end = more["whole-best"].lines[0][-1]
    assert end["steps"] == sorted({end["best"], 12}) or end["steps"] == [9, 12]
    with ckpt.open(folder / "whole-best" / "checkpoints", end["best"]) as checkpoint:
        assert checkpoint.step == end["best"]


def test_a_save_that_all_ranks_have_staged_is_not_lost(two: dict[str, Ended]) -> None:
    assert two["killed"].codes == [KILLED, KILLED]
    assert_continued(two["whole"], two["resumed"], start=9)


def test_a_save_that_a_rank_did_not_begin_is_abandoned(two: dict[str, Ended]) -> None:
    assert two["died"].codes[1] == KILLED
    assert_continued(two["whole"], two["went-on"], start=6)


def test_another_number_of_processes(two: dict[str, Ended]) -> None:
    assert (two["on-1"].codes, two["on-1"].start) == ([0], 12)
    assert [line["step"] for line in two["on-1"].steps()] == [13, 14, 15]


def test_what_is_refused(tmp_path: Path) -> None:
    import torch
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainingArguments

    from ckpt.integrations.transformers import CkptTrainer

    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[], save_total_limit=1)
    try:
        with ckpt.Checkpointer(tmp_path / "root") as checkpointer:
            trainer = CkptTrainer(torch.nn.Linear(2, 2), args, checkpointer=checkpointer)
            assert trainer.checkpoint_root == str(tmp_path / "root")
            with pytest.raises(ValueError, match="give keep to the checkpointer, and no save_total_limit"):
                trainer.train()
            with pytest.raises(ValueError, match="hyperparameter_search is not supported: use Trainer"):
                trainer.train(trial={})
            args.enable_jit_checkpoint = True
            with pytest.raises(ValueError, match="enable_jit_checkpoint is not supported: save often"):
                trainer.train()
            args.auto_find_batch_size = True
            with pytest.raises(ValueError, match="auto_find_batch_size is not supported"):
                trainer.train()
        assert not (tmp_path / "root").exists()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
