"""The house keeps its order: layers, public names, what is imported when."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
LAYERS = [
    [
        *("errors", "display", "units", "forks", "files", "names", "devices", "loading"),
        *("cadence", "interrupts"),
        *("oracle", "porting", "torch_internals"),
    ],
    ["capture"],
    ["weights"],
    ["profile"],
    ["schedule"],
    ["simulate"],
    ["board"],
    ["plan"],
    ["account"],
    ["observe"],
    ["storage"],
    ["links"],
    ["engine"],
    ["workers"],
    ["comparison"],
    ["training"],
    ["steps"],
    ["runner"],
    ["autograd"],
    ["audit"],
    ["checkpoint"],
    ["passes"],
    ["planning"],
    ["changing"],
    ["sessions"],
    ["generation"],
    ["running"],
    ["pipeline"],
    ["serving"],
    ["verification"],
    ["integrations"],
    ["doctor"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
PURE = {"schedule": {"errors", "schedule"}, "simulate": {"errors", "schedule", "simulate"}}
WITHOUT_TORCH = (
    "schedule",
    "simulate",
    "board.runs",
    "board.status",
    "account.attribution",
    "plan",
    "profile.data",
    "errors",
    "names",
    "porting",
    "doctor",
)


def files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """The layers that a file imports."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (n.split(".")[1] for n in names if n.startswith("penstock."))


def test_layers_import_downward() -> None:
    upward = []
    for path in files():
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        above = sorted(name for name in set(imported(path)) if HEIGHT[name] > HEIGHT[own])
        upward += [f"{path.relative_to(ROOT)} imports {name}, which is above it" for name in above]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("name", PURE)
def test_schedules_and_their_simulation_know_nothing_else(name: str) -> None:
    for path in (ROOT / name).glob("*.py"):
        assert set(imported(path)) <= PURE[name], path


