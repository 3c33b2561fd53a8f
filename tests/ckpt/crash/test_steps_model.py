"""Every state of the steps of a root, in directories and in stores. Exploration finds mistakes.

The code performs the acts of the model, in an order that the model has; and what it has found there does not happen.
TESTS=full explores the large setups, too.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.saving.recover import Branch, take_over
from ckpt.storage import step_reader
from ckpt.storage.directories import DirectoryLock
from ckpt.storage.directory_root import StepMoves
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId, parse_save_name, step_name
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import open_root
from ckpt.storage.store_root import StoreRoot
from ckpt.storage.stores.directory import DirectoryStore
from tests.ckpt.crash.exploration import Violation, follow
from tests.ckpt.crash.real_acts import LOOKS, Acts
from tests.ckpt.crash.steps_model import Setup, actors_of, explore_steps
from tests.ckpt.crash.steps_state import Bug, Kind, Save
from tests.ckpt.storage.small_saves import save, state_of
from tests.ckpt.storage.syscalls import Call, Syscalls
from tests.support.selection import FULL

_CLAIM = (("claim", 0), ("decide", 0))
_SAVE_AND_REMOVE = (("save", 1), ("remove", 1))
_SETUPS = {
    "two saves of one step": Setup(
        saves=(Save(2, 1, 1), Save(2, 2, 1)), programs=(_SAVE_AND_REMOVE, (*_CLAIM, ("save", 2), ("supersede", 0)))
    ),
    "a branch is left": Setup(
        steps=(1, 2), saves=(Save(2, 2, 1),), programs=((("remove", 2),), (*_CLAIM, ("save", 2), ("supersede", 0)))
    ),
    "a branch is left for a later step": Setup(
        steps=(1, 2), saves=(Save(3, 2, 1),), programs=((("remove", 2),), (*_CLAIM, ("save", 2), ("supersede", 0)))
    ),
    "a restore decides first": Setup(
        saves=(Save(2, 1, 1), Save(3, 2, 2)),
        programs=(_SAVE_AND_REMOVE, (("recover", 0), ("decide", 0), *_CLAIM, ("save", 2), ("supersede", 0))),
    ),
    "a step is pinned": Setup(steps=(1, 2), programs=((("remove", 1),), _CLAIM), pins=1),
    "steps were copied": Setup(
        steps=(),
        copied=(1, 2),
        saves=(Save(2, 3, 1),),
        programs=((*_CLAIM, ("remove", 1)), (*_CLAIM, ("save", 2), ("supersede", 0))),
    ),
    "a step was copied beside its own": Setup(steps=(1, 2), copied=(2,), programs=((*_CLAIM, ("remove", 2)), _CLAIM)),
    "what is decided is forgotten": Setup(
        saves=(Save(2, 1, 1),), programs=(_SAVE_AND_REMOVE, (*_CLAIM, ("remove", 2))), forgets=True
    ),
    "copied steps are forgotten": Setup(
        steps=(), copied=(1, 2), programs=(_CLAIM, (*_CLAIM, ("remove", 1))), forgets=True
    ),
    "a rank is late": Setup(saves=(Save(2, 1, 1, ranks=2),), programs=(_SAVE_AND_REMOVE, _CLAIM), late=1, forgets=True),
}
_LARGE = {
    "three owners": Setup(
        saves=(Save(2, 1, 1), Save(2, 2, 1), Save(2, 3, 1)),
        programs=(
            _SAVE_AND_REMOVE,
            (*_CLAIM, ("save", 2), ("supersede", 0), ("remove", 1)),
            (*_CLAIM, ("save", 3), ("supersede", 0)),
        ),
    ),
    "three owners, and a late rank": Setup(
        saves=(Save(2, 1, 1, ranks=2), Save(2, 2, 1)),
        programs=(_SAVE_AND_REMOVE, (*_CLAIM, ("save", 2), ("supersede", 0)), _CLAIM),
        late=1,
        forgets=True,
    ),
    "three owners of copied steps": Setup(
        steps=(2,),
        copied=(1, 2),
        programs=((*_CLAIM, ("remove", 1)), (*_CLAIM, ("remove", 2)), _CLAIM),
        forgets=True,
        pins=1,
    ),
}
_FOUND_IN = {
    Bug.ADOPT_BEFORE_CLAIM: "two saves of one step",
    Bug.LOOK_BEFORE_INTENT: "a rank is late",
    Bug.NO_LOOK_AT_BEGIN: "two saves of one step",
    Bug.RECORD_BEFORE_DATA: "two saves of one step",
    Bug.NO_LOOK_AFTER_PUBLISH: "what is decided is forgotten",
    Bug.TAKE_IN_WITHOUT_LOOK: "copied steps are forgotten",
    Bug.TAKE_IN_TWICE: "a step was copied beside its own",
    Bug.CHANGE_AT_ONCE: "two saves of one step",
    Bug.NO_LOOK_AFTER_MARK: "two saves of one step",
    Bug.NO_UNDO: "two saves of one step",
    Bug.IGNORE_PINS: "a step is pinned",
    Bug.PINS_BEFORE_MARK: "a step is pinned",
    Bug.PIN_WITHOUT_LOOK: "a step is pinned",
    Bug.BACK_UNSEEN: "a branch is left for a later step",
    Bug.BACK_SEEN_ONCE: "a branch is left for a later step",
    Bug.SUPERSEDE_BEFORE_ONLY: "a branch is left for a later step",
    Bug.SUPERSEDE_ONCE: "a branch is left",
}
_OF_STORES = {Bug.NO_LOOK_AFTER_PUBLISH, Bug.TAKE_IN_WITHOUT_LOOK}
_OF_DIRECTORIES = {Bug.LOOK_BEFORE_INTENT, Bug.BACK_UNSEEN, Bug.BACK_SEEN_ONCE, Bug.SUPERSEDE_BEFORE_ONLY}
"""In a store a change of another owner makes the numbers of records differ, which is enough."""
_BUGS = [
    (bug, kind)
    for bug in _FOUND_IN
    for kind in Kind
    if bug not in (_OF_STORES if kind is Kind.DIRECTORY else _OF_DIRECTORIES)
]


@pytest.mark.timeout(900 if FULL else 60)
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
@pytest.mark.parametrize("name", [*_SETUPS, *(_LARGE if FULL else ())])
def test_no_reachable_state_violates_the_invariants(name: str, kind: Kind) -> None:
    states = explore_steps((_SETUPS | _LARGE)[name]._replace(kind=kind))
    print(f"{states} states")
    assert states > 400


@pytest.mark.parametrize(("bug", "kind"), _BUGS, ids=lambda value: getattr(value, "name", value).lower())
def test_a_protocol_with_a_mistake_is_found_out(bug: Bug, kind: Kind) -> None:
    setup = _SETUPS[_FOUND_IN[bug]]._replace(kind=kind, bugs=frozenset({bug}))
    if bug is Bug.ADOPT_BEFORE_CLAIM:
        setup = setup._replace(programs=(setup.programs[0], (*_CLAIM[::-1], *setup.programs[1][2:])))
    with pytest.raises(Violation) as caught:
        explore_steps(setup)
    print(caught.value)


# -- the code does what the model does ---------------------------------------------------------------------------------


class _DiedError(BaseException):
    """Raised in place of a death; nothing handles it."""


def _dies() -> None:
    raise _DiedError


class _Run:
    """Owners of one root, whose acts are noted, and which can act before an act of another one."""

    def __init__(self, kind: Kind, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind = kind
        self.where = where
        self.trace: list[str] = []
        self._monkeypatch = monkeypatch

    def owner(self, **options: Any) -> ckpt.Checkpointer:
        return ckpt.Checkpointer(self.where, staging=ckpt.Staging(threads=1, reuse_files=False), **options)

    @property
    def root(self) -> Root:
        return open_root(self.where)

    def acts(self, name: str, numbers: dict[Any, int], do: Callable[[], object], stops: str | None = None) -> None:
        """Have owner `name` do something, and note its acts; it dies before the act `stops`."""
        acts = Acts(self.kind, numbers)
        if stops is not None:
            acts.before(stops, _dies)
        died = False
        with acts.recorded(self._monkeypatch):
            try:
                do()
            except _DiedError:
                died = True
        assert died == (stops is not None), acts.noted
        self.trace += [f"{name}: {act}" for act in acts.noted] + ([f"{name}: dies"] if died else [])

    def interrupted(self, act: str, do: Callable[[], object], meanwhile: Callable[[], None], number: int = 0) -> None:
        """Do something, and let another owner act before the act with this name and number."""
        acts = Acts(self.kind, dict.fromkeys(range(10), 0))
        acts.before(act, meanwhile, number=number)
        try:
            with acts.recorded(self._monkeypatch):
                do()
        finally:
            assert acts.has_intervened, acts.noted

    def assert_path_of(self, setup: Setup) -> None:
        """Check that what was noted is a path of the model."""
        print("\n".join(self.trace))
        problem = follow(*actors_of(setup._replace(kind=self.kind)), self.trace, _is_silent, _is_look)
        assert problem is None, problem


def _is_silent(act: str) -> bool:
    """Whether an act of the model is none of those that `Acts` notes: a look at what is there, or no request at all."""
    what = act.partition(": ")[2]
    if what.startswith(("lists ", "finds ", "does not find", "has decided", "has superseded", "looks at the branch")):
        return True
    return what.startswith("looks at") and what not in LOOKS and "fenced" not in what


def _is_look(act: str) -> bool:
    return act.partition(": ")[2] in LOOKS


@pytest.fixture(params=Kind, ids=lambda kind: kind.value)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Run:
    where = str(tmp_path / "root") if request.param is Kind.DIRECTORY else f"directory://{tmp_path}/root"
    return _Run(request.param, where, monkeypatch)


def test_a_save_and_a_removal_are_a_path_of_the_model(run: _Run) -> None:
    with run.owner(keep=1) as earlier:
        save(earlier, 1)
        run.acts("A", {1: 0, 2: 1}, lambda: save(earlier, 2))
    run.assert_path_of(_SETUPS["two saves of one step"])
    assert run.root.steps() == [2]


@pytest.mark.parametrize("is_whole", [True, False], ids=["adopted", "abandoned"])
def test_a_claim_that_decides_a_save_is_a_path_of_the_model(run: _Run, is_whole: bool) -> None:
    numbers = {1: 0, 2: 1, 3: 2}
    with run.owner() as earlier, run.owner() as later:
        save(earlier, 1)
        run.acts("A", numbers, lambda: save(earlier, 2), "publishes save 1" if is_whole else "writes save 1")
        assert later.restore(state_of(-1.0), 1) == 1
        run.acts("B", numbers, lambda: save(later, 3))
    programs = (_SAVE_AND_REMOVE, (*_CLAIM, ("save", 2), ("supersede", 0)))
    run.assert_path_of(Setup(saves=(Save(2, 1, 1), Save(3, 2, 1)), programs=programs))
    assert run.root.steps() == [1, 3]


def test_an_act_that_is_left_out_is_no_path_of_the_model(run: _Run) -> None:
    with run.owner(keep=1) as earlier:
        save(earlier, 1)
        run.acts("A", {1: 0, 2: 1}, lambda: save(earlier, 2))
    trace, token = run.trace, "A: looks at the token"
    for act in ("publishes save 1", "changes save 0"):
        place = trace.index(f"A: {act}")
        assert trace[place - 1] == token
        run.trace = trace[: place - 1] + trace[place:]
        with pytest.raises(AssertionError, match=f"the model has no 'A: {act}'"):
            run.assert_path_of(_SETUPS["two saves of one step"])


def test_a_step_that_is_published_again_is_a_path_of_the_model(run: _Run) -> None:
    numbers = {1: 0, 2: 1, 3: 2}
    with run.owner(keep=1) as earlier, run.owner() as later:
        save(earlier, 1)
        run.acts("A", numbers, lambda: save(earlier, 2), "changes save 0")
        run.acts("B", numbers, lambda: save(later, 3))
    assert "B: publishes save 0 again" in run.trace
    programs = (_SAVE_AND_REMOVE, (*_CLAIM, ("save", 2)))
    run.assert_path_of(Setup(saves=(Save(2, 1, 1), Save(3, 2, 2)), programs=programs))
    assert run.root.steps() == [1, 2, 3]


def _copied(run: _Run, tmp_path: Path) -> None:
    """Make the root of a run of the steps 1 and 2 of a root of the other kind."""
    other = f"directory://{tmp_path}/other" if run.kind is Kind.DIRECTORY else str(tmp_path / "other")
    with ckpt.Checkpointer(other) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
    for path in (tmp_path / "other").iterdir():
        if path.name.startswith("step_") or path.name in ("saves", "records"):
            shutil.copytree(path, tmp_path / "root" / path.name)


def test_copied_steps_are_taken_in_as_in_the_model(run: _Run, tmp_path: Path) -> None:
    _copied(run, tmp_path)
    with run.owner() as owner:
        assert owner.restore(state_of(-1.0)) == 2
        run.acts("A", {1: 0, 2: 1, 3: 2}, lambda: save(owner, 3))
    assert [act for act in run.trace if "takes" in act] != []
    programs = ((*_CLAIM, ("save", 2)),)
    run.assert_path_of(Setup(steps=(), copied=(1, 2), saves=(Save(3, 2, 2),), programs=programs))
    assert run.root.steps() == [1, 2, 3]


# -- what the model has found ------------------------------------------------------------------------------------------


def test_a_late_change_of_a_left_step_does_not_refuse_the_save_that_has_its_number(
    run: _Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier owner was about to remove the step, and marks it at the worst moment."""
    with run.owner() as earlier, run.owner() as later:
        save(earlier, 1)
        save(earlier, 2)
        old = parse_save_name(run.root.save_of(2) or "")
        assert old is not None
        assert later.restore(state_of(-1.0), 1) == 1
        acts = Acts(run.kind, dict.fromkeys(range(10), 0))
        moving = f"{run.where}/.abandoned/{step_name(2)}-moving-{old.owner}-00"

        def creates_a_record() -> None:
            assert isinstance(run.root, StoreRoot)
            record = run.root._records.of(old)
            assert record is not None
            assert run.root._records.change(record, "removed", old.owner) is not None

        def renames() -> None:
            os.rename(f"{run.where}/{step_name(2)}", moving)
            acts.before("publishes save 0", lambda: StepMoves(CheckpointRoot(run.where)).back(moving))

        if run.kind is Kind.STORE:
            acts.before("marks save 0", creates_a_record)
        else:
            acts.before("makes the intent of save 0", renames)
        with acts.recorded(monkeypatch):
            save(later, 2)
        assert acts.has_intervened, acts.noted
    assert run.root.steps() == [1, 2]
    assert run.root.save_of(2) != old.name


