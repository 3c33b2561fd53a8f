"""What a restore takes from a step: which names, under which other names, converted or cut to fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ckpt.errors import StateMismatchError
from ckpt.loading.index import CheckpointIndex
from ckpt.paths import Path, display

Rename = Callable[[str], str] | Mapping[str, str]
"""From names of the checkpoint to names of the state: a function of a name, or prefixes and what replaces them."""

_T = TypeVar("_T")
_SEPARATORS = ("/", ".")


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """See `ckpt.Checkpointer.restore`. What is restored into `unkept` containers is lost: see `ckpt.loading.unkept`."""

    strict: bool = True
    only: tuple[str, ...] | None = None
    rename: Rename | None = None
    cast: bool = False
    resize: bool = False
    fall_back: bool = True
    structure: Literal["step", "state"] = "step"
    unkept: frozenset[Path] = frozenset()

    @classmethod
    def of(
        cls,
        strict: bool,
        only: str | Iterable[str] | None,
        rename: Rename | None,
        cast: bool,
        resize: bool,
        fall_back: bool = True,
        structure: Literal["step", "state"] = "step",
        unkept: frozenset[Path] = frozenset(),
    ) -> RestoreOptions:
        """Check the arguments of a restore."""
        if isinstance(only, str):
            only = (only,)
        names = None if only is None else tuple(name.rstrip("/.") for name in only)
        if names is not None and not (names and all(names)):
            raise ValueError(f"only={only!r}: give one name or several, such as only=['model']")
        if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
            raise TypeError(f"rename is a function of a name or a dict of prefixes, not {rename!r:.100}")
        if structure not in ("step", "state"):
            raise ValueError(f'structure is "step" or "state", not {structure!r:.80}')
        return cls(strict, names, rename, cast, resize, fall_back, structure, unkept)

    def selects(self, path: Path) -> bool:
        """Return whether what is at `path` is to be restored."""
        if self.only is None:
            return True
        name = display(path)
        return any(_is_below(name, prefix) for prefix in self.only)

    def reaches(self, path: Path) -> bool:
        """Return whether anything at or below `path` may be selected."""
        if self.only is None or not path:
            return True
        name = display(path)
        return any(_is_below(name, prefix) or _is_below(prefix, name) for prefix in self.only)


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(tuple(prefix + separator for separator in _SEPARATORS))


def renamed(index: CheckpointIndex, rename: Rename) -> CheckpointIndex:
    """Return the index with other names. StateMismatchError if two names become the same.

    A prefix is replaced wherever a part of a name begins with it: after a "/" or a ".".
    """
    change = rename if callable(rename) else _prefixes(rename)
    known: dict[Path, Path] = {}

    def new(path: Path) -> Path:
        if path not in known:
            known[path] = _path(change(display(path)), path)
        return known[path]

    def keys(items: Mapping[Path, _T]) -> dict[Path, _T]:
        result: dict[Path, _T] = {}
        for path, item in items.items():
            if new(path) in result:
                raise StateMismatchError(
                    f"rename makes one name of two: {display(path)} and another become {display(new(path))}",
                    step=index.step,
                )
            result[new(path)] = item
        return result

    return replace(
        index,
        tensors=keys(index.tensors),
        values=keys({path: _with_new_members(path, value, new) for path, value in index.values.items()}),
        per_rank_tensors=keys(index.per_rank_tensors),
        per_rank_values=keys(index.per_rank_values),
        aliases={new(path): new(target) for path, target in index.aliases.items()},
        containers=keys(index.containers),
        per_rank_containers=keys(index.per_rank_containers),
    )


def _with_new_members(path: Path, value: Any, new: Callable[[Path], Path]) -> Any:
    """Return a value of the step; if it is the groups of an optimizer with named parameters, with their new names."""
    if not isinstance(value, list) or "param_groups" not in path:
        return value
    if path[-1] == "param_groups":
        return [
            {key: _with_new_members((*path, key), item, new) for key, item in group.items()}
            if isinstance(group, dict)
            else group
            for group in value
        ]
    if path[-1] != "params":
        return value
    state = (*path[: path.index("param_groups")], "state")
    return [(new((*state, name)) or (name,))[-1] if isinstance(name, str) else name for name in value]


def _prefixes(rename: Mapping[str, str]) -> Callable[[str], str]:
    if not rename:
        return lambda name: name
    longest_first = sorted(rename, key=len, reverse=True)
    pattern = re.compile(r"(?:^|(?<=[/.]))(?:" + "|".join(map(re.escape, longest_first)) + ")")
    return lambda name: pattern.sub(lambda found: rename[found[0]], name)


def _path(name: str, before: Path) -> Path:
    """Return the path with this name. A key that was a whole number stays one."""
    if not isinstance(name, str):
        raise TypeError(f"rename returned {name!r:.100} for {display(before)}, which is not a name")
    if name == display(before):
        return before
    numbers = {str(key): key for key in before if type(key) is int}
    return tuple(numbers.get(key, key) for key in name.split("/") if key)


# -- what to write instead ---------------------------------------------------------------------------------------------

_WRAPPERS: Sequence[tuple[str, str]] = (
    ("_orig_mod.", "torch.compile wraps the module: put the module itself, `compiled._orig_mod`, into the state"),
    ("module.", "a wrapper holds the module: put `wrapped.module` into the state"),
    ("_checkpoint_wrapped_module.", "activation checkpointing wraps the module: wrap it in both programs, or in none"),
    ("base_layer.", "LoRA layers wrap the module: restore before the adapters are added"),
)


def hints(missing: Iterable[Path], unexpected: Iterable[Path]) -> list[str]:
    """Return what to write for a state and a step whose names differ in a known way."""
    lacking, extra = set(map(display, missing)), set(map(display, unexpected))
    found = []
    for prefix, remedy in _WRAPPERS:
        strip = _prefixes({prefix: ""})
        if any(prefix in name and strip(name) in lacking for name in extra):
            found.append(
                f"names of the checkpoint have {prefix!r} in addition: restore(..., rename={{{prefix!r}: ''}})"
            )
        if any(prefix in name and strip(name) in extra for name in lacking):
            found.append(f"names of the state have {prefix!r} in addition: {remedy}")
    return found
