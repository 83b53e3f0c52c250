"""gradpack packs gradients, all-reduces them and puts the result back, in as few passes over memory as the hardware allows.

``__all__`` is the promise of stability: what it lists stays. Names resolve on first use; importing gradpack imports neither torch
nor NumPy nor CuPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradpack._version import __version__

if TYPE_CHECKING:
    from gradpack.errors import BuildError as BuildError
    from gradpack.errors import DesyncError as DesyncError
    from gradpack.errors import GradpackError as GradpackError
    from gradpack.errors import LayoutError as LayoutError
    from gradpack.errors import LayoutMismatch as LayoutMismatch
    from gradpack.errors import PeerLost as PeerLost
    from gradpack.errors import TransportError as TransportError
    from gradpack.errors import TransportTimeout as TransportTimeout
    from gradpack.functional import Explanation as Explanation
    from gradpack.functional import allreduce as allreduce
    from gradpack.functional import broadcast as broadcast
    from gradpack.functional import explain as explain
    from gradpack.functional import plan as plan
    from gradpack.groups import close as close
    from gradpack.layout import Layout as Layout
    from gradpack.result import Handle as Handle
    from gradpack.result import Result as Result
    from gradpack.sync import barrier as barrier
    from gradpack.sync import check_in_sync as check_in_sync

_HOMES = {
    "errors": (
        "BuildError",
        "DesyncError",
        "GradpackError",
        "LayoutError",
        "LayoutMismatch",
        "PeerLost",
        "TransportError",
        "TransportTimeout",
    ),
    "functional": ("Explanation", "allreduce", "broadcast", "explain", "plan"),
    "groups": ("close",),
    "layout": ("Layout",),
    "result": ("Handle", "Result"),
    "sync": ("barrier", "check_in_sync"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BuildError",
    "DesyncError",
    "Explanation",
    "GradpackError",
    "Handle",
    "Layout",
    "LayoutError",
    "LayoutMismatch",
    "PeerLost",
    "Result",
    "TransportError",
    "TransportTimeout",
    "__version__",
    "allreduce",
    "barrier",
    "broadcast",
    "check_in_sync",
    "close",
    "explain",
    "plan",
]


def _extension() -> Any:
    try:
        return import_module("gradpack._C")
    except ModuleNotFoundError as error:
        from gradpack.errors import BuildError

        raise BuildError(
            f"import: gradpack: found {__path__[0]}, a source folder without its extension, wanted an installed package: run "
            "`pip install .` in the folder that holds it, and Python from another one"
        ) from error


def __getattr__(name: str) -> Any:
    if name == "_C":
        return _extension()
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'gradpack' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"gradpack.{home}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
