"""The fuzzer: `make test` runs a sample of its cases, `make test-long` all of them. A failure names the command that repeats it.

Cases run in processes of their own, one for each SIMD level, so that a crash is a failure of one case with a number.
"""

import os
from pathlib import Path

import pytest
from programs import available_levels, start_python

CASES = 100_000 if os.environ.get("GRADPACK_TEST_LONG") == "1" else 2_000
SHARES = {"layouts": 0.4, "arrays": 0.4, "objects": 0.2}
SHARD = 500
FUZZ = Path(__file__).resolve().parent / "fuzz.py"


def shards(kind):
    count = int(CASES * SHARES[kind])
    return [(first, min(first + SHARD, count)) for first in range(0, count, SHARD)]


def run_at_every_level(kind, first, end):
    """What each case printed, for each level."""
    levels = available_levels() if kind == "arrays" else ["scalar"]
    runs = {level: start_python(FUZZ, kind, first, end, GRADPACK_SIMD=level) for level in levels}
    try:
        outputs = {level: process.communicate(timeout=100) for level, process in runs.items()}
    finally:
        for process in runs.values():
            process.kill()
    for level, (out, errors) in outputs.items():
        if runs[level].returncode != 0:
            case = out.split("\n")[-1].strip()
            pytest.fail(f"GRADPACK_SIMD={level} python tests/fuzz.py {kind} {case}\n{errors}", pytrace=False)
    return {level: out.splitlines() for level, (out, _) in outputs.items()}


@pytest.mark.parametrize(("kind", "first", "end"), [(kind, *shard) for kind in SHARES for shard in shards(kind)])
def test_fuzz(kind, first, end):
    lines = run_at_every_level(kind, first, end)
    scalar = lines["scalar"]
    assert [int(line.split()[0]) for line in scalar] == list(range(first, end))
    for level, printed in lines.items():
        other = [line.split()[0] for line, wanted in zip(printed, scalar, strict=True) if line != wanted]
        assert not other, f"{level} and scalar computed different bits: python tests/fuzz.py {kind} {other[0]}"
