"""The driver that times pieces in turns, and the one row that every benchmark prints, writes and plots."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


def nothing() -> None:
    pass


@dataclass
class Piece:
    """One thing to time.

    Attributes:
        name: What a row calls it.
        run: The timed part. It may return seconds where it knows better than the driver's clock.
        before: Done before every `run`, outside the timed part.
        every: Where more than 1, the piece is so slow that it is left out of all iterations but every so-manieth.
    """

    name: str
    run: Callable[[], float | None]
    before: Callable[[], object] = nothing
    every: int = 1


@dataclass
class Samples:
    """What one piece took, iteration by iteration: seconds, and CPU seconds of all threads of the process. NaN where left out."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def less(self, other: Samples) -> Samples:
        """Iteration by iteration what is left without `other`."""
        return Samples(
            [mine - its for mine, its in zip(self.seconds, other.seconds, strict=True)],
            [mine - its for mine, its in zip(self.cpu, other.cpu, strict=True)],
        )


def over_ranks(ranks: Sequence[Samples]) -> Samples:
    """The samples of a collective: as slow as its slowest rank, as dear as all together."""
    return Samples(
        [max(times) for times in zip(*(rank.seconds for rank in ranks), strict=True)],
        [sum(times) for times in zip(*(rank.cpu for rank in ranks), strict=True)],
    )


def interleave(
    pieces: Sequence[Piece], iterations: int, *, warmup: int = 2, passes: int = 1, ready: Callable[[], object] = nothing
) -> dict[str, Samples]:
    """Times pieces in turns, so that what the machine does meanwhile happens to all of them.

    The order rotates and every other iteration runs backwards, so that no piece always finds the caches as one other leaves them.

    Args:
        pieces: What to time.
        iterations: How often each.
        warmup: Iterations before those, not counted.
        passes: Where more than 1, each turn is so many passes in a row, of which the mean without the first is the sample.
        ready: Done last before the clock starts: a barrier, where there are ranks.

    Returns:
        The samples of each piece by its name.
    """
    samples = {piece.name: Samples() for piece in pieces}
    for iteration in range(iterations + warmup):
        turn = iteration % len(pieces)
        order = [*pieces[turn:], *pieces[:turn]]
        for piece in reversed(order) if iteration % 2 else order:
            taken = (iteration - warmup) % piece.every == 0
            seconds = cpu = 0.0 if taken else math.nan
            for number in range(passes if taken else 0):
                piece.before()
                ready()
                cpu_began, began = time.process_time(), time.perf_counter()
                known = piece.run()
                ended, cpu_ended = time.perf_counter(), time.process_time()
                if number or passes == 1:
                    seconds += ended - began if known is None else known
                    cpu += cpu_ended - cpu_began
            if iteration >= warmup:
                samples[piece.name].seconds.append(seconds / max(1, passes - 1))
                samples[piece.name].cpu.append(cpu / max(1, passes - 1))
    return samples


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of a hundred do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def taken(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def paired(runs: Sequence[Samples], others: Sequence[Samples], pair: Callable[[float, float], float]) -> list[list[float]]:
    """For each run and each iteration that has both, `pair(seconds, other's seconds)`."""
    return [
        taken([pair(mine, its) for mine, its in zip(run.seconds, other.seconds, strict=True)])
        for run, other in zip(runs, others, strict=True)
    ]


def paired_medians(runs: Sequence[Samples], others: Sequence[Samples], pair: Callable[[float, float], float]) -> list[float]:
    """For each run the median over iterations of what paired() gives."""
    return [statistics.median(found) for found in paired(runs, others, pair)]


@dataclass
class Row:
    """One piece on one case.

    Attributes:
        case: Which gradients.
        piece: What was done with them.
        tensors: Their number.
        bytes: Their size.
        dtype: Their dtype.
        wire: The wire dtype.
        transport: What carried them between ranks; "memory" where nothing left the process.
        ranks: Number of processes.
        threads: Threads that each rank computes with.
        min_ms: Of all iterations of all runs, as are median_ms and p99_ms.
        median_ms: See above.
        p99_ms: See above.
        gb_per_s: Bytes over the median: those read and written, or for an all-reduce the gradients' (algorithm bandwidth). None
            where nothing is left of the median, which can be net of something else.
        bus_gb_per_s: For an all-reduce, algorithm bandwidth times 2 (ranks - 1) / ranks.
        wrong: Elements that differ from the exact result, over all ranks and checks.
        extra_bytes: The most memory that a rank's first two calls and their preparation added.
        cpu_ms: Median of the CPU time of all threads of all ranks.
        baseline: The piece that ratios are to.
        ratio: Time over the baseline's in the same iteration: the median over runs of their medians over iterations.
        ratio_p10: Percentiles over all iterations of all runs, as is ratio_p90.
        ratio_p90: See above.
        ratio_runs: The median of each run.
    """

    case: str
    piece: str
    tensors: int
    bytes: int
    dtype: str
    wire: str
    transport: str
    ranks: int
    threads: int
    min_ms: float
    median_ms: float
    p99_ms: float
    gb_per_s: float | None
    bus_gb_per_s: float | None
    wrong: int
    extra_bytes: int | None
    cpu_ms: float
    baseline: str
    ratio: float
    ratio_p10: float
    ratio_p90: float
    ratio_runs: list[float]


def timings(runs: Sequence[Samples], baseline: Sequence[Samples], moved: int) -> dict[str, Any]:
    """The fields of a row that follow from samples.

    Args:
        runs: Of the piece, one for each set of processes.
        baseline: Of the baseline, in the same runs.
        moved: Bytes that `gb_per_s` counts, if any.
    """
    seconds = taken([value for run in runs for value in run.seconds])
    ratios = paired(runs, baseline, lambda mine, its: mine / its)
    every_ratio = [value for run in ratios for value in run]
    medians = [statistics.median(run) for run in ratios]
    median = statistics.median(seconds)
    return {
        "min_ms": 1e3 * min(seconds),
        "median_ms": 1e3 * median,
        "p99_ms": 1e3 * percentile(seconds, 99),
        "cpu_ms": 1e3 * statistics.median(taken([value for run in runs for value in run.cpu])),
        "gb_per_s": moved / median / 1e9 if moved and median > 0 else None,
        "ratio": statistics.median(medians),
        "ratio_p10": percentile(every_ratio, 10),
        "ratio_p90": percentile(every_ratio, 90),
        "ratio_runs": medians,
    }


def or_dash(value: float | None, form: str, unit: float = 1) -> str:
    return "-" if value is None else format(value / unit, form)


COLUMNS: list[tuple[str, int, Callable[[Row], str]]] = [
    ("case", -12, lambda row: row.case),
    ("piece", -22, lambda row: row.piece),
    ("tensors", 7, lambda row: str(row.tensors)),
    ("bytes", 9, lambda row: str(row.bytes)),
    ("dtype->wire", -17, lambda row: f"{row.dtype}->{row.wire}"),
    ("transport", -13, lambda row: row.transport),
    ("ranks", 5, lambda row: str(row.ranks)),
    ("thr", 3, lambda row: str(row.threads)),
    ("min ms", 9, lambda row: f"{row.min_ms:.3f}"),
    ("median", 9, lambda row: f"{row.median_ms:.3f}"),
    ("p99", 9, lambda row: f"{row.p99_ms:.3f}"),
    ("GB/s", 6, lambda row: or_dash(row.gb_per_s, ".2f")),
    ("bus", 5, lambda row: or_dash(row.bus_gb_per_s, ".2f")),
    ("wrong", 5, lambda row: str(row.wrong)),
    ("extra MB", 8, lambda row: or_dash(row.extra_bytes, ".1f", 1e6)),
    ("CPU ms", 9, lambda row: f"{row.cpu_ms:.3f}"),
    ("ratio", 6, lambda row: f"{row.ratio:.2f}"),
    ("p10-p90", 11, lambda row: f"{row.ratio_p10:.2f}-{row.ratio_p90:.2f}"),
    ("runs", 11, lambda row: f"{min(row.ratio_runs):.2f}-{max(row.ratio_runs):.2f}"),
    ("to", -6, lambda row: row.baseline),
]


def padded(texts: Sequence[str]) -> str:
    cells = [text.ljust(-width) if width < 0 else text.rjust(width) for text, (_, width, _) in zip(texts, COLUMNS, strict=True)]
    return " ".join(cells).rstrip()


def print_header() -> None:
    print(padded([title for title, _, _ in COLUMNS]), flush=True)


def print_row(row: Row) -> None:
    print(padded([text(row) for _, _, text in COLUMNS]), flush=True)


def print_matrix(rows: Sequence[Row]) -> None:
    """The ratios alone, as a table in Markdown: a line for each piece, a column for each case."""
    cases, pieces = ({name: None for name in names} for names in ([row.case for row in rows], [row.piece for row in rows]))
    cells = {(row.piece, row.case): f"{row.ratio:.2f} ({row.ratio_p10:.2f} to {row.ratio_p90:.2f})" for row in rows}
    cells |= {(row.piece, row.case): f"{row.median_ms:.3g} ms" for row in rows if row.piece == row.baseline}
    print(f"| time / {rows[0].baseline} | {' | '.join(cases)} |")
    print("|---" * (len(cases) + 1) + "|")
    for piece in pieces:
        print(f"| {piece} | {' | '.join(cells.get((piece, case), '') for case in cases)} |")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="PATH", help="write machine, options and rows there")
    parser.add_argument("--plot", metavar="PATH", help="draw the ratios there (needs matplotlib)")


