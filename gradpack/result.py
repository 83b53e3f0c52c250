"""What a call gives back: ``Result``, and ``Handle`` for a call that is still going on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

__all__ = ["Handle", "Result"]


@dataclass(frozen=True)
class Result:
    """What a finished call found.

    Attributes:
        finite: Whether every reduced gradient is free of inf and NaN; the same answer on every rank. None where the call was
            told not to look (``check_finite=False``) or does no arithmetic (``broadcast``).
        nonfinite: The gradients that are not finite, by name where names were given, else by index.
        wire_bytes: Bytes that this rank sent to the other ranks, the agreement included.
        seconds: Duration of the whole call.

    Example:
        >>> result = gradpack.allreduce(model)  # doctest: +SKIP
        >>> if not result.finite:  # doctest: +SKIP
        ...     print("skipping the step:", result.nonfinite)
    """

    finite: bool | None
    nonfinite: tuple[str | int, ...]
    wire_bytes: int
    seconds: float

    @property
    def grad_norm(self) -> float:
        """Not in this version.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("Result: grad_norm: this version does not compute it")


class Handle:
    """A call that runs in the background (``async_op=True``). The arrays are kept alive until it is done.

    An error that nobody waited for is raised by the next call on the group without ``async_op``, or by ``close``.

    Example:
        >>> handle = gradpack.allreduce(grads, async_op=True)  # doctest: +SKIP
        >>> result = handle.wait()  # doctest: +SKIP
    """

    def __init__(self, future: Future[Result], on_reported: Callable[[], None]) -> None:
        self._future = future
        self._on_reported = on_reported

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future.done()

    def wait(self) -> Result:
        """Waits for the end of the call. May be called again; the deadline is the call's own.

        Raises:
            GradpackError: What the call itself would have raised.
        """
        try:
            return self._future.result()
        finally:
            if self._future.done():
                self._on_reported()
