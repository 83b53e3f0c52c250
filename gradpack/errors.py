"""The exceptions that gradpack raises; ``docs/errors.md`` says when each is raised and what is left of the gradients.

A message reads *operation: argument: found, wanted*::

    allreduce: grads[17] 'layer3.weight': float32[64, 64] here, float32[64, 32] on rank 2

Wrong types raise the built-in ``TypeError``, wrong strides or read-only memory ``BufferError``, wrong values ``ValueError``.
"""

__all__ = [
    "BuildError",
    "DesyncError",
    "GradpackError",
    "LayoutError",
    "LayoutMismatch",
    "PeerLost",
    "TransportError",
    "TransportTimeout",
    "described",
    "renamed",
]


class GradpackError(Exception):
    """Base of all exceptions that gradpack defines.

    Example:
        >>> try:  # doctest: +SKIP
        ...     gradpack.allreduce(model)
        ... except gradpack.LayoutMismatch as error:  # every rank comes here, its gradients untouched
        ...     print(error)
        ... except gradpack.GradpackError:
        ...     raise
    """


class LayoutError(GradpackError, ValueError):
    """The arrays of this rank cannot be packed as asked (overlapping memory, for example)."""


class LayoutMismatch(LayoutError):
    """The ranks do not agree on what to reduce, or one of them refused its own arguments. Raised on every rank."""


class TransportError(GradpackError, RuntimeError):
    """The ranks cannot be reached as asked: no process group, a destroyed or broken one, a forked child."""


class TransportTimeout(TransportError, TimeoutError):
    """The deadline passed before every rank arrived."""


class PeerLost(TransportError):
    """A rank's process is gone."""


def renamed(error: TransportError, text: str) -> TransportError:
    """An error of the same class of gradpack's with another text: subclasses of others may take other arguments."""
    kind = next(kind for kind in (TransportTimeout, PeerLost, TransportError) if isinstance(error, kind))
    return kind(text)


def described(error: BaseException) -> str:
    """``class: text`` of an error, whatever its ``__str__`` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} that cannot be printed"


class DesyncError(GradpackError):
    """Ranks that should hold equal values do not."""


class BuildError(GradpackError, ImportError):
    """Something that this build or this environment lacks was asked for (CUDA, torch, a compiler)."""
