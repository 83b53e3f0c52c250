"""Imports and includes point down, few files name a framework, and files stay short. Each rule is also seen to catch a breach."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 450

# From the top down. A module may import what stands on a lower line; a name that ends in a dot is a package.
PYTHON_LAYERS = [
    ["gradpack", "__main__", "testing"],
    ["functional", "sync"],
    ["trainers.", "towers."],
    ["transports."],
    ["packer"],
    ["groups"],
    ["ranks"],
    ["members"],
    ["peers", "scaling", "trace"],
    ["arrays", "optimizer_state"],
    ["layout"],
    ["options", "result"],
    ["dtypes", "errors", "settings", "_version", "_C"],
]
MODULES = [name for names in PYTHON_LAYERS for name in names]
# Modules of one package may import one another, except these, each of which is complete without the others of its group.
SEPARATE = [
    {"transports.process_group", "transports.mpi", "transports.byte_group", "transports.nccl", "transports.shared_memory"},
    {"trainers.reducer", "trainers.ddp_hook", "trainers.bmuf"},
]
STDLIB_ONLY = {"layout", "options", "dtypes", "errors", "settings", "_version"}
# The only modules that may name a framework, even inside a function or for a type checker.
FRAMEWORKS = {
    "torch": {"arrays", "optimizer_state", "ranks", "transports.process_group", "towers.replicas", "testing"},
    "numpy": {"arrays", "testing"},
    "cupy": {"arrays", "testing"},
    "mpi4py": {"ranks", "transports.mpi", "testing"},
}

CPP_LAYERS = ["third_party", "common", "kernels", "transports", "python"]  # from the bottom up
CUDA_HEADER = re.compile(r"(cuda|cub/|cooperative_groups|device_launch_parameters|nv/)")
CUDA_FILES = {"kernels/backend_cuda.cu", "common/host_device.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
CPP_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}


def layer(module: str) -> int | None:
    for level, names in enumerate(reversed(PYTHON_LAYERS)):
        if any(module == name.rstrip(".") or (name.endswith(".") and module.startswith(name)) for name in names):
            return level
    return None


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["gradpack", *module.split(".")] if module != "gradpack" else ["gradpack"]
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def own_module(package: Path, name: str) -> str | None:
    """gradpack.layout.Layout -> layout; None if `name` is not of this package."""
    parts = name.split(".")
    if parts[0] != "gradpack":
        return None
    if parts[1:2] == ["_C"]:
        return "_C"
    for end in range(len(parts), 1, -1):
        place = package.joinpath(*parts[1:end])
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
            return ".".join(parts[1:end])
    return "gradpack"


def import_problem(module: str, name: str, target: str | None) -> str | None:
    """What is wrong with `module` importing `name`, which is the own module `target` or of some other distribution."""
    top = name.split(".")[0]
    if target is None:
        if top in sys.stdlib_module_names:
            return None
        if module in STDLIB_ONLY:
            return f"{module} is stdlib only"
        if module in FRAMEWORKS.get(top, ()) or (top == "torch" and module.startswith("trainers.")):
            return None
        return f"{top} may not be named here"
    here, there = layer(module), layer(target)
    if here is None or there is None:
        return f"{module if here is None else target} has no place in PYTHON_LAYERS"
    if target == module or here > there:
        return "the extension is not pure Python" if target == "_C" and module in STDLIB_ONLY else None
    package = module.split(".")[0]
    if here == there and package == target.split(".")[0] and f"{package}." in MODULES:
        return "these do not import one another" if any({module, target} <= group for group in SEPARATE) else None
    return None if module in PYTHON_LAYERS[0] and here == there else "points up or sideways"


def python_violations(package: Path) -> tuple[list[str], int]:
    """Every breach below `package`, and how many imports were looked at."""
    problems, count, edges = [], 0, {}
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts) or "gradpack"
        for name in imports(ast.parse(path.read_text()), module, is_package):
            count += 1
            target = own_module(package, name)
            if target not in (None, module):
                edges.setdefault(module, set()).add(target)
            if problem := import_problem(module, name, target):
                problems.append(f"{module} imports {name}: {problem}")
    problems += [f"{' -> '.join(cycle)}: an import cycle" for cycle in cycles(edges)]
    return problems, count


def cycles(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """At least one cycle if there is any."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> Iterator[list[str]]:
        if module in trail:
            yield [*trail[trail.index(module) :], module]
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                yield from visit(target, [*trail, module])
            done.add(module)

    for module in sorted(edges):
        yield from visit(module, [])


