"""The sources of a tree, parsed: modules, classes, functions, imports, text. Nothing of the tree is imported."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LONGEST_FILE = 450  # lines; more need an entry in the list of `tests/test_house.py`

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file. `path` is relative to its tree, `name` is dotted."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, str(self.path))

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self.text.splitlines())

    @property
    def classes(self) -> list[ast.ClassDef]:
        """All classes, also those inside of others and of functions."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @property
    def functions(self) -> list[Function]:
        """All functions and methods, also those inside of others."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    def imports(self) -> Iterator[str]:
        """Yield every imported name in full, also those of relative imports and of imports within functions."""
        package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                yield from (f"{source}.{alias.name}" for alias in node.names)

    def prose_and_code(self) -> tuple[int, int]:
        """Return the words of docstrings and comments, and the lines that have anything else."""
        prose, code, documented = 0, set[int](), set[int]()
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else []:
                # A string alone is a docstring, or the documentation of the attribute before it.
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    value = statement.value.value
                    if isinstance(value, str):
                        prose += len(value.split())
                        documented |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                prose += len(token.string.lstrip("#").split())
            elif token.type not in layout:
                code |= set(range(token.start[0], token.end[0] + 1))
        return prose, len(code - documented)


def modules_of(tree: Path, package: str) -> list[Module]:
    """Return the modules of a package, or of any folder, sorted by path."""
    return [_read(tree, path) for path in sorted((tree / package).rglob("*.py"))]


def _read(tree: Path, path: Path) -> Module:
    relative = path.relative_to(tree)
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(relative, name, path.read_text(encoding="utf-8"))


def long_files(modules: Iterable[Module]) -> dict[str, int]:
    """Return the files with more lines than `LONGEST_FILE`, and their lines."""
    return {module.path.as_posix(): module.lines for module in modules if module.lines > LONGEST_FILE}


def abstract_methods(module: Module) -> list[str]:
    """Return the methods with the decorator `abstractmethod`, as ``Class.method``."""
    return [
        f"{found.name}.{function.name}"
        for found in module.classes
        for function in found.body
        if isinstance(function, Function) and any("abstractmethod" in ast.unparse(d) for d in function.decorator_list)
    ]


def message_classes(module: Module) -> set[str]:
    """Return the classes of a module that cross a process boundary.

    These are the dataclasses of a module named ``messages``, and those that a `Codec` of the module has, by name or by
    an alias for a union: ``Codec(*get_args(Message))``.
    """
    here = {found.name for found in module.classes if any("dataclass" in ast.unparse(d) for d in found.decorator_list)}
    if module.path.stem == "messages":
        return here
    registered = set[str]()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Codec":
            registered |= {name.id for kind in node.args for name in ast.walk(kind) if isinstance(name, ast.Name)}
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in registered and value is not None:
            registered |= {name.id for name in ast.walk(value) if isinstance(name, ast.Name)}
    return here & registered


def method(modules: Iterable[Module], owner: str, name: str) -> Function | None:
    """Return the first method of that name in a class of that name."""
    for found in (found for module in modules for found in module.classes if found.name == owner):
        for function in found.body:
            if isinstance(function, Function) and function.name == name:
                return function
    return None


def public_methods(modules: Iterable[Module], owner: str) -> list[str]:
    """Return the names that a class shows to users: methods and properties without an underscore."""
    return sorted(
        {
            function.name
            for module in modules
            for found in module.classes
            if found.name == owner
            for function in found.body
            if isinstance(function, Function) and not function.name.startswith("_")
        }
    )


def store_files(modules: list[Module]) -> tuple[list[str], dict[str, int]]:
    """Return the operations of the interface `Store`, and the lines of each file beside it with a class of it."""
    operations, folders = list[str](), set[Path]()
    for module in modules:
        found = [name.removeprefix("Store.") for name in abstract_methods(module) if name.startswith("Store.")]
        operations += found
        folders |= {module.path.parent} if found else set()
    backends = {
        module.path.stem: module.lines
        for module in modules
        if module.path.parent in folders
        and any(ast.unparse(base) == "Store" for found in module.classes for base in found.bases)
    }
    return operations, backends


def adapter_imports(modules: list[Module]) -> dict[str, list[str]]:
    """Return the modules below the public names that each module of `ckpt.integrations` imports, if any."""
    (init,) = (module for module in modules if module.name == "ckpt")
    public = _all_of(init)
    found = defaultdict[str, set[str]](set)
    for module in modules:
        if not module.name.startswith("ckpt.integrations."):
            continue
        for name in module.imports():
            below = name.removeprefix("ckpt.")
            if below != name and below.split(".")[0] != "integrations" and below not in public:
                found[module.path.stem].add(name.rpartition(".")[0])
    return {adapter: sorted(names) for adapter, names in found.items()}


def _all_of(module: Module) -> set[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def repeated_modules(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Return the last names that several modules have, with the packages of these."""
    found = defaultdict[str, set[str]](set)
    for module in modules:
        package, _, name = module.name.rpartition(".")
        if not name.startswith("__"):
            found[name].add(package)
    return {name: packages for name, packages in found.items() if len(packages) > 1}


def repeated_classes(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Return the names without an underscore that several classes have, with the modules of these."""
    found = defaultdict[str, set[str]](set)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(module.name)
    return {name: where for name, where in found.items() if len(where) > 1}


def words_of_architecture(tree: Path) -> list[str]:
    """Return the words of the table in docs/architecture.md, in its order."""
    _, _, rest = (tree / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Words\n")
    table = rest.partition("\n## ")[0]
    first = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    return [word.strip() for cell in first if cell != "word" for word in cell.split(",")]