def write_output(options: argparse.Namespace, machine: list[dict[str, Any]], rows: Sequence[Row], **more: Any) -> None:
    """Does what add_output_options offers."""
    if options.json:
        content = {
            "machine": machine,
            "options": {name: value for name, value in vars(options).items() if name not in ("json", "plot")},
            **more,
            "rows": [],
        }
        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        Path(options.json).write_text(json.dumps(content)[: -len("]}")] + f"\n{lines}\n]}}\n")
    if options.plot:
        plot(options.plot, rows)


def plot(path: str, rows: Sequence[Row]) -> None:
    """One panel for each case: the ratio of each piece, with a whisker from the 10th to the 90th percentile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row.case for row in rows))
    figure, panels = pyplot.subplots(1, len(cases), figsize=(1.5 + 3 * len(cases), 4.5), squeeze=False)
    for panel, case in zip(panels[0], cases, strict=True):
        found = [row for row in rows if row.case == case]
        labels = [row.piece if row.wire == row.dtype else f"{row.piece} ({row.wire})" for row in found]
        places = range(len(found))
        panel.barh(places, [row.ratio for row in found], color="tab:blue")
        for place, row in zip(places, found, strict=True):
            panel.plot([row.ratio_p10, row.ratio_p90], [place, place], color="black", linewidth=1)
        panel.set_xscale("log")
        panel.axvline(1, color="tab:red", linewidth=1)
        panel.set_yticks(places, labels, fontsize=6)
        panel.invert_yaxis()
        panel.set_title(case)
        panel.set_xlabel(f"time / {found[0].baseline}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
