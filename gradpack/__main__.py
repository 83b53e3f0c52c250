"""``python -m gradpack``: what this installation is and what it found, for bug reports."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from gradpack import __version__, settings


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def report() -> str:
    """The environment report, one fact a line."""
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
        lines.append(f"not usable: {error}")
    lines += [f"{package} {_installed(package)}" for package in ("torch", "numpy", "cupy", "mpi4py")]
    lines.append("settings")
    for name, setting in settings.SETTINGS.items():
        value = os.environ.get(name)
        shown = f"{setting.default or 'empty'} (default)" if value is None else repr(value)
        try:
            settings.get(name)
        except ValueError as error:
            shown += f" (not usable: {error})"
        lines.append(f"  {name} = {shown}: {setting.meaning}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