def cpp_violations(csrc: Path) -> tuple[list[str], int]:
    """Every breach below `csrc`, and how many includes were looked at."""
    problems, count = [], 0
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in CPP_SUFFIXES):
        place = path.relative_to(csrc)
        here = place.parts[0]
        if here not in CPP_LAYERS:
            problems.append(f"{place}: {here} has no place in CPP_LAYERS")
            continue
        for header in INCLUDE.findall(path.read_text()):
            count += 1
            beside = (path.parent / header).resolve()
            inside = beside.relative_to(csrc.resolve()) if beside.is_relative_to(csrc.resolve()) else Path(header)
            there = (inside if beside.is_file() else Path(header)).parts[0]
            if there in CPP_LAYERS and CPP_LAYERS.index(there) > CPP_LAYERS.index(here):
                problems.append(f"{place} includes {header}: points up")
            if header.startswith("pybind11/") or header == "Python.h":
                if here != "python":
                    problems.append(f"{place} includes {header}: only csrc/python knows Python")
            elif CUDA_HEADER.match(header) and place.as_posix() not in CUDA_FILES:
                problems.append(f"{place} includes {header}: only {' and '.join(sorted(CUDA_FILES))} know CUDA")
    return problems, count


def long_files(root: Path) -> tuple[list[str], int]:
    """The source files of more than MAX_LINES lines, and how many files were looked at."""
    problems, count = [], 0
    folders = [root / name for name in ("csrc", "gradpack", "tests", "benchmarks", "examples")]
    paths = [*root.glob("*.py"), *(path for folder in folders for path in folder.rglob("*"))]
    for path in sorted(path for path in paths if path.suffix in CPP_SUFFIXES | {".py", ".pyi", ".sh"}):
        if "third_party" in path.parts:
            continue
        count += 1
        lines = len(path.read_text().splitlines())
        if lines > MAX_LINES:
            problems.append(f"{path.relative_to(root)}: {lines} lines, at most {MAX_LINES} wanted")
    return problems, count


@pytest.mark.parametrize(
    ("check", "folder", "least"), [(python_violations, "gradpack", 5), (cpp_violations, "csrc", 20), (long_files, ".", 10)]
)
def test_tree_keeps_the_rules(check, folder, least):
    problems, count = check(ROOT / folder)
    assert not problems, "\n".join(problems)
    assert count >= least, "the check looked at next to nothing"


@pytest.mark.parametrize(
    ("module", "line", "problem"),
    [
        ("layout", "from gradpack.packer import Packer", "layout imports gradpack.packer.Packer: points up"),
        ("layout", "import numpy", "stdlib only"),
        ("layout", "from gradpack import _C", "not pure"),
        ("errors", "from gradpack.settings import x", "points up or sideways"),
        ("options", "def f():\n    from gradpack import functional", "points up"),
        ("peers", "from gradpack import trace", "sideways"),
        ("groups", "import gradpack", "points up"),
        ("groups", "from . import packer", "points up"),
        ("packer", "def f():\n    import torch", "torch may not be named"),
        ("packer", "import importlib\nimportlib.import_module('torch')", "torch may not be named"),
        ("packer", "if TYPE_CHECKING:\n    import numpy as np", "numpy may not be named"),
        ("functional", "import cupy", "cupy may not be named"),
        ("functional", "import requests", "requests may not be named"),
        ("transports.nccl", "from gradpack.transports import process_group", "do not import one another"),
        ("transports.nccl", "from .shared_memory import x", "do not import one another"),
        ("transports.staged", "import torch", "torch may not be named"),
        ("transports.base", "from gradpack.trainers import reducer", "points up"),
        ("trainers.reducer", "from gradpack.towers import spec", "points up or sideways"),
        ("trainers.reducer", "from gradpack.trainers.bmuf import BMUF", "do not import one another"),
        ("towers.algorithms", "import torch", "torch may not be named"),
        ("towers.replicas", "from gradpack.trainers import bmuf", "points up or sideways"),
        ("surprise", "import gradpack.errors", "surprise has no place"),
    ],
)
def test_planted_import_is_caught(tmp_path, module, line, problem):
    package = planted_package(tmp_path)
    package.joinpath(*module.split(".")).with_suffix(".py").write_text(line + "\n")
    (found,) = python_violations(package)[0]
    assert problem in found


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("functional", "from gradpack.transports import base"),
        ("trainers.reducer", "import torch\nfrom gradpack.packer import Packer"),
        ("transports.nccl", "from .staged import x\nfrom ..errors import y\nimport os.path"),
        ("arrays", "import cupy, numpy, torch\nfrom gradpack import _C, layout"),
        ("testing", "import numpy, torch, gradpack"),
        ("towers.replicas", "from . import spec\nimport torch"),
    ],
)
def test_allowed_import_is_not_caught(tmp_path, module, line):
    package = planted_package(tmp_path)
    package.joinpath(*module.split(".")).with_suffix(".py").write_text(line + "\n")
    assert python_violations(package)[0] == []


