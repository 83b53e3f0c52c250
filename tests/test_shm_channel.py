"""The channel through shared memory by itself: ranks are threads of this process, each with a mapping of its own. No torch."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference

from gradpack import _C
from gradpack.dtypes import DTYPES

SLOT = 16384
HEADER = b"h" * 640


def channels(ranks: int, lanes: int = 1, slots: int = 4, slot_bytes: int = SLOT, path: str = "") -> list[Any]:
    shape: dict[str, Any] = {"ranks": ranks, "lanes": lanes, "slots": slots, "slot_bytes": slot_bytes, "spin": 0.0}
    made = [_C.ShmChannel.create(**shape, rank=0, path=path)]
    for rank in range(1, ranks):
        made.append(_C.ShmChannel.attach(**shape, rank=rank, location=made[0].location, nonce=made[0].nonce))
    return made


def finish(channel: Any, seconds: float = 20.0) -> str:
    status = channel.advance(time.monotonic() + seconds)
    assert status != "waiting", f"no end within {seconds} s"
    return str(status)


def on_each(ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """What ``run(rank)`` returns on each of as many threads; the first error of any."""
    found: list[Any] = [None] * ranks

    def body(rank: int) -> None:
        try:
            found[rank] = run(rank), None
        except BaseException as error:
            found[rank] = None, error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in found:
        if error is not None:
            raise error
    return [value for value, _ in found]


def bits(count: int, scalar: str, seed: int) -> np.ndarray[Any, Any]:
    """Any bits but those of NaN."""
    found = (
        np.random.default_rng(seed).integers(0, 256, count * DTYPES[scalar].itemsize, np.uint8).view(reference.bits_dtype(scalar))
    )
    found[reference.nan(found, scalar)] = 0
    return found


class Streams:
    """The arrays of one rank, as streams of several dtypes, each in arrays of ``counts`` elements."""

    def __init__(self, rank: int, streams: list[tuple[str, str]], counts: list[int]) -> None:
        self.bits = [bits(sum(counts), scalar, seed=100 * rank + place) for place, (scalar, _) in enumerate(streams)]
        ends = list(itertools.accumulate(counts))
        self.arrays, specs = [], []
        for (scalar, wire), whole in zip(streams, self.bits, strict=True):
            # No NumPy has bfloat16; what a stream's dtype is says the plan alone.
            pieces = [whole[end - count : end].copy() for end, count in zip(ends, counts, strict=True)]
            specs.append((scalar, wire, range(len(self.arrays), len(self.arrays) + len(counts)), counts))
            self.arrays += [piece.view(scalar) for piece in pieces]
        self.described = _C.describe(self.arrays, "test", "arrays", None, "grad", "auto")
        self.plan = _C.Plan(self.described.key, len(self.arrays), specs)
        self.per_stream = len(counts)

    def result(self, stream: int) -> np.ndarray[Any, Any]:
        begin = stream * self.per_stream
        pieces = self.arrays[begin : begin + self.per_stream]
        return np.concatenate([piece.view(f"u{piece.itemsize}") for piece in pieces])


def wanted_sum(rows: list[np.ndarray[Any, Any]], scalar: str, wire: str, divisor: int) -> np.ndarray[Any, Any]:
    """What the numerics promise: wire values summed in rank order, divided, and rounded to the wire where more than two ranks."""
    with np.errstate(all="ignore"):
        values = [reference.widened(row, scalar) for row in rows]
        if wire != scalar:
            values = [reference.widened(reference.narrowed(value, wire), wire) for value in values]
        total = sum(values[1:], start=values[0])
        if divisor > 1:
            total = reference.divided(total, divisor)
        if wire in ("float16", "bfloat16") and len(rows) > 2:
            total = reference.widened(reference.narrowed(total, wire), wire)
    return reference.narrowed(total, scalar)


STREAMS = [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float16"), ("float16", "float16"), ("int16", "int16")]
PER_SLOT = SLOT // 4
COUNTS = [[0], [1], [17], [PER_SLOT - 1], [PER_SLOT], [PER_SLOT + 1], [5 * PER_SLOT + 3], [3, 0, 4097, 1, 9000, 20000]]
WAYS = {"symmetric": 1 << 40, "sharded": 0}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ranks", "lanes", "slots"), [(1, 1, 4), (2, 1, 1), (2, 2, 4), (3, 1, 2), (4, 3, 4), (8, 1, 4)])
def test_sums_are_those_of_the_reference_whatever_the_way(ranks: int, lanes: int, slots: int, way: str) -> None:
    _C.set_num_threads(2)
    ends = channels(ranks, lanes, slots)
    for number, counts in enumerate(COUNTS):
        streams = STREAMS if number % 2 else STREAMS[:1]
        divisor = [1, ranks][number % 2]
        usable = [pair for pair in streams if divisor == 1 or pair[0] != "int16"]
        mine = [Streams(rank, usable, counts) for rank in range(ranks)]

        def run(rank: int, chunk: int = [4096, SLOT][number % 2], mine: list[Streams] = mine, divisor: int = divisor) -> None:
            ends[rank].set_tuning(chunk, WAYS[way], chunk == SLOT)
            ends[rank].begin(HEADER, mine[rank].plan, mine[rank].described, None, divisor)
            assert finish(ends[rank]) == "done"

        on_each(ranks, run)
        for stream, (scalar, wire) in enumerate(usable):
            wanted = wanted_sum([streams.bits[stream] for streams in mine], scalar, wire, divisor)
            nan = reference.nan(wanted, scalar)
            for rank in range(ranks):
                found = mine[rank].result(stream)
                assert (reference.nan(found, scalar) == nan).all(), (scalar, wire, rank)
                assert (found[~nan] == wanted[~nan]).all(), (scalar, wire, rank, np.nonzero(found != wanted)[0][:5])


@pytest.mark.parametrize("root", [0, 2])
def test_broadcasts_move_the_roots_bits(root: int) -> None:
    ends = channels(3, lanes=2)
    for counts in COUNTS:
        mine = [Streams(rank, [("float64", "float64"), ("bool", "bool")][:1], counts) for rank in range(3)]

        def run(rank: int, mine: list[Streams] = mine) -> None:
            ends[rank].begin(HEADER, mine[rank].plan, mine[rank].described, root)
            assert finish(ends[rank]) == "done"

        on_each(3, run)
        for streams in mine:
            assert (streams.result(0) == mine[root].bits[0]).all()


def test_nothing_is_written_where_headers_differ_and_what_follows_works() -> None:
    ends = channels(3)
    mine = [Streams(rank, [("float32", "float32")], [9000]) for rank in range(3)]

    def run(rank: int) -> list[bytes]:
        for round_ in range(4):
            ends[rank].begin(bytes([rank]) * 640, mine[rank].plan, mine[rank].described)
            assert finish(ends[rank]) == "differ"
            assert ends[rank].headers() == [bytes([peer]) * 640 for peer in range(3)]
            assert (mine[rank].result(0) == mine[rank].bits[0]).all()
            ends[rank].begin_gather(b"x" * [0, 1, SLOT, 3 * SLOT + 5][round_] * rank)
            finish(ends[rank])
        ends[rank].carry(mine[rank].plan, mine[rank].described)
        assert finish(ends[rank]) == "done"
        return list(ends[rank].gathered())

    assert on_each(3, run) == [[b"", b"x" * (3 * SLOT + 5), b"x" * (6 * SLOT + 10)]] * 3
    wanted = wanted_sum([streams.bits[0] for streams in mine], "float32", "float32", 1)
    for streams in mine:
        assert (streams.result(0) == wanted).all()


def test_a_rank_that_waits_says_where_and_goes_on() -> None:
    first, second = channels(2)
    mine = [Streams(rank, [("float32", "float32")], [3 * PER_SLOT]) for rank in range(2)]
    first.begin(HEADER, mine[0].plan, mine[0].described)
    began = time.monotonic()
    assert first.advance(began + 0.2) == "waiting"
    assert 0.2 <= time.monotonic() - began < 2
    assert first.position() is None  # nothing is agreed
    assert first.advance(0.0) == "waiting"
    with pytest.raises(ValueError, match="NaN"):
        first.advance(float("nan"))
    second.begin(HEADER, mine[1].plan, mine[1].described)
    assert second.advance(time.monotonic() + 0.2) == "waiting"
    assert second.position() == (0, PER_SLOT, 2 * PER_SLOT)  # the first chunk came with the header
    assert first.advance(1e300) == "done"
    assert finish(second) == "done"
    assert second.position() is None
    assert first.steps() == second.steps() > 0


def test_nonfinite_values_of_any_rank_are_seen_on_all() -> None:
    ends = channels(2)
    arrays = [[np.ones(7, np.float32), np.ones(9000, np.float32), np.ones(3, np.float32)] for _ in range(2)]
    arrays[1][1][8000] = np.inf
    counts = [7, 9000, 3]

    def run(rank: int) -> list[int]:
        described = _C.describe(arrays[rank], "test", "arrays", None, "grad", "auto")
        plan = _C.Plan(described.key, 3, [("float32", "float32", range(3), counts)])
        flags = _C.Nonfinite(3)
        ends[rank].begin(HEADER, plan, described, None, 2, None, flags)
        finish(ends[rank])
        return list(flags.indices())

    assert on_each(2, run) == [[1], [1]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("scalar", "wire"), [("float32", "float32"), ("float32", "bfloat16"), ("int64", "int64")])
def test_ranges_are_collected_and_spread(ranks: int, scalar: str, wire: str) -> None:
    ends = channels(ranks, lanes=2)
    counts = [5, 0, 30_000, 77]
    mine = [Streams(rank, [(scalar, wire)], counts) for rank in range(ranks)]
    buffer = _C.Buffer(30_082 * 8 + 64)
    divisor = 1 if scalar == "int64" else ranks

    def run(rank: int, kind: str, begin: int, end: int) -> None:
        memory = buffer if rank == 0 else None
        divided = divisor if kind == "collect" else 1
        ends[rank].begin_range(kind, mine[rank].plan, mine[rank].described, 0, begin, end, memory, 64, divided)
        assert finish(ends[rank]) == "done"

    for begin, end in [(0, 30_082), (3, 3), (4, 9000), (9000, 30_082)]:
        for streams in mine:
            for array, count, stop in zip(streams.arrays, counts, itertools.accumulate(counts), strict=True):
                array.view(f"u{array.itemsize}")[...] = streams.bits[0][stop - count : stop]
        with np.errstate(all="ignore"):
            values = [reference.widened(streams.bits[0][begin:end], scalar) for streams in mine]
            if wire != scalar:
                values = [reference.widened(reference.narrowed(value, wire), wire) for value in values]
            total = sum(values[1:], start=values[0])
            wanted = reference.narrowed(reference.divided(total, divisor) if divisor > 1 else total, wire)
        on_each(ranks, lambda rank, begin=begin, end=end: run(rank, "collect", begin, end))
        found = np.frombuffer(buffer, np.uint8)[64:].view(wanted.dtype)[: end - begin]
        nan = reference.nan(wanted, wire)
        assert (found[~nan] == wanted[~nan]).all() and reference.nan(found, wire)[nan].all()
        for streams in mine:
            assert (streams.result(0) == streams.bits[0]).all()  # nothing is written yet
        on_each(ranks, lambda rank, begin=begin, end=end: run(rank, "spread", begin, end))
        spread = reference.narrowed(reference.widened(found, wire), scalar) if wire != scalar else found
        for streams in mine:
            result = streams.result(0)
            there = ~nan
            assert (result[begin:end][there] == spread[there]).all()
            assert (result[:begin] == streams.bits[0][:begin]).all() and (result[end:] == streams.bits[0][end:]).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("gather", 0, 0, 5, "buffer", 0), ValueError, "kind: found gather, wanted collect or spread"),
        (("collect", 1, 0, 5, "buffer", 0), ValueError, "stream: found 1, wanted less than 1"),
        (("collect", -1, 0, 5, "buffer", 0), ValueError, "stream: found -1, wanted less than 1"),
        (("collect", 0, 0, 6, "buffer", 0), ValueError, "begin, end: found 0, 6, wanted 0 <= begin <= end <= 5"),
        (("collect", 0, 3, 2, "buffer", 0), ValueError, "begin, end: found 3, 2"),
        (("collect", 0, -1, 2, "buffer", 0), ValueError, "begin, end: found -1, 2"),
        (("collect", 0, 0, 5, "buffer", 1), ValueError, "offset: found 1 with 20 bytes from there, wanted both within 20"),
        (("spread", 0, 0, 5, "buffer", -1), ValueError, "offset: found -1"),
        (("collect", 0, 0, 5, None, 0), ValueError, "buffer: found None on the leader, wanted a Buffer"),
    ],
)
def test_a_range_that_cannot_be_is_refused(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    (end,) = channels(1)
    mine = Streams(0, [("float32", "float32")], [5])
    kind, stream, begin, stop, memory, offset = arguments
    with pytest.raises(error, match=message):
        end.begin_range(kind, mine.plan, mine.described, stream, begin, stop, _C.Buffer(20) if memory else None, offset)
    end.begin(HEADER, mine.plan, mine.described)
    assert finish(end) == "done"


# Segments.


def shape(**changed: int) -> dict[str, Any]:
    return {"ranks": 2, "lanes": 1, "slots": 2, "slot_bytes": SLOT, "rank": 0, "spin": 0.0} | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 0}, "ranks: found 0, wanted 1 to 1024"),
        ({"ranks": 1025}, "ranks: found 1025, wanted 1 to 1024"),
        ({"lanes": 0}, "lanes: found 0"),
        ({"slots": 65}, "slots: found 65, wanted 1 to 64"),
        ({"slot_bytes": 0}, "slot_bytes: found 0"),
        ({"slot_bytes": 5000}, "slot_bytes: found 5000, wanted a multiple of 4096"),
        ({"slot_bytes": 1 << 40}, "slot_bytes: found 1099511627776, wanted 1 to 1073741824"),
        ({"rank": 2}, "rank: found 2, wanted 0 to 1"),
        ({"rank": -1}, "rank: found -1, wanted 0 to 1"),
        ({"spin": float("nan")}, "seconds: found NaN"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.ShmChannel.create(**shape(**changed))


def test_only_the_segment_that_was_offered_is_attached(tmp_path: Path) -> None:
    made = _C.ShmChannel.create(**shape())
    offered = {"location": made.location, "nonce": made.nonce}
    with pytest.raises(ValueError, match="found another segment than the one that was offered"):
        _C.ShmChannel.attach(**shape(rank=1), **offered | {"nonce": bytes(16)})
    with pytest.raises(ValueError, match="found another segment than the one that was offered"):
        _C.ShmChannel.attach(**shape(rank=1), **offered | {"nonce": b"short"})
    with pytest.raises(ValueError, match=r"found \d+ bytes, wanted \d+"):
        _C.ShmChannel.attach(**shape(rank=1, slots=3), **offered)
    with pytest.raises(FileNotFoundError):
        _C.ShmChannel.attach(**shape(rank=1), location=str(tmp_path / "absent"), nonce=made.nonce)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="found 0 bytes"):
        _C.ShmChannel.attach(**shape(rank=1), location=str(tmp_path / "pipe"), nonce=made.nonce)
    _C.ShmChannel.attach(**shape(rank=1), **offered)
    made.hide()
    with pytest.raises((FileNotFoundError, ValueError)):
        _C.ShmChannel.attach(**shape(rank=1), **offered)


def test_a_segment_in_a_file_is_private_and_goes_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    made = _C.ShmChannel.create(**shape(), path=str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == made.nbytes
    with pytest.raises(FileExistsError):
        _C.ShmChannel.create(**shape(), path=str(path))
    assert path.exists()
    made.hide()
    assert not path.exists()
    path.write_text("of somebody else")
    made.close()
    del made
    assert path.read_text() == "of somebody else"
    other = _C.ShmChannel.create(**shape(), path=str(tmp_path / "other"))
    other.close()
    assert not (tmp_path / "other").exists()


def test_making_and_closing_leaves_nothing() -> None:
    def held() -> tuple[int, int]:
        mapped = sum("gradpack" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), mapped

    before = held()
    for _ in range(100):
        for end in channels(3):
            end.close()
    # Fewer where something of an earlier test was still on its way out.
    assert all(now <= then for now, then in zip(held(), before, strict=True)), (held(), before)


def test_what_is_closed_or_forked_says_so() -> None:
    (end,) = channels(1)
    process = os.fork()
    if process == 0:
        try:
            end.begin(HEADER)
        except RuntimeError as error:
            os._exit(0 if "found in a forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    end.begin(HEADER)
    assert finish(end) == "done"
    end.close()
    end.close()
    for act in (lambda: end.begin(HEADER), lambda: end.advance(1.0), end.headers, end.steps, end.hide, lambda: end.nbytes):
        with pytest.raises(RuntimeError, match="found it closed, wanted it open"):
            act()


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda end, mine: end.begin(b"short"), ValueError, "header: found 5 bytes, wanted 640"),
        (lambda end, mine: end.begin(HEADER, mine.plan, mine.described, 2), ValueError, "root: found 2, wanted a rank"),
        (lambda end, mine: end.begin(HEADER, mine.plan, mine.described, -2), ValueError, "root: found -2, wanted a rank"),
        (lambda end, mine: end.begin(HEADER, mine.plan, None), TypeError, "incompatible function arguments"),
        (
            lambda end, mine: end.begin(HEADER, mine.plan, mine.described, None, 1, b"xx"),
            ValueError,
            "counts",
        ),
    ],
)
def test_a_call_that_cannot_be_is_refused_and_the_next_works(act: Callable[..., Any], error: Any, message: str) -> None:
    (end,) = channels(1)
    mine = Streams(0, [("float32", "float32")], [5])
    with pytest.raises(error, match=message):
        act(end, mine)
    end.begin(HEADER, mine.plan, mine.described)
    assert finish(end) == "done"
