"""Builds ``gradpack._C``: CMake and ninja drive CMakeLists.txt; everything else is in pyproject.toml.

Settings from the environment: ``CXX``, ``CXXFLAGS``, ``CMAKE_ARGS``, ``CMAKE_BUILD_PARALLEL_LEVEL``, ``GRADPACK_CUDA``.
"""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def fail(message: str) -> NoReturn:
    # SystemExit is the one exception that every front end lets through without a traceback.
    raise SystemExit(f"gradpack: {message}")


def find_tool(name: str, folder: str) -> str:
    """The program of the installed wheel `name` if there is one, else the one on PATH."""
    try:
        path = shutil.which(name, path=getattr(importlib.import_module(name), folder))
    except (ImportError, AttributeError):
        path = None
    return path or shutil.which(name) or fail(f"{name} not found: install it (pip install {name}), or build with isolation")


def find_compiler() -> str:
    """The C++ compiler, checked here because CMake says it in forty lines."""
    how = "install g++ 9 or clang 10 or newer (Debian: apt install g++; Fedora: dnf install gcc-c++) or set CXX"
    command = os.environ.get("CXX", "")
    names = shlex.split(command)[:1] or ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        found = f"CXX={command} does not exist" if command else f"none of {', '.join(names)} is on PATH"
        fail(f"no C++ compiler: {found}; {how}")
    probe = [path, *shlex.split(command)[1:], "-std=c++17", "-x", "c++", "-fsyntax-only", "-"]
    if subprocess.run(probe, input=b"#include <optional>\n", capture_output=True).returncode:
        fail(f"the C++ compiler {path} cannot compile C++17; {how}")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(f"Python.h not found: install the headers of Python {version} (Debian: apt install python{version}-dev)")
    return path


def cuda_setting() -> str:
    """GRADPACK_CUDA; AUTO is OFF until there is a CUDA backend to build."""
    value = os.environ.get("GRADPACK_CUDA", "AUTO").upper()
    if value == "ON":
        fail("GRADPACK_CUDA=ON: this version has no CUDA backend; set GRADPACK_CUDA to AUTO or OFF")
    if value not in ("AUTO", "OFF"):
        fail(f"GRADPACK_CUDA={value}: wanted AUTO, ON or OFF")
    return value


def stable_pybind11(build_dir: Path) -> Path:
    """pybind11's headers and CMake files at a path that outlives the build environment.

    pip gives every isolated build a new folder; were the headers used from there, each build would compile everything again.
    """
    try:
        import pybind11
    except ImportError:
        fail("pybind11 not found: install it (pip install pybind11), or build with isolation")
    copy = build_dir / f"pybind11-{pybind11.__version__}"
    if not copy.is_dir():
        partial = copy.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(pybind11.get_include(), partial / "include")
        shutil.copytree(pybind11.get_cmake_dir(), partial / "share/cmake/pybind11")
        partial.rename(copy)
    return copy / "share/cmake/pybind11"


def fresh_if_changed(build_dir: Path, key: str) -> None:
    """Empties `build_dir` if it was made from other inputs: CMake's cache never forgets a compiler, flag or path."""
    stamp = build_dir / "made-from.txt"
    if not stamp.is_file() or stamp.read_text() != key:
        shutil.rmtree(build_dir, ignore_errors=True)
        build_dir.mkdir(parents=True)
        stamp.write_text(key)


class CMakeBuild(build_ext):
    """Compiles in build/<ABI tag>, so that Pythons do not clash and a second build is incremental, and copies the result."""

    def build_extension(self, ext: Extension) -> None:
        compiler, cuda = find_compiler(), cuda_setting()
        cmake, ninja = find_tool("cmake", "CMAKE_BIN_DIR"), find_tool("ninja", "BIN_DIR")
        python = os.path.realpath(sys.executable)
        flags = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS")]
        build_dir = ROOT / "build" / sysconfig.get_config_var("SOABI")
        fresh_if_changed(build_dir, "\n".join([str(ROOT), python, compiler, *flags]) + "\n")
        configure = [cmake, "--log-level=NOTICE", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        # On every build, since the cached values may point into a build environment that is gone.
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-Dpybind11_DIR={stable_pybind11(build_dir)}"]
        configure += [f"-DPython_EXECUTABLE={python}", f"-DGRADPACK_CUDA={cuda}"]
        configure += [f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}"]
        self.run_cmake([*configure, *shlex.split(os.environ.get("CMAKE_ARGS", ""))])
        cores = str(self.parallel or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or len(os.sched_getaffinity(0)))
        self.run_cmake([cmake, "--build", str(build_dir), "--parallel", cores])
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Removed first: a running process may have the old file mapped.
        target.unlink(missing_ok=True)
        shutil.copy2(build_dir / target.name, target)

    def run_cmake(self, command: list[str]) -> None:
        # What cmake says on stdout is progress; problems are on stderr, and the compiler's come through ninja.
        quiet = self.distribution.verbose == 0 and "--build" not in command
        if subprocess.run(command, stdout=subprocess.DEVNULL if quiet else None).returncode:
            fail(f"the build failed, see the lines above; the command was: {shlex.join(command)}")


class Build(build):
    """The extension first, so that a missing compiler is the last thing said and not lost among copied files."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")

    def run(self) -> None:
        # Files deleted from the source would otherwise stay in the wheels built here.
        shutil.rmtree(Path(self.build_lib, "gradpack"), ignore_errors=True)
        super().run()


setup(ext_modules=[Extension("gradpack._C", sources=[])], cmdclass={"build": Build, "build_ext": CMakeBuild})
