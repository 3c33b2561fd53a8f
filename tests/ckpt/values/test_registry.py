"""Enums, named tuples and registered types: only the program gives a name in a checkpoint a meaning."""

from __future__ import annotations

import enum
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ckpt
from ckpt import AsyncCallsQueue, Checkpointer, StateError, StateMismatchError, Unregistered


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = object()  # the members may have values that a state cannot hold


class Level(enum.IntEnum):
    LOW = 1


class Traits(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    mode: Any


@dataclass(frozen=True)
class Config:
    lr: float
    layers: tuple[int, ...]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    with AsyncCallsQueue() as queue:
        yield queue


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a test has registered."""
    import ckpt.values.registry

    monkeypatch.setattr(ckpt.values.registry, "_ENCODERS", {})


def _run(queue: AsyncCallsQueue, root: Path, saved: Any, current: Any, **options: Any) -> Any:
    state = {"x": current, "t": torch.zeros(2)}
    with Checkpointer(root, queue=queue) as checkpointer:
        checkpointer.save({"x": saved, "t": torch.ones(2)}, 1)
        try:
            checkpointer.restore(state, **options)
        except StateMismatchError:
            assert not state["t"].any(), "nothing is restored"
            raise
    return state["x"]


@pytest.mark.parametrize(
    ("saved", "current"),
    [
        (Mode.FAST, Mode.SLOW),
        (Level.LOW, Level.LOW),
        (Traits.A | Traits.B, Traits.A),
        (Traits(0), Traits.A),
        (Point(1, Mode.FAST), Point(2, Mode.SLOW)),
        ([Mode.FAST, {"b": (Mode.SLOW,), "a": {Mode.FAST}}], [Mode.SLOW]),
    ],
)
def test_a_type_that_the_state_has_in_this_place_need_not_be_registered(
    queue: AsyncCallsQueue, tmp_path: Path, saved: Any, current: Any
) -> None:
    restored = _run(queue, tmp_path, saved, current)
    assert restored == saved
    assert type(restored) is type(saved)


@pytest.mark.parametrize(
    ("saved", "stand_in"),
    [
        (Mode.SLOW, Unregistered(f"{__name__}.Mode", "SLOW", "enum")),
        (Traits.A | Traits.B, Unregistered(f"{__name__}.Traits", 3, "flag")),
        (
            Point(1, Mode.FAST),
            Unregistered(
                f"{__name__}.Point",
                (("x", 1), ("mode", Unregistered(f"{__name__}.Mode", "FAST", "enum"))),
                "namedtuple",
            ),
        ),
        ({Mode.FAST: [Level.LOW]}, None),
    ],
)
def test_open_gives_a_stand_in_that_can_be_saved_again(
    queue: AsyncCallsQueue, tmp_path: Path, saved: Any, stand_in: Any
) -> None:
    with Checkpointer(tmp_path / "one", queue=queue) as checkpointer:
        checkpointer.save({"x": [saved]}, 1)
    (opened,) = ckpt.open(tmp_path / "one").values_by_name["x"]
    if stand_in is not None:
        assert opened == stand_in
    with Checkpointer(tmp_path / "two", queue=queue) as checkpointer:
        checkpointer.save({"x": [opened]}, 1)
        state: dict[str, Any] = {"x": [saved, "something else"]}
        checkpointer.restore(state)
    assert state == {"x": [saved]}


def test_a_registered_type_itself_is_a_value(
    queue: AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt.values.registry, "_ENCODERS", {})
    with pytest.raises(StateError, match=r"x: the class .*Mode itself cannot be stored unless .*register_encoder"):
        _run(queue, tmp_path / "unknown", Mode, None)
    ckpt.register_encoder(Mode)
    assert _run(queue, tmp_path / "known", {"kind": Mode}, {"kind": None}) == {"kind": Mode}
    del ckpt.values.registry._ENCODERS[f"{__name__}.Mode"]
    (stand_in,) = ckpt.open(tmp_path / "known").values_by_name.values()
    assert stand_in == Unregistered(f"{__name__}.Mode", None, "class")
    with Checkpointer(tmp_path / "again", queue=queue) as checkpointer:
        checkpointer.save({"x": stand_in}, 1)
        ckpt.register_encoder(Mode)
        state: dict[str, Any] = {"x": None}
        checkpointer.restore(state)
    assert state == {"x": Mode}


def test_what_is_neither_registered_nor_in_the_state_is_refused_by_name(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"type: x holds 'FAST' of the enum type .*Mode.*register_encoder"):
        _run(queue, tmp_path / "strict", [Mode.FAST], None)
    assert _run(queue, tmp_path / "lenient", [Mode.FAST], None, strict=False) is None


def test_an_enum_that_lost_the_member_is_refused(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    now = enum.Enum("Colour", ["GREEN"], module=__name__, qualname="Colour")
    with pytest.raises(StateMismatchError, match=r"type: x holds 'BLUE' of the enum type .*Colour"):
        _run(queue, tmp_path, Colour.BLUE, now.GREEN)


def test_a_named_tuple_with_other_fields_is_refused(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    now = namedtuple("Point", ["x", "y"], module=__name__)
    with pytest.raises(StateMismatchError, match=r"type: x holds .* of the namedtuple type .*Point"):
        _run(queue, tmp_path, Point(1, 2), now(1, 2))


@pytest.mark.usefixtures("registry")
def test_a_registered_type_comes_back_wherever_it_is(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"x/0: a .*Config cannot be stored.*ckpt.register_encoder"):
        _run(queue, tmp_path / "before", [Config(0.1, (1, 2))], None)
    ckpt.register_encoder(Config, asdict, lambda data: Config(**data))
    for number, saved in enumerate((Config(0.1, (1, 2)), [Config(0.2, ())], [{1: (Config(0.3, (1,)), 5)}])):
        assert _run(queue, tmp_path / str(number), saved, None) == saved
    assert ckpt.open(tmp_path / "0").values_by_name == {"x": Config(0.1, (1, 2))}


@pytest.mark.usefixtures("registry")
def test_a_registered_enum_is_known_everywhere(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    ckpt.register_encoder(Mode)
    assert _run(queue, tmp_path, [Mode.FAST], None) == [Mode.FAST]
    assert ckpt.open(tmp_path).values_by_name == {"x": [Mode.FAST]}


@pytest.mark.usefixtures("registry")
def test_what_a_registered_type_is_made_of_must_be_registered_too(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    ckpt.register_encoder(Config, lambda config: [config.lr, Mode.FAST], lambda data: Config(data[0], ()))
    with pytest.raises(StateError, match=r"x/1: .*Mode is part of a registered type and must be registered, too"):
        _run(queue, tmp_path, Config(0.5, ()), None)
    ckpt.register_encoder(Mode)
    assert _run(queue, tmp_path, Config(0.5, ()), None) == Config(0.5, ())


@pytest.mark.usefixtures("registry")
def test_a_from_json_that_raises_is_no_damage(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    def fail(data: Any) -> Config:
        raise ValueError("no such config")

    ckpt.register_encoder(Config, asdict, fail)
    with pytest.raises(StateError, match=r"from_json that is registered for .*Config raised .*no such config"):
        _run(queue, tmp_path, Config(0.5, ()), None)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((Config,), "neither an Enum nor a named tuple"),
        ((Config, asdict), "takes both"),
        ((int, str, int), "stored in its own way"),
        ((torch.nn.Parameter, str, str), "stored in its own way"),
        ((3,), "takes a type"),
    ],
)
def test_what_cannot_be_registered(arguments: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        ckpt.register_encoder(*arguments)


def test_nothing_is_imported_because_a_checkpoint_names_it(
    queue: AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    trap = enum.Enum("Trap", ["A"], module="trap")
    with Checkpointer(tmp_path / "root", queue=queue) as checkpointer:
        checkpointer.save({"x": trap.A}, 1)
    assert ckpt.open(tmp_path / "root").values_by_name == {"x": Unregistered("trap.Trap", "A", "enum")}
    assert "trap" not in sys.modules
