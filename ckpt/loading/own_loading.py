"""Which objects load by code of their own, and which by PyTorch's alone.

PyTorch's code cannot refuse a state dict whose names and shapes fit; any other code may raise, in the middle of its
work, so it is tried before anything that cannot be undone (`ckpt.loading.state_update`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.paths import display
from ckpt.planning.data_loaders import is_data_loader
from ckpt.planning.state_dict import Owner, RngState
from ckpt.planning.tensors import PLAIN_TENSORS

_MODULE_METHODS = (
    "load_state_dict",
    "_load_from_state_dict",
    "set_extra_state",
    # What these return or change may be more or less than PyTorch's load_state_dict accepts.
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
)
_MODULE_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
)
_OPTIMIZER_METHODS = ("load_state_dict", "__setstate__", "state_dict")
_OPTIMIZER_HOOKS = (
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)
_SHOWN = 8


def may_refuse(owner: Owner) -> bool:
    """Return whether `load_state_dict` of an object may raise although names and shapes fit."""
    stateful = owner.stateful
    if isinstance(stateful, torch.nn.Module):
        # With this setting, load_state_dict exchanges parameters, which fails for those that are referenced elsewhere.
        if torch.__future__.get_swap_module_params_on_conversion():
            return True
        return not all(map(_is_plain_module, stateful.modules()))
    if isinstance(stateful, torch.optim.Optimizer):
        is_plain = _is_plain(stateful, torch.optim.Optimizer, "torch.optim.", _OPTIMIZER_METHODS, _OPTIMIZER_HOOKS)
        return not is_plain or not _is_convertible(owner.state_dict)
    return not isinstance(stateful, RngState) and not is_data_loader(type(stateful))


def check_inference_tensors(owners: Iterable[Owner]) -> None:
    """Raise StateError if PyTorch's `load_state_dict` of a module would write to inference tensors, and cannot."""
    if torch.is_inference_mode_enabled():
        return
    for owner in owners:
        if not isinstance(owner.stateful, torch.nn.Module) or not isinstance(owner.before, dict):
            continue
        found = [key for key, item in owner.before.items() if _is_inference(item)]
        if found and not may_refuse(owner):
            names = [display((*owner.path, key)) for key in found]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise StateError(
                f"{', '.join(names[:_SHOWN])}{more}: made in torch.inference_mode(); outside of it PyTorch does not "
                f"change such tensors. Nothing was restored; replace them in the module by their clone(), or restore "
                f"in torch.inference_mode()"
            )


def own_names(module: torch.nn.Module) -> Callable[[str], bool] | None:
    """Return a test for the names in the state dict of a module that code other than PyTorch's loads; None for none.

    Overridden code and hooks of a module see all names below it.
    """
    prefixes, names = [], set()
    if not _is_plain(module, torch.nn.Module, "torch.nn.", ("load_state_dict",), ()):
        prefixes.append("")
    for name, member in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        hooks = (*member._load_state_dict_pre_hooks.values(), *member._load_state_dict_post_hooks.values())
        if not _is_plain(member, torch.nn.Module, "torch.nn.", ("_load_from_state_dict",), ()) or not all(
            map(_is_of_sharding, hooks)
        ):
            prefixes.append(prefix)
        if type(member).set_extra_state is not torch.nn.Module.set_extra_state:
            names.add(f"{prefix}_extra_state")
    if not prefixes and not names:
        return None
    return lambda name: name in names or name.startswith(tuple(prefixes))


def _is_of_sharding(hook: Any) -> bool:
    """Return whether a hook is one of FSDP's and the like, which change neither names nor global shapes."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _is_inference(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and bool(getattr(item, "_local_tensor", item).is_inference())


def _is_plain_module(module: torch.nn.Module) -> bool:
    return _is_plain(module, torch.nn.Module, "torch.nn.", _MODULE_METHODS, _MODULE_HOOKS) and all(
        type(getattr(tensor, "_local_tensor", tensor)) in PLAIN_TENSORS for tensor in _tensors(module)
    )


def _is_convertible(item: Any) -> bool:
    """Return whether PyTorch's optimizers can load state: they make its containers anew, of a generator of items."""
    if isinstance(item, dict):
        return all(map(_is_convertible, item.values()))
    if type(item) in (list, tuple, deque):
        return all(map(_is_convertible, item))
    return isinstance(item, torch.Tensor | str | bytes) or not isinstance(item, Iterable)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (tensor for tensor in chain(module._parameters.values(), module._buffers.values()) if tensor is not None)


def _is_plain(thing: Any, plain: type[Any], package: str, methods: tuple[str, ...], hooks: tuple[str, ...]) -> bool:
    """Return whether the methods of an object are those of PyTorch, and it has no hooks."""
    kind, own = type(thing), vars(thing)
    return not any(own.get(hook) for hook in hooks) and all(
        name not in own and (getattr(kind, name) is getattr(plain, name) or _defined_in(kind, name, package))
        for name in methods
    )


def _defined_in(kind: type[Any], name: str, package: str) -> bool:
    """Return whether a class inherits a method from one of a package."""
    return next(base.__module__.startswith(package) for base in kind.__mro__ if name in vars(base))
