"""``python -m gradpack``: what this installation is and what it found, for bug reports."""

from __future__ import annotations

import ctypes
import io
import os
import platform
import sys
from importlib import metadata, util
from pathlib import Path

from gradpack import __version__, settings


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _version_by(library: ctypes.CDLL, function: str) -> int:
    """What a library's ``function(int *version)`` says, or 0 where it fails."""
    version = ctypes.c_int()
    return version.value if getattr(library, function)(ctypes.byref(version)) == 0 else 0


def _cuda_driver() -> str:
    try:
        found = _version_by(ctypes.CDLL("libcuda.so.1"), "cuDriverGetVersion")
    except OSError:
        return "absent"
    return f"for CUDA {found // 1000}.{found % 1000 // 10}" if found else "installed, but not usable"


def _nccl() -> str:
    """The libnccl that a program here would load: that of the nvidia wheels, which torch and CuPy use, else the system's."""
    package = util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    names = [str(path) for folder in folders for path in sorted(Path(folder).glob("*/lib/libnccl.so.2"))]
    for name in [*names, "libnccl.so.2"]:
        try:
            found = _version_by(ctypes.CDLL(name), "ncclGetVersion")
        except (OSError, AttributeError):
            continue
        return f"{found // 10000}.{found // 100 % 100}.{found % 100} ({name})"
    return "not found"


def report() -> tuple[str, bool]:
    """The environment report, one fact a line, and whether gradpack can be used."""
    usable = True
    lines = [
        f"gradpack {__version__}",
        f"python {platform.python_version()} ({sys.executable})",
        f"platform {platform.platform()}",
    ]
    try:
        from gradpack import _C, arrays

        arrays.follow_threads()
        lines.append(f"extension {_C.__version__} ({_C.__file__})")
        lines.append(f"instruction set {_C.simd_name()}")
        lines.append(f"threads {_C.num_threads()} of {len(os.sched_getaffinity(0))} processors")
        lines.append(f"CUDA {'built in' if _C.cuda_built else 'not built in'}")
    except (ImportError, ValueError) as error:
        usable = False
        lines.append(f"not usable: {error}")
    lines += [f"CUDA driver {_cuda_driver()}", f"NCCL {_nccl()}"]
    lines += [f"{package} {_installed(package)}" for package in ("torch", "numpy", "cupy", "mpi4py")]
    lines.append("settings")
    for name, setting in settings.SETTINGS.items():
        value = os.environ.get(name)
        shown = f"{setting.default or 'empty'} (default)" if value is None else repr(value)
        try:
            settings.get(name)
        except ValueError as error:
            usable = False
            shown += f" (not usable: {error})"
        lines.append(f"  {name} = {shown}: {setting.meaning}")
    return "\n".join(lines), usable


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    text, usable = report()
    print(text)
    sys.exit(not usable)
