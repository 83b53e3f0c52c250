"""The extension's face. Counts are elements of the gradient's dtype unless a name says bytes."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, final

__version__: str
cuda_built: bool

def simd_name() -> str: ...
def set_num_threads(num_threads: int, /) -> None: ...
def num_threads() -> int: ...

@final
class Arrays:
    """The arrays of one call: addresses, shapes, dtypes, orders. Keeps the described objects alive."""

    def __len__(self) -> int: ...
    @property
    def key(self) -> bytes:
        """16 bytes that are equal where dtypes, shapes, memory orders and device kinds are (never addresses)."""
    @property
    def device(self) -> tuple[str, int]:
        """('cpu', 0) or ('cuda', index); ('cpu', 0) for an empty list."""
    @property
    def nbytes(self) -> int: ...
    @property
    def present(self) -> bytes:
        """One bit per array, least significant first: whether this rank has it (a Parameter whose .grad is None: no)."""
    @property
    def num_absent(self) -> int: ...
    def shape(self, index: int, /) -> tuple[int, ...]: ...
    def dtype(self, index: int, /) -> str: ...
    def order(self, index: int, /) -> tuple[int, ...]:
        """Dimensions from outermost to innermost in memory; () where that is the logical order (sizes of 1 do not count)."""
    def pack_logically(self, indices: Sequence[int], /) -> None:
        """Walks these arrays in logical (row-major) order instead of memory order from now on.

        Not while a method of Plan works on them.
        """
    def torch_tensors(self) -> list[Any]:
        """The described torch tensors (gradients, not their Parameters) that were present."""

def describe(
    objects: Sequence[Any], operation: str, argument: str, names: Sequence[str] | None, parameters: str, protocol: str
) -> Arrays:
    """One call for the whole list.

    `parameters` says what a torch.nn.Parameter stands for: "grad" or "value". `protocol` is "auto" or the one protocol to use:
    "exchange", "dlpack", "cuda_array_interface", "buffer". Messages begin "{operation}: {argument}[{i}] {name!r}: ".
    Raises TypeError, BufferError, ValueError.
    """

@final
class Buffer:
    """Page-aligned host memory with the (writable) buffer protocol; zeroed when made."""

    def __init__(self, nbytes: int, /) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...

@final
class Nonfinite:
    """One flag for each array of a call."""

    def __init__(self, num_arrays: int, /) -> None: ...
    def any(self) -> bool: ...
    def indices(self) -> list[int]: ...

@final
class Plan:
    """The streams of a layout. Ranges [begin, end) are of one stream, in its elements.

    `offset`(s) are bytes into the buffer(s). `counts` holds one int32 divisor for each array in place of `divisor`.
    Every method checks bounds, releases the GIL while it works and may be called from any thread.
    """

    def __init__(self, key: bytes, num_arrays: int, streams: Iterable[tuple[str, str, Sequence[int], Sequence[int]]]) -> None:
        """streams: (dtype, wire dtype, gradient indices, element counts)."""
    def pack(
        self, arrays: Arrays, stream: int, begin: int, end: int, buffer: Buffer, offset: int, nonfinite: Nonfinite | None = None
    ) -> None: ...
    def unpack(
        self,
        arrays: Arrays,
        stream: int,
        begin: int,
        end: int,
        buffer: Buffer,
        offset: int,
        divisor: int = 1,
        counts: bytes | None = None,
        nonfinite: Nonfinite | None = None,
    ) -> None: ...
    def reduce_unpack(
        self,
        arrays: Arrays,
        stream: int,
        begin: int,
        end: int,
        buffer: Buffer,
        offsets: Sequence[int],
        divisor: int = 1,
        counts: bytes | None = None,
        nonfinite: Nonfinite | None = None,
    ) -> None: ...
    def reduce(
        self,
        stream: int,
        begin: int,
        end: int,
        buffer: Buffer,
        offsets: Sequence[int],
        out: Buffer,
        out_offset: int,
        divisor: int = 1,
        counts: bytes | None = None,
    ) -> None: ...
    def check_finite(self, arrays: Arrays, nonfinite: Nonfinite) -> None:
        """Looks at every gradient of every stream; moves nothing."""

@final
class Peers:
    """Who of a group of ranks is alive, what those that gave up said, and where each is in the sequence of calls.

    One thread and one TCP connection to each other rank. A process that is stopped is not gone; a connection that ended, a
    process that ended and a host that does not acknowledge are told apart. Methods release the GIL while they wait and may be
    called from any thread (`enter`, `step` and `leave` from one at a time). In a forked child all of them raise RuntimeError,
    except `close` and the destructor, which do nothing there. Raises OSError where the system refuses a socket or a thread.
    """

    def __init__(self, rank: int, size: int, host_timeout: float, interface: str, *, host: str = "") -> None:
        """Listens; there is no thread yet.

        `host_timeout` is in seconds, 0.1 to 1e6. Addresses of `interface` are tried before others; of a list with commas, the
        first counts. Ranks of different `host` treat each other as being on different hosts ("": the boot id says).
        """
    def card(self) -> bytes:
        """What the other ranks need to reach this one; 4096 bytes at most."""
    def connect(self, cards: Sequence[bytes]) -> None:
        """Starts the thread, which connects until all are connected. One card for each rank, in rank order."""
    def wait_connected(self, seconds: float) -> bool:
        """Whether all are connected. Returns early also where a rank ended before it was connected."""
    def unreached(self) -> list[int]: ...
    def enter(self, call: int) -> None:
        """This rank is inside call number `call` (1, 2, ...) now, at step 0."""
    def step(self, step: int) -> None: ...
    def leave(self) -> None:
        """The call is finished."""
    def verdict(self, call: int, seconds: float) -> tuple[str, int, str] | None:
        """Waits for bad news, which is kept once it is known: (kind, rank, text).

        "gave_up": the rank called `give_up`; the text is kind, a newline, text. Goes before the others, of which the first
        counts. "gone": its process is. "silent": its host, or the network to it, does not acknowledge. "left": it called
        `close` and had finished fewer than `call` calls.
        """
    def positions(self, seconds: float) -> list[tuple[int, bool, int] | None]:
        """Where each rank is: (the call it entered last, whether it is inside, step). None: it did not answer in time."""
    def give_up(self, kind: str, text: str) -> None:
        """Tells all ranks; only the first time counts. Of `text` the first 2000 bytes. Takes 0.2 s at most."""
    def close(self) -> None:
        """Says farewell, with the number of calls finished, and ends all connections and the thread, within 0.3 s."""

@final
class ShmChannel:
    """One rank's end of a segment of shared memory: opens calls, finds out whether all ranks make the same one, carries it out.

    What was begun goes on in `advance`, without the GIL. `plan` and what comes with it are kept until it is over. Raises OSError
    where the system grants no memory, ValueError for a shape or a call that cannot be, RuntimeError in a forked child and once it
    is closed.
    """

    @staticmethod
    def create(ranks: int, lanes: int, slots: int, slot_bytes: int, rank: int, spin: float, path: str = "") -> ShmChannel:
        """Makes a segment: memory without a name, or a new file `path`.

        `slot_bytes` is a multiple of 4096. `spin` is how long, in seconds, to wait for another rank with the processor kept busy.
        """
    @staticmethod
    def attach(
        ranks: int, lanes: int, slots: int, slot_bytes: int, rank: int, spin: float, location: str, nonce: bytes
    ) -> ShmChannel:
        """Opens the segment that another process made, with the same shape."""
    @property
    def location(self) -> str: ...
    @property
    def nonce(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    def begin(
        self,
        header: bytes,
        plan: Plan | None = None,
        arrays: Arrays | None = None,
        root: int | None = None,
        divisor: int = 1,
        counts: bytes | None = None,
        nonfinite: Nonfinite | None = None,
    ) -> None:
        """Opens a call with a header of 640 bytes: an all-reduce, the broadcast of `root`, or one that moves no arrays."""
    def carry(
        self,
        plan: Plan,
        arrays: Arrays,
        root: int | None = None,
        divisor: int = 1,
        counts: bytes | None = None,
        nonfinite: Nonfinite | None = None,
    ) -> None:
        """Goes on after "differ" with the call that the ranks have agreed on."""
    def begin_range(
        self,
        kind: Literal["collect", "spread"],
        plan: Plan,
        arrays: Arrays,
        stream: int,
        begin: int,
        end: int,
        buffer: Buffer | None,
        offset: int,
        divisor: int = 1,
        counts: bytes | None = None,
        nonfinite: Nonfinite | None = None,
    ) -> None:
        """Sums a range into rank 0's buffer, or spreads that over all ranks, which have agreed on it; rank 0 has the buffer."""
    def begin_gather(self, own: bytes) -> None:
        """Begins to collect bytes of all ranks."""
    def advance(self, until: float) -> Literal["waiting", "done", "differ"]:
        """Works until `time.monotonic()` comes to `until`. "differ": the headers do, and nothing was written."""
    def headers(self) -> list[bytes]:
        """Those of the last opening, in rank order."""
    def gathered(self) -> list[bytes]:
        """What the last gather collected, in rank order."""
    def steps(self) -> int:
        """Steps that this rank has finished since the beginning."""
    def position(self) -> tuple[int, int, int] | None:
        """What this rank has not finished of the call under way: stream, first element, one past the last."""
    def hide(self) -> None:
        """No other process can attach from now on."""
    def set_tuning(self, chunk_bytes: int, sharded_bytes: int, past_caches: bool) -> None:
        """What calls are to use where this rank is rank 0: no choice changes a bit."""
    def close(self) -> None:
        """Lets go of the segment."""
