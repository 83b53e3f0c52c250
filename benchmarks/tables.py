"""Writes the tables of docs/performance.md and README.md from what the benchmarks wrote into benchmarks/results/.

    python benchmarks/tables.py            # rewrite them
    python benchmarks/tables.py --check    # fail where one differs

A table stands between ``<!-- table: KIND RESULT [ARGUMENT ...] -->`` and ``<!-- end of table -->``: KIND is one of the functions
below, RESULT a file there, and the arguments are the function's.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import describe

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/performance.md"]
RESULTS = Path(__file__).resolve().parent / "results"
TABLE = re.compile(r"(<!-- table: (.+?) -->\n\n).*?(\n<!-- end of table -->)", re.DOTALL)

Row = dict[str, Any]

README_CASES = {
    "scalar": "scalar",
    "policy_1500k": "1.5 MB policy",
    "atari": "6.8 MB Atari network",
    "small2000": "2,000 small tensors",
    "mobilenetv2": "MobileNetV2",
}
README_PIECES = {
    "flat": "flat",
    "flat + copies": "`_foreach_copy_` into a kept buffer and back",
    "cat": "the lines above",
    "DDP default (net)": "DDP, less the same backward",
    "gradpack": "`gradpack.allreduce`",
    "gradpack over gloo": 'the same as between hosts, `transport="process_group"`',
    "gradpack bf16 over gloo": 'and with `compress="bf16"`',
}
"""Columns and rows of the README's table, and what they are called there."""


def read(result: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{result}.json").read_text())


def matrix(corner: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """A line for each piece, a column for each case, in the order in which they first come."""
    cases, pieces = ({row[name]: None for row in rows} for name in ("case", "piece"))
    cells = {(row["piece"], row["case"]): cell(row) for row in rows}
    lines = [[corner, *cases], ["---"] * (len(cases) + 1)]
    lines += [[piece, *(cells.get((piece, case), "") for case in cases)] for piece in pieces]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ratio_of(row: Row) -> str:
    if row["piece"] == row["baseline"]:
        return f"{row['median_ms']:.3g} ms"
    return f"{row['ratio']:.2f} ({row['ratio_p10']:.2f} to {row['ratio_p90']:.2f})"


def ratios(result: str, *cases: str) -> str:
    """Time over the baseline's, in some cases or in all."""
    rows = [row for row in read(result)["rows"] if not cases or row["case"] in cases]
    return matrix(f"time / {rows[0]['baseline']}", rows, ratio_of)


def extra(*results: str) -> str:
    """Extra memory of a rank."""
    rows = [row for result in results for row in read(result)["rows"] if row["extra_bytes"] is not None]
    idle = ("flat", "backward", "memcpy", "scale in place", "MPI flat", "DeepSpeed flat")
    return matrix("MB", [row for row in rows if row["piece"] not in idle], lambda row: f"{row['extra_bytes'] / 1e6:.1f}")


def processor(*results: str) -> str:
    """CPU time of all ranks for each byte, of what is long enough to be measured so."""
    rows = [row for result in results for row in read(result)["rows"] if row["bytes"] > 1e6]
    ways = ("flat", "flat + copies", "cat", "DDP default (net)", "DDP bucket view (net)", "MPI flat", "DeepSpeed flat")
    pieces = (*ways, "gradpack", "gradpack over gloo", "gradpack bf16 over gloo", "memcpy", "scale in place")
    return matrix(
        "CPU s / GB",
        [row for row in rows if row["piece"] in pieces],
        lambda row: f"{1e-3 * row['cpu_ms'] / (1e-9 * row['bytes']):.2f}",
    )


def pack(result: str, wire: str) -> str:
    """Pack and unpack with one thread."""
    rows = [row for row in read(result)["rows"] if row["wire"] == wire and row["threads"] == 1 and row["dtype"] == "float32"]
    return matrix(f"float32 to {wire}, time / memcpy", [row for row in rows if row["piece"] != row["baseline"]], ratio_of)


def text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in ["```text", *lines, "```"])


def machines(*results: str) -> str:
    """The machine before and after each result."""
    return text([line for result in results for state in read(result)["machine"] for line in describe(state).splitlines()])


def verdicts(*results: str) -> str:
    """What was wanted, met or missed."""
    return text([line for result in results for line in read(result)["verdicts"]])


def readme(small: str, large: str) -> str:
    """Medians alone, of some pieces, under names for those who do not know the benchmarks."""
    names = README_CASES | {"resnet50": "ResNet-50"}
    rows = [row for result in (small, large) for row in read(result)["rows"] if row["case"] in names]
    rows = [
        row | {"case": names[row["case"]], "piece": README_PIECES[row["piece"]]} for row in rows if row["piece"] in README_PIECES
    ]
    rows.sort(key=lambda row: list(README_PIECES.values()).index(row["piece"]))
    return matrix("", rows, lambda row: ratio_of(row).split(" (")[0])


KINDS = {make.__name__: make for make in (ratios, extra, processor, pack, machines, verdicts, readme)}


def fill(document: str) -> str:
    """The document with its tables as the results have them."""

    def table(found: re.Match[str]) -> str:
        kind, *arguments = found[2].split()
        return found[1] + KINDS[kind](*arguments) + found[3]

    return TABLE.sub(table, document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table differs from the results")
    options = parser.parse_args()
    for path in DOCUMENTS:
        before = path.read_text()
        after = fill(before)
        if options.check and after != before:
            sys.exit(f"{path}: tables differ from benchmarks/results: run python benchmarks/tables.py")
        if not options.check:
            path.write_text(after)


if __name__ == "__main__":
    main()
