"""With the plain install, without any extra: everything saves and restores, and what needs an extra names it."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from tests.support.plain_install import make_environment, run_in
from tests.support.selection import full_only

_SUITE = ("tests/ckpt/loading", "tests/ckpt/saving")
_TIMEOUT_S = 1700


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("plain"), harness=False)


@full_only
@pytest.mark.timeout(_TIMEOUT_S + 20)
def test_the_tests_of_saving_and_restoring(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", harness=True)
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"]
    done = run_in(python, "-m", "pytest", *options, *_SUITE, timeout_s=_TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout[-2000:])


_COMPRESSION = """
import json, os, sys
import torch
import ckpt
from ckpt.validation import validate
root = sys.argv[1]
state = {"weight": torch.arange(100_000.0).view(100, 1000), "small": torch.ones(3), "step": 7}
with ckpt.Checkpointer(root, staging=ckpt.Staging(compression="zstd", inner_bytes=1 << 16)) as checkpointer:
    checkpointer.save(state, 1)
with ckpt.Checkpointer(root, staging=ckpt.Staging(compression="zstd")) as checkpointer:
    other = {"weight": torch.zeros(100, 1000), "small": torch.zeros(3), "step": 0}
    checkpointer.restore(other)
loaded = ckpt.load(root)
opened = ckpt.open(root)
rows = opened["weight"][3:5]
assert all(torch.equal(each["weight"], state["weight"]) for each in (other, loaded))
assert rows.tolist() == state["weight"][3:5].tolist()
assert validate(root + "/step_00000001").whole
if os.fork() == 0:  # a worker of a data loader, in which the threads of this process do not exist
    os._exit(opened["weight"][0].tolist() != state["weight"][0].tolist())
print(json.dumps(sorted(sys.modules)))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


@pytest.mark.timeout(100)
def test_compressed_steps(plain: Path, tmp_path: Path) -> None:
    done = run_in(plain, "-c", _COMPRESSION, str(tmp_path / "root"), timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert not {"obstore", "pytest", "rich", "tensorstore", "zarr"} & set(json.loads(done.stdout))


_MODULES = """
import importlib, json, pkgutil
import ckpt, ckpt.sinks, inprocess, inspect_ckpt
errors = {}
for package in (ckpt, inprocess, inspect_ckpt):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.rpartition(".")[2] in ("__main__", "_library", "_gloo_waits"):  # no modules of Python
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            errors[module.name] = str(error)
for name, arguments in (("OpenTelemetry", ()), ("Prometheus", (9464,)), ("TensorBoard", ("/nowhere",))):
    try:
        getattr(ckpt.sinks, name)(*arguments)
    except ImportError as error:
        errors[f"ckpt.sinks.{name}"] = str(error)
print(json.dumps(errors))
"""

_EXTRAS = {
    "ckpt.integrations.accelerate": "accelerate",
    "ckpt.integrations.lightning": "lightning",
    "ckpt.integrations.megatron": "megatron",
    "ckpt.integrations.megatron_common": "megatron",
    "ckpt.integrations.megatron_leaves": "megatron",
    "ckpt.integrations.ray": "ray",
    "ckpt.integrations.torchtitan": "torchtitan",
    "ckpt.integrations.transformers": "transformers",
    "ckpt.loading.zarr_store": "zarr",
    "ckpt.storage.zarr_plugin": "zarr",
    "ckpt.sinks.OpenTelemetry": "opentelemetry",
    "ckpt.sinks.Prometheus": "prometheus",
    "ckpt.sinks.TensorBoard": "tensorboard",
}


@pytest.mark.timeout(100)
def test_a_module_that_needs_an_extra_names_it(plain: Path) -> None:
    done = run_in(plain, "-c", _MODULES, timeout_s=90)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    found = {name: re.findall(r"pip install 'ckpt-inprocess\[(\w+)\]'", text) for name, text in errors.items()}
    assert found == {name: [extra] for name, extra in _EXTRAS.items()}, errors


_SURFACE = """
import contextlib, io, json
import ckpt
found = {"lazy": all(hasattr(ckpt, name) for name in dir(ckpt)), "unknown": hasattr(ckpt, "no_such_name")}
found["sinks"] = ckpt.sinks.Logging.__name__
with contextlib.redirect_stdout(io.StringIO()) as text:
    help(ckpt)
names = {}
exec("from ckpt import *", names)
found["missing"] = sorted(set(ckpt.__all__) - set(names))
found["unexplained"] = [name for name in ckpt.__all__ if name not in text.getvalue()]
found["version"] = ckpt.__version__
try:
    ckpt.zarr_store("/nowhere")
except ImportError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.timeout(100)
def test_every_public_name_is_there(plain: Path) -> None:
    done = run_in(plain, "-c", _SURFACE, timeout_s=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "pip install 'ckpt-inprocess[zarr]'" in found.pop("error")
    expected = {"lazy": True, "unknown": False, "sinks": "Logging", "missing": [], "unexplained": []}
    # This environment has no metadata of the package but those that an editable install leaves in the repository.
    assert found.pop("version") in ("unknown", importlib.metadata.version("ckpt-inprocess"))
    assert found == expected


_COMMANDS = """
import contextlib, io, json, sys
import torch
import ckpt
from inspect_ckpt.__main__ import main
root = sys.argv[1] + "/root"
with ckpt.Checkpointer(root) as checkpointer:
    checkpointer.save({"weight": torch.ones(1000, 10), "lr": 0.1}, 1)
found = {}
for command in json.loads(sys.argv[2]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main([word.replace("ROOT", root) for word in command])
    found[" ".join(command)] = [code, errors.getvalue()]
print("\\n" + json.dumps(found))
"""

_WITHOUT_EXTRAS = (
    *("ls ROOT", "show ROOT", "show --tree ROOT", "validate ROOT", "diff ROOT ROOT", "stats ROOT weight"),
    *("timeline ROOT", "watch --once ROOT", "report ROOT -o ROOT.html", "memory", "pin ROOT 1", "unpin ROOT 1 --yes"),
    *("export ROOT ROOT.safetensors", "convert ROOT.safetensors ROOT.copy --step 3", "export ROOT ROOT.pt --to torch"),
    *("convert ROOT.pt ROOT.copy --step 4", "export ROOT ROOT.dcp --to dcp", "convert ROOT.dcp ROOT.copy --step 5"),
)
_WITH_EXTRAS = {
    "stats ROOT weight --plot ROOT.png": "plot",
    "timeline ROOT --plot ROOT.png": "plot",
    "watch ROOT": "tools",
    "ls s3://bucket/prefix": "objects",
    "show gs://bucket/prefix": "objects",
}


@pytest.mark.timeout(100)
def test_commands(plain: Path, tmp_path: Path) -> None:
    commands = json.dumps([each.split() for each in (*_WITHOUT_EXTRAS, *_WITH_EXTRAS)])
    done = run_in(plain, "-c", _COMMANDS, str(tmp_path), commands, timeout_s=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: found[name] for name in _WITHOUT_EXTRAS} == {name: [0, ""] for name in _WITHOUT_EXTRAS}
    for name, extra in _WITH_EXTRAS.items():
        code, message = found[name]
        assert code == 2
        assert f"pip install 'ckpt-inprocess[{extra}]'" in message