def test_a_step_that_is_pinned_while_it_is_about_to_be_removed_stays(
    run: _Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process of another host, whose locks are not seen here."""
    monkeypatch.setattr(step_reader, "lock_shared", lambda path: DirectoryLock(-1))
    with run.owner() as owner, run.owner(keep=1) as keeping:
        for step in (1, 2):
            save(owner, step)
        with pytest.raises(ckpt.StorageError, match="pinned"):
            run.interrupted("marks save 0", lambda: owner.delete(1), lambda: run.root.pin_step(1))
        assert run.root.steps() == [1, 2]
        assert run.root.pinned_steps() == {1}
        run.root.unpin_step(1)
        run.interrupted("marks save 0", lambda: save(keeping, 3), lambda: run.root.pin_step(1))
        assert run.root.steps() == [1, 3]


def test_a_step_that_is_being_removed_cannot_be_pinned(run: _Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reader, "lock_shared", lambda path: DirectoryLock(-1))

    def pins() -> None:
        with pytest.raises(ckpt.CheckpointNotFoundError):
            run.root.pin_step(1)

    with run.owner() as owner:
        for step in (1, 2):
            save(owner, step)
        run.interrupted("changes save 0", lambda: owner.delete(1), pins)
    assert run.root.steps() == [2]
    assert run.root.pinned_steps() == set()


def test_a_save_whose_abandonment_is_forgotten_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator is stopped before the intent, for more than an hour; then another rank makes the directory."""
    where, forgotten = str(tmp_path / "root"), False
    roots = [CheckpointRoot(where) for _ in range(2)]
    roots[0].make()
    token = roots[0].ownership.claim(0)
    pending = roots[0].pending_save(SaveId(1, token, f"{1:016x}"))

    def stops(call: Call, perform: Callable[..., Any]) -> Any:
        nonlocal forgotten
        if call.name == "open" and "/.intent.json." in call.path and not forgotten:
            forgotten = True
            take_over(roots[1], roots[1].ownership.claim(token), Branch(), 0.0, print)
            assert [save.step for save in roots[1].abandoned()] == [1]
            shutil.rmtree(f"{where}/.abandoned/{pending.save.name}")
            pending.join()
        return perform(*call.args)

    with pytest.raises(ckpt.FencedError), Syscalls().hooked(stops):
        pending.begin(2, "plan")
    assert forgotten
    assert roots[1].pending() == []


def test_a_copied_step_that_was_forgotten_is_not_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner is stopped before it creates the record, until a later one has removed the step and forgotten it."""
    run = _Run(Kind.STORE, f"directory://{tmp_path}/root", monkeypatch)
    _copied(run, tmp_path)
    roots = [StoreRoot(DirectoryStore(str(tmp_path / "root"))) for _ in range(3)]
    roots[0].ownership.claim(0)

    def forgets() -> None:
        token = roots[1].ownership.claim(roots[1].ownership.newest())
        roots[1].refresh()
        assert roots[1].remove_step(2, token)
        roots[1]._records.forget([each.save for each in roots[1]._records.all() if each.is_gone])

    run.interrupted("takes save 0 in", roots[0].refresh, forgets)
    assert roots[2].steps() == [1]


def test_a_step_that_was_copied_beside_its_own_is_moved_aside(run: _Run, tmp_path: Path) -> None:
    """Also if it was saved later: a step does not become another one when a job claims the root."""
    with run.owner(keep=3) as owner:
        for step in (1, 2, 3):
            save(owner, step)
    own = run.root.saves()
    _copied(run, tmp_path)
    copied = {name for step, name in own.items() if step in (1, 2)}
    with run.owner(keep=1) as owner:
        assert owner.restore(state_of(-1.0)) == 3
        assert run.root.saves() == own
        save(owner, 4)
        assert run.root.steps() == [4]
    aside = run.root.moved_aside()
    assert [(each.step, each.why) for each in aside] == [(1, "superseded"), (2, "superseded")]
    assert not copied & {each.name for each in aside}