def test_tests_are_where_their_subjects_are() -> None:
    """Folders of tests are named after packages or modules, but for those in CONTRIBUTING.md."""
    here = ROOT.parent / "tests"
    others = "floor support house elastic faults fuzz interleavings ports programs resume zoo"
    known = {path.stem for path in ROOT.iterdir()} | set(others.split())
    assert {p.name for p in here.iterdir() if p.is_dir() and any(p.glob("*.py"))} <= known
    assert [path.name for path in here.glob("*.py")] == ["conftest.py"]
    names = [path.name for path in here.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_the_oracle_knows_nothing_of_penstock() -> None:
    """It is the measure of all the rest, so it must not share what may be wrong there."""
    code = (
        "import sys, runpy; "
        f"found = runpy.run_path({str(ROOT / 'oracle.py')!r}); "
        "print(found['Oracle'].__name__, [m for m in sys.modules if 'penstock' in m])"
    )
    assert in_a_new_interpreter(code) == "Oracle []"


def test_the_test_sees_imports() -> None:
    assert "capture" in set(imported(ROOT / "pipeline.py"))


def imports_of(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of Penstock that a file imports: at once, lazily, or for type checking only."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(edges: Mapping[str, Collection[str]]) -> list[set[str]]:
    """The modules that lead back to themselves, those that lead to one another together."""
    reached = {}
    for start in edges:
        seen: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += edges[name]
        reached[start] = seen
    found = []
    for name in sorted(edges):
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even in functions, nor for type checking; a package counts as its `__init__.py`."""
    paths = {module_name(path): path for path in files()}
    assert circles({name: imports_of(path, paths) for name, path in paths.items()}) == []


KINDS = ("threads", "processes", "ranks", "ray")
BUILT_ON = {"ray": {"ranks"}}
"""Folders of one kind of workers that another may use: an actor is a rank."""


def kinds_imported(path: Path) -> set[str]:
    """The kinds of workers of which a file imports something."""
    paths = {module_name(each): each for each in files()}
    found = (name.split(".") for name in imports_of(path, paths) if name.count(".") > 1)
    return {parts[2] for parts in found if parts[1] == "workers"} & set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_workers_do_not_import_each_other(kind: str) -> None:
    """What several have in common is in `workers/` itself, where only `kinds.py` knows them."""
    for path in (ROOT / "workers" / kind).glob("*.py"):
        assert kinds_imported(path) <= {kind} | BUILT_ON.get(kind, set()), path


def test_only_one_file_knows_all_kinds_of_workers() -> None:
    folder = ROOT / "workers"
    assert [p.name for p in folder.glob("*.py") if kinds_imported(p)] == ["kinds.py"]
    assert kinds_imported(folder / "kinds.py") == set(KINDS)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [{"b", "c"}, {"d"}]


def in_a_new_interpreter(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_imports_nothing_but_the_package(name: str) -> None:
    code = (
        f"import sys, numpy, msgspec; before = set(sys.modules); import penstock.{name}; "
        "found = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(found - sys.stdlib_module_names - {'numpy', 'msgspec'})"
    )
    assert in_a_new_interpreter(code) == "{'penstock'}"


def test_importing_penstock_or_asking_for_help_imports_no_torch() -> None:
    assert in_a_new_interpreter("import sys, penstock; print('torch' in sys.modules)") == "False"
    code = (
        "import sys; from click.testing import CliRunner; from penstock.cli import main; "
        "result = CliRunner().invoke(main, ['--help']); "
        "print(result.exit_code, 'inspect' in result.output, 'torch' in sys.modules)"
    )
    assert in_a_new_interpreter(code) == "0 True False"


def test_public_names_are_exact() -> None:
    assert penstock.__all__ == sorted(set(penstock.__all__))
    assert dir(penstock) == penstock.__all__
    for name in penstock.__all__:
        value = getattr(penstock, name)
        assert getattr(value, "__name__", name) == name
        assert value.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'Pipe'"):
        _ = penstock.Pipe


def test_functions_are_not_hidden_by_packages_of_the_same_name() -> None:
    code = (
        "import penstock.plan.search, penstock.capture.capturing, penstock.profile.measure; "
        "import penstock as ps; print(*(callable(f) for f in (ps.plan, ps.capture, ps.profile)))"
    )
    assert in_a_new_interpreter(code) == "True True True"


def test_functions_that_use_the_package_can_be_pickled_by_value() -> None:
    code = (
        "import cloudpickle, pickle, penstock as ps; "
        "found = pickle.loads(cloudpickle.dumps(lambda: ps.Ray)); print(found().__name__)"
    )
    assert in_a_new_interpreter(code) == "Ray"


def private_uses(tree: ast.AST) -> Iterator[str]:
    """What a module names of torch that is private, by whatever names it has imported it."""
    names = {"torch": "torch"}
    for name, path in names_of_torch(tree):
        names[name] = path
        if is_private(path):
            yield path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            path = ".".join((names.get(first, ""), *rest))
            if first in names and path.replace(".", "").isidentifier() and is_private(path):
                yield path


def names_of_torch(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names under which a module has what it imports of torch, and what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            yield from ((alias.asname or alias.name, alias.name) for alias in names)


def is_private(path: str) -> bool:
    """Whether a part of it begins with an underscore, and is no `__version__`."""
    return any(part[0] == "_" and part[:2] != "__" for part in path.split("."))


def cuda_uses(tree: ast.AST) -> Iterator[str]:
    """Where a module names `torch.cuda`, other than in text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (path for path in paths if path.startswith("torch.cuda"))
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch.cuda"))


def test_cuda_is_named_in_devices_only() -> None:
    """What depends on the kind of device is behind `devices.kind.Kind`."""
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name != "devices" or path.parent.parent != ROOT:
            assert list(cuda_uses(parsed(path))) == [], path


@pytest.mark.parametrize(
    "code",
    ["torch.cuda.synchronize()", "import torch.cuda", "from torch import cuda", "s: torch.cuda.S"],
)
def test_uses_of_cuda_are_found(code: str) -> None:
    assert list(cuda_uses(ast.parse(code)))


def test_what_is_private_to_torch_is_named_in_one_module() -> None:
    """The oracle, which imports nothing of Penstock, has `pytree` of its own."""
    for path in sorted(ROOT.rglob("*.py")):
        if path.name not in ("torch_internals.py", "oracle.py"):
            found = list(private_uses(parsed(path)))
            assert not found, f"{path}: {found}"
    own = ROOT / "torch_internals.py"
    assert {"torch._C.DisableTorchFunction"} < set(private_uses(parsed(own)))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch._C.has_mps", "torch._C.has_mps"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch.utils import checkpoint as c\nc._hook", "torch.utils.checkpoint._hook"),
        ("import torch.distributed as dist\ndist._x", "torch.distributed._x"),
        ("from torch import nn\nnn.Module._call_impl", "torch.nn.Module._call_impl"),
        ("module._buffers", None),
        ("import torch\ntorch.__version__", None),
    ],
)
def test_private_uses_are_found(code: str, found: str | None) -> None:
    assert found == next(private_uses(ast.parse(code)), None)


GONE = frozenset(
    "told tell tells telling agreed everyones everybodys parcel parcels hire hired hiring narrow "
    "narrowed nap naps meeting joining site crew crews settle settled".split()
)
"""Words that were private to this project; the field has others for what they said."""


def words_of_names(path: Path) -> Iterator[tuple[str, str]]:
    """What a file names: itself, functions, classes and attributes; and each word of that."""
    names = [path.stem]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    for name in names:
        for word in re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", name).lower()):
            yield name, word


def test_names_are_of_words_that_the_field_knows() -> None:
    found = [
        (path.name, name)
        for path in ROOT.rglob("*.py")
        for name, word in words_of_names(path)
        if word in GONE
    ]
    assert found == []


def test_private_words_are_found(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("class Parcel:\n    tells: bool\n    def telling(self):\n        self.x = 1\n")
    found = {name for name, word in words_of_names(path) if word in GONE}
    assert found == {"Parcel", "telling", "tells"}
