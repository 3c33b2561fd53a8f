"""Every optimizer of torch.optim and of the packages that are installed."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes the optimizer of a model."""

PACKAGES = (
    "torch.optim",
    "pytorch_optimizer",
    "schedulefree",
    "prodigyopt",
    "prodigyplus",
    "dadaptation",
    "lion_pytorch",
    "madgrad",
    "optimi",
    "came_pytorch",
    "galore_torch",
    "adam_mini",
    "bitsandbytes.optim",
)
_NOT_ONE_PROCESS = {"DeMo", "DistributedMuon"}
_FUSED_WITH_BACKWARD = {"LOMO", "AdaLOMO"}
_SPARSE = {"SparseAdam"}
_CUDA = {"GaLoreAdamW8bit"}
_BROKEN = {"PytorchLARS", "AdEMAMix32bit", "PagedAdEMAMix32bit", "GSAM"}  # they cannot step a small model on a CPU
_ABSTRACT = {"Optimizer", "BaseOptimizer", "CoreOptimiser", "OptimiOptimizer", "Optimizer2State", "Optimizer1State"}
_BY_USE = {"AdaGO", "Muon", "MuonClip", "NorMuon", "AdaMuon"}  # of pytorch_optimizer: a flag in each group
_WRAPPERS = {"Lookahead", "TRAC", "OrthoGrad", "ScheduleFreeWrapper"}
_SAMS = {"SAM", "LookSAM", "FriendlySAM"}


def optimizers_of(package: str) -> dict[str, Make]:
    """Return the optimizers by name; ImportError if the package is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(package)
    left_out = _ABSTRACT | _NOT_ONE_PROCESS | _FUSED_WITH_BACKWARD | _SPARSE | _CUDA | _BROKEN
    found = {}
    for name in dir(module):
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in left_out:
            found[f"{package}.{name}"] = _make_of(package, name, kind)
    return found


def _make_of(package: str, name: str, kind: Any) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = inspect.signature(kind.__init__).parameters
        options: dict[str, Any] = {"lr": 0.01} if "lr" in parameters else {}
        trained = list(model.parameters())
        if name == "WSAM":
            return kind(model, trained, base_optimizer=torch.optim.AdamW, lr=0.01)
        if "model" in parameters or "named_parameters" in parameters:
            return kind(model.named_parameters() if "named_parameters" in parameters else model, **options)
        made: Any = trained
        if package == "pytorch_optimizer" and name in _BY_USE:
            matrices = [parameter for parameter in trained if parameter.dim() > 1]
            others = [parameter for parameter in trained if parameter.dim() <= 1]
            made = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        elif name in ("Muon", "SpectralSphere"):
            made = [parameter for parameter in trained if parameter.dim() > 1]
        elif name == "LBFGS":
            options["max_iter"] = 3
            made = [parameter for parameter in trained if parameter.requires_grad]
        if name in _WRAPPERS or name in ("ScheduleFreeWrapperReference", "SafeFP16Optimizer", "PCGrad"):
            return kind(torch.optim.SGD(trained, lr=0.01, momentum=0.9))
        if name in _SAMS:
            return kind(made, base_optimizer=torch.optim.AdamW, lr=0.01)
        if "momentum" in parameters and package == "bitsandbytes.optim":
            options["momentum"] = 0.9
        if name == "GaLoreAdafactor":
            options["relative_step"] = False
        if name == "SpectralSphere":
            options["solver_max_iterations"] = 2
        if name == "BSAM":
            options["num_data"] = 5
        if name == "Ranger21":
            options["num_iterations"] = 20
        return kind(made, **options)

    return make
