"""Who may import whom. The layers are in docs and in this table; a change of direction is a change of both."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ckpt

REPOSITORY = Path(__file__).resolve().parents[1]

# Unit of ckpt (module or subpackage) -> the units it may import besides itself.
FOUNDATION = {"arguments", "errors", "events", "observing", "pace", "ranks", "version"}
BASE = FOUNDATION | {"collection", "native", "paths", "progress", "values"}
SIBLINGS = {"planning", "storage", "staging"}
PIPELINES = {"saving", "loading"}
ALLOWED: dict[str, set[str]] = {
    "arguments": set(),
    "errors": set(),
    "events": set(),
    "observing": {"events"},
    "collection": set(),
    "native": set(),
    "paths": {"errors"},
    "progress": set(),
    "ranks": {"errors"},
    "values": {"errors", "paths"},
    "signal_pipe": set(),
    "version": set(),
    "preemption": FOUNDATION | {"signal_pipe"},
    "keeper": set(),  # it forks workers by name, and keeps memory without reading it
    "async_calls": FOUNDATION | {"keeper"},  # it runs any function and knows nothing of checkpoints
    "replication": {"errors", "keeper", "native"},  # it moves bytes, and knows nothing of checkpoints
    **dict.fromkeys(SIBLINGS, BASE),
    "planning": BASE | {"storage"},  # what lies where is a matter of the format
    "pace": {"arguments"},
    "options": {"arguments", "pace", "planning", "replication", "storage"},  # the defaults and limits of what they set
    "saving": BASE | SIBLINGS | {"async_calls", "keeper", "options", "replication"},
    "loading": BASE | SIBLINGS,
    "validation": BASE | SIBLINGS | {"loading"},
    "formats": BASE | SIBLINGS | PIPELINES,  # a step is one of them
    "exporting": BASE | SIBLINGS | {"async_calls", "formats", "keeper", "loading"},
    "mirroring": BASE | SIBLINGS | PIPELINES | {"async_calls", "keeper", "validation"},
    "engine": BASE | SIBLINGS | {"async_calls", "exporting", "keeper", "mirroring", "options"} | PIPELINES,
    "checkpointer": BASE
    | SIBLINGS
    | {"async_calls", "engine", "exporting", "mirroring", "options", "pace"}
    | PIPELINES,
    "restart": BASE | SIBLINGS | {"async_calls", "checkpointer", "validation"} | PIPELINES,
}
ALLOWED["sinks"] = {"events", "observing"}  # they know of nothing else
ALLOWED["integrations"] = set()  # the topmost layer: nothing may import an adapter, and it has public names only

# Units of inprocess, in layers: a unit may import what stands in a layer before its own, and nothing else.
INPROCESS_LAYERS: tuple[set[str], ...] = (
    {"ipc"},  # shared with ckpt, so it knows nothing of either
    {"fault_classes", "process_end"},
    # Mechanisms that know nothing of restarts.
    {"attribution", "compose", "deferred_log", "exception", "hardware", "main_thread", "modes", "node_layout"}
    | {"old_threads", "process_state", "rank_environment", "settings", "tools"},
    {"bounded_waits", "torn_locks"},
    {"leftovers", "node_health", "unblock"},
    {"blame", "coordination", "progress_watchdog", "protocol_phases", "reasons", "repetition"}
    | {"restart_events", "state"},
    {"reports", "roster"},
    {"agreement"},
    {"absent", "joining"},
    {"completion", "finalize", "health_check", "initialize", "rank_assignment", "sections", "store", "straggler"}
    | {"terminate"},
    {"abort", "group_store", "monitor_process", "monitor_thread", "rank_filter"},
    {"hook_compat", "nested_restarter"},
    {"hooks"},
    {"monitoring", "protocol"},
    {"wrap"},
    {"fault_tolerance"},
)


PRIVATE_OF_CHECKPOINTER = {"_parts", "_restores", "_closing", "_phases", "_bridge", "_finalized"}


def modules_of(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def dotted_name(file: Path) -> str:
    parts = list(file.relative_to(REPOSITORY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(file: Path) -> tuple[str, ...]:
    """Every imported module as a full dotted name, also inside functions and for relative imports."""
    return tuple(_imports_of(file))


def _imports_of(file: Path) -> Iterator[str]:
    package = dotted_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def unit_of(name: str, package: str = "ckpt") -> str | None:
    """`ckpt.storage.names` -> `storage`; None for what is not in the package."""
    parts = name.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 else None


def test_ckpt_imports_only_downwards() -> None:
    wrong = []
    for file in modules_of("ckpt"):
        unit = unit_of(dotted_name(file))
        if unit is None:  # ckpt/__init__.py names what is public, from anywhere
            continue
        if unit not in ALLOWED:
            wrong.append(f"{file.relative_to(REPOSITORY)}: ckpt.{unit} is in no layer; add it to the table")
            continue
        for name in imports_of(file):
            target = unit_of(name)
            if unit == "integrations":
                continue  # `test_adapters_use_public_names`
            if name == "ckpt" or (target is not None and target not in ALLOWED):
                wrong.append(f"{file.relative_to(REPOSITORY)} imports {name}: import from the module that defines it")
            elif target is not None and target != unit and target not in ALLOWED[unit]:
                wrong.append(f"{file.relative_to(REPOSITORY)} imports {name}: {unit} may not know {target}")
    assert not wrong, "\n".join(wrong)


def test_adapters_use_public_names() -> None:
    """A public surface that does not suffice for our own adapters does not suffice for those of users."""
    wrong = []
    for file in sorted((REPOSITORY / "ckpt" / "integrations").glob("*.py")):
        tree = ast.parse(file.read_text(), str(file))
        for name in imports_of(file):
            target = unit_of(name)
            if target in (None, "integrations") or name.removeprefix("ckpt.") in ckpt.__all__:
                continue
            wrong.append(f"{file.name} imports {name}, which is not in ckpt.__all__")
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for node in attributes:
            if isinstance(node.value, ast.Name) and node.value.id == "ckpt" and node.attr not in ckpt.__all__:
                wrong.append(f"{file.name}:{node.lineno} uses ckpt.{node.attr}, which is not in ckpt.__all__")
            if node.attr in PRIVATE_OF_CHECKPOINTER:
                wrong.append(f"{file.name}:{node.lineno} uses .{node.attr}, which is private to Checkpointer")
    assert not wrong, "\n".join(wrong)


def test_inprocess_imports_only_downwards() -> None:
    layer_of = {unit: number for number, layer in enumerate(INPROCESS_LAYERS) for unit in layer}
    wrong = []
    for file in modules_of("inprocess"):
        unit = unit_of(dotted_name(file), "inprocess")
        if unit is None:
            continue
        if unit not in layer_of:
            wrong.append(f"{file.relative_to(REPOSITORY)}: inprocess.{unit} is in no layer; add it to the table")
            continue
        for name in imports_of(file):
            target = unit_of(name, "inprocess")
            if name == "inprocess" or (target is not None and target not in layer_of):
                wrong.append(f"{file.relative_to(REPOSITORY)} imports {name}: import from the module that defines it")
            elif target is not None and target != unit and layer_of[target] >= layer_of[unit]:
                wrong.append(f"{file.relative_to(REPOSITORY)} imports {name}: {unit} may not know {target}")
    assert not wrong, "\n".join(wrong)


def test_ckpt_knows_of_inprocess_only_ipc_and_in_restart_the_hooks() -> None:
    wrong = [
        f"{file}: {name}"
        for file in modules_of("inprocess")
        for name in imports_of(file)
        if name.split(".")[0] == "ckpt"
    ]
    wrong += [
        f"{file}: {name}"
        for file in modules_of("ckpt")
        if unit_of(dotted_name(file)) != "restart"
        for name in imports_of(file)
        if name.split(".")[0] == "inprocess" and not name.startswith("inprocess.ipc.")
    ]
    assert not wrong, "\n".join(wrong)


def module_graph() -> dict[str, set[str]]:
    """Each module of the libraries and tools, and those that it imports, also within functions."""
    files = {dotted_name(file): file for package in ("ckpt", "inprocess", "tools") for file in modules_of(package)}
    # The tools are run from their folder, too: `inspect_ckpt.ls` is `tools.inspect_ckpt.ls`.
    names = {name.removeprefix("tools."): name for name in files} | {name: name for name in files}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        found = (names.get(name) or names.get(name.rpartition(".")[0]) for name in imports_of(file))
        graph[module] = {target for target in found if target is not None} - {module}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    lazy = {"ckpt", "inprocess", "inprocess.fault_tolerance"}  # these name what is public, and import it when asked
    graph = {module: targets - lazy for module, targets in module_graph().items() if module not in lazy}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(error.args[1]))
    assert order.index("ckpt.checkpointer") > order.index("ckpt.storage.commit")


def test_libraries_do_not_import_what_is_not_installed() -> None:
    wrong = [
        f"{file}: {name}"
        for package in ("ckpt", "inprocess")
        for file in modules_of(package)
        for name in imports_of(file)
        if name.split(".")[0] in {"tools", "tests", "examples", "rich", "pytest"}
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(*modules: str) -> set[str]:
    code = f"import sys; import {', '.join(modules)}; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


def test_importing_ckpt_is_cheap() -> None:
    assert loaded_by("ckpt").isdisjoint({"torch", "tensorstore", "zarr", "numpy"})


def test_what_a_monitor_process_imports_is_cheap() -> None:
    """It must start quickly and stay small."""
    monitors = [f"inprocess.monitor_process.{name}" for name in ("__main__", "node_monitor", "rank_monitor")]
    loaded = loaded_by("inprocess.coordination", "inprocess.protocol", "inprocess.rank_assignment", *monitors)
    assert loaded.isdisjoint({"torch", "numpy", "psutil"})


def test_what_a_writer_imports_does_not_load_torch() -> None:
    assert "torch" not in loaded_by("ckpt.async_calls", "ckpt.storage", "ckpt.integrations.nvrx")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import ckpt.errors", ["ckpt.errors"]),
        ("from ckpt.storage import names", ["ckpt.storage.names"]),
        ("from . import commit", ["ckpt.storage.commit"]),
        ("from .. import errors", ["ckpt.errors"]),
        ("def f():\n    from ..save import run", ["ckpt.save.run"]),
    ],
)
def test_the_reader_of_imports_sees_every_form(
    source: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ckpt" / "storage" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    assert list(imports_of(file)) == names