def test_planted_cycle_is_caught(tmp_path):
    package = planted_package(tmp_path)
    (package / "transports/base.py").write_text("from gradpack.transports import staged\n")
    (package / "transports/staged.py").write_text("def f():\n    from gradpack.transports import base\n")
    assert python_violations(package)[0] == ["transports.base -> transports.staged -> transports.base: an import cycle"]


def planted_package(folder: Path) -> Path:
    """An empty module for every name in PYTHON_LAYERS."""
    package = folder / "gradpack"
    inside = ["transports.base", "transports.staged", "towers.spec", "towers.algorithms", "towers.replicas"]
    for module in [*MODULES, *inside, *(name for group in SEPARATE for name in group)]:
        place = package.joinpath(*module.rstrip(".").split("."))
        path = place / "__init__.py" if module.endswith(".") else place.with_suffix(".py")
        path = package / "__init__.py" if module == "gradpack" else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (package / "_C.py").unlink()
    return package


@pytest.mark.parametrize(
    ("place", "header", "problem"),
    [
        ("common/x.h", '"kernels/ops.h"', "points up"),
        ("common/x.h", '"../kernels/ops.h"', "points up"),
        ("kernels/x.cc", '"transports/shm.h"', "points up"),
        ("transports/x.cc", '"python/array_arg.h"', "points up"),
        ("transports/x.cc", "<pybind11/pybind11.h>", "only csrc/python"),
        ("kernels/x.h", "<Python.h>", "only csrc/python"),
        ("kernels/x.cc", "<cuda_runtime.h>", "know CUDA"),
        ("python/x.cc", "<cuda_fp16.h>", "know CUDA"),
        ("transports/x.cc", "<cub/cub.cuh>", "know CUDA"),
        ("elsewhere/x.cc", "<vector>", "no place"),
    ],
)
def test_planted_include_is_caught(tmp_path, place, header, problem):
    for path in (tmp_path / "kernels/ops.h", tmp_path / place):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / place).write_text(f"#include <cstdint>\n  #  include {header}\n")
    (found,) = cpp_violations(tmp_path)[0]
    assert place in found
    assert problem in found


def test_allowed_include_is_not_caught(tmp_path):
    for folder in CPP_LAYERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "python/x.cc").write_text('#include <pybind11/pybind11.h>\n#include "kernels/a.h"\n#include "y.h"\n')
    (tmp_path / "kernels/backend_cuda.cu").write_text('#include <cuda_runtime.h>\n#include "common/half.h"\n')
    (tmp_path / "common/host_device.h").write_text("#include <cuda_fp16.h>\n")
    assert cpp_violations(tmp_path) == ([], 6)


def test_long_file_is_caught(tmp_path):
    for name, lines in {"csrc/a.cc": MAX_LINES, "csrc/third_party/b.h": MAX_LINES + 1, "tests/c.py": MAX_LINES + 1}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n" * lines)
    assert long_files(tmp_path) == ([f"tests/c.py: {MAX_LINES + 1} lines, at most {MAX_LINES} wanted"], 2)
