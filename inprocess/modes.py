"""Modes of libraries: settings of a thread or of the process that context managers change and restore.

A function that is interrupted while it enters or leaves one, or that sets one without a context manager, leaves it as
it is, and the next iteration would compute other numbers without an error. So the modes are recorded when a call of
the wrapper begins, and restored after each interrupted iteration. A mode of a library that is loaded later is recorded
after the first import that is seen, or left alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Modes"]

_log = logging.getLogger(__name__)
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")


@dataclass(frozen=True, slots=True)
class _Mode:
    """A mode of the module named `library`: how it is read from it, and how a value is set."""

    library: str
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


@dataclass
class Modes:
    """The values of all known modes, as `record` has found them. Main thread."""

    _values: dict[str, Any] = field(default_factory=dict)
    _guards: list[Any] = field(default_factory=list)

    def record(self) -> None:
        """Record the modes of the loaded libraries that are not recorded yet."""
        for name, mode in _MODES.items():
            if name not in self._values:
                found = _read(mode)
                if found is not _UNKNOWN:
                    self._values[name] = found

    def restore(self) -> list[str]:
        """Set what differs to its recorded value, and return the names of these modes. Does not raise; logs."""
        changed = []
        for name, value in self._values.items():
            mode = _MODES[name]
            found = _read(mode)
            if found is _UNKNOWN or found == value:
                continue
            changed.append(name)
            try:
                guard = mode.set(sys.modules[mode.library], value)
                if guard is not None:
                    self._guards.append(guard)
            except Exception:
                _log.exception("%s is %s and cannot be set to %s again", name, found, value)
        return changed


_UNKNOWN = object()


def _read(mode: _Mode) -> Any:
    module = sys.modules.get(mode.library)
    if module is None:
        return _UNKNOWN
    try:
        return mode.get(module)
    except Exception:  # a version of the library that does not have it
        return _UNKNOWN


# -- torch -------------------------------------------------------------------------------------------------------------


def _set_inference(torch: Any, enabled: bool) -> Any:
    """Return a guard that sets the mode. A guard sets the mode of before when it is freed, so it is kept."""
    return torch._C._InferenceMode(enabled)


def _set_autocast(torch: Any, modes: tuple[tuple[str, bool, Any], ...]) -> None:
    for device, enabled, dtype in modes:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()


def _autocast(torch: Any) -> tuple[tuple[str, bool, Any], ...]:
    found = []
    for device in _DEVICES:
        try:
            found.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        except RuntimeError:  # this build does not know the device
            continue
    return tuple(found)


def _autocast_nesting(torch: Any) -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_nesting(torch: Any, depth: int) -> None:
    while torch.autocast_decrement_nesting() > depth:
        pass


def _default_device(torch: Any) -> tuple[Any, int]:
    loaded: Any = sys.modules.get("torch.utils._device")  # with the first context of a device, or the first default
    return None if loaded is None else loaded.CURRENT_DEVICE, int(torch._C._len_torch_function_stack())


def _set_default_device(torch: Any, found: tuple[Any, int]) -> None:
    """Remove what was pushed to the stack of function modes, contexts of devices among them."""
    device, depth = found
    has_default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None  # at the bottom
    while torch._C._len_torch_function_stack() > max(depth, int(has_default)):
        torch._C._pop_torch_function_stack()
    torch.set_default_device(device)
    loaded: Any = sys.modules["torch.utils._device"]
    loaded.CURRENT_DEVICE = device


def _pop_dispatch_modes(torch: Any, depth: int) -> None:
    while torch._C._len_torch_dispatch_stack() > depth:
        torch._C._pop_torch_dispatch_stack(None)


def _set_deterministic(torch: Any, found: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(found[0], warn_only=found[1])


def _sdp_backends(torch: Any) -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


def _set_sdp_backends(torch: Any, found: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    for enable, enabled in zip(
        (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp),
        found,
        strict=True,
    ):
        enable(enabled)


def _saved_tensor_hooks(torch: Any) -> int:
    """Return how many pairs of hooks are set: at most one is seen without removing it."""
    return int(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)


def _pop_saved_tensor_hooks(torch: Any, depth: int) -> None:
    while depth == 0 and _saved_tensor_hooks(torch):
        torch._C._autograd._pop_saved_tensors_default_hooks()


_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")


def _set_cudnn(cudnn: Any, found: tuple[bool, ...]) -> None:
    for name, value in zip(_CUDNN, found, strict=True):
        setattr(cudnn, name, value)


_MODES: dict[str, _Mode] = {
    "inference mode": _Mode("torch", lambda torch: torch.is_inference_mode_enabled(), _set_inference),
    "grad mode": _Mode(
        "torch", lambda torch: torch.is_grad_enabled(), lambda torch, enabled: torch._C._set_grad_enabled(enabled)
    ),
    "multithreaded backward": _Mode(
        "torch",
        lambda torch: torch._C._is_multithreading_enabled(),
        lambda torch, enabled: torch._C._set_multithreading_enabled(enabled),
    ),
    "autocast": _Mode("torch", _autocast, _set_autocast),
    "autocast cache": _Mode(
        "torch",
        lambda torch: torch.is_autocast_cache_enabled(),
        lambda torch, enabled: torch.set_autocast_cache_enabled(enabled),
    ),
    "autocast nesting": _Mode("torch", _autocast_nesting, _set_autocast_nesting),
    "default dtype": _Mode(
        "torch", lambda torch: torch.get_default_dtype(), lambda torch, dtype: torch.set_default_dtype(dtype)
    ),
    "default device": _Mode("torch", _default_device, _set_default_device),
    "dispatch modes": _Mode("torch", lambda torch: torch._C._len_torch_dispatch_stack(), _pop_dispatch_modes),
    "functional transforms": _Mode(
        "torch",
        lambda torch: torch._C._functorch.get_dynamic_layer_stack_depth(),
        lambda torch, depth: torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth),
    ),
    "hooks of saved tensors": _Mode("torch", _saved_tensor_hooks, _pop_saved_tensor_hooks),
    "deterministic algorithms": _Mode(
        "torch",
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "anomaly detection": _Mode(
        "torch",
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, found: torch.set_anomaly_enabled(*found),
    ),
    "precision of float32 products": _Mode(
        "torch",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, precision: torch.set_float32_matmul_precision(precision),
    ),
    "attention backends": _Mode("torch", _sdp_backends, _set_sdp_backends),
    "cudnn": _Mode(
        "torch.backends.cudnn", lambda cudnn: tuple(bool(getattr(cudnn, name)) for name in _CUDNN), _set_cudnn
    ),
    "cache of parametrizations": _Mode(
        "torch.nn.utils.parametrize",
        lambda parametrize: int(parametrize._cache_enabled),
        lambda parametrize, depth: setattr(parametrize, "_cache_enabled", depth),
    ),
    "FP8 of Transformer Engine": _Mode(
        "transformer_engine.pytorch.fp8",
        lambda fp8: fp8.FP8GlobalStateManager.get_fp8_autocast_state(),
        lambda fp8, state: fp8.FP8GlobalStateManager.set_fp8_autocast_state(state),
    ),
    "garbage collection": _Mode(
        "gc", lambda gc: gc.isenabled(), lambda gc, enabled: gc.enable() if enabled else gc.disable()
    ),
    "floating-point errors of numpy": _Mode(
        "numpy", lambda numpy: numpy.geterr(), lambda numpy, errors: _discard(numpy.seterr(**errors))
    ),
}


def _discard(value: object) -> None:
    """Return None: `Modes` keeps what a setter returns."""
