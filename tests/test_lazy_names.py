"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib import import_module

import pytest

import ckpt
from inprocess.ipc.lazy_names import lazy_names

PACKAGES = ("ckpt", "ckpt.async_calls", "ckpt.sinks", "inprocess", "inprocess.fault_tolerance")
PACKAGES += ("inprocess.monitor_process",)
SUBMODULES = ("ckpt.events", "ckpt.integrations", "ckpt.restart", "ckpt.sinks", "inprocess.abort", "inprocess.store")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_is_there_and_others_are_not(package: str) -> None:
    module = import_module(package)
    names = dir(module)
    assert names == sorted(names)
    assert set(module.__all__) <= set(names)
    assert not [name for name in names if not hasattr(module, name)]
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_submodules_need_no_import_of_their_own() -> None:
    used = "; ".join(f"print({name}.__name__)" for name in SUBMODULES)
    code = f"import ckpt, inprocess, sys; assert 'ckpt.sinks' not in sys.modules; {used}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert tuple(done.stdout.split()) == SUBMODULES


def test_a_name_may_be_another_one_where_it_is_defined() -> None:
    get, names = lazy_names("inprocess.ipc", {"Local": ".lazy_names:lazy_names", "full": "inprocess.ipc.wakeup:Wakeup"})
    assert get("Local") is lazy_names
    assert get("full").__name__ == "Wakeup"
    assert names() == ["Local", "full"]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert ckpt.__version__ == importlib.metadata.version("ckpt-inprocess")
