"""What the CPU kernels' calls refuse, the memory they work in, and the threads that outlive them: without torch."""

import os
import subprocess

import numpy as np
import pytest
from border_arrays import describe
from programs import run_python

from gradpack import _C
from gradpack.dtypes import DTYPES


def test_buffer():
    buffer = _C.Buffer(10)
    view = memoryview(buffer)
    assert (len(buffer), view.nbytes, view.format, view.readonly, bytes(view)) == (10, 10, "B", False, bytes(10))
    view[3] = 7
    assert bytes(buffer)[3] == 7 and buffer.address % 4096 == 0
    assert len(_C.Buffer(0)) == 0 and bytes(_C.Buffer(0)) == b""
    big = _C.Buffer(3 << 20)
    assert big.address % 4096 == 0 and not np.frombuffer(big, np.uint8).any()
    with pytest.raises(ValueError, match="Buffer: nbytes: found -1"):
        _C.Buffer(-1)
    with pytest.raises(MemoryError):
        _C.Buffer(1 << 60)


class Planned:
    """Arrays of one dtype, their plan, and a buffer for so many rows of them."""

    def __init__(self, arrays, rows=1):
        dtype, counts = str(arrays[0].dtype), [array.size for array in arrays]
        wire = DTYPES[dtype].scalar
        self.arrays = describe(arrays)
        self.plan = _C.Plan(self.arrays.key, len(arrays), [(dtype, wire, range(len(arrays)), counts)])
        self.buffer = _C.Buffer(rows * self.arrays.nbytes)


P = Planned([np.zeros(4, np.float32), np.zeros(6, np.float32)], rows=2)
COMPLEXES = Planned([np.zeros(4, np.complex64)])
INTEGERS = Planned([np.zeros(4, np.int32)])
BOOLS = Planned([np.zeros(4, bool)])
OTHER = Planned([np.zeros(4, np.float32), np.zeros(7, np.float32)])
KEY = P.arrays.key


def plan(streams, key=KEY, num_arrays=2):
    return _C.Plan(key, num_arrays, streams)


REFUSALS = {
    "stream": (lambda: P.plan.pack(P.arrays, 1, 0, 1, P.buffer, 0), "pack: stream: found 1, wanted less than 1"),
    "negative stream": (lambda: P.plan.pack(P.arrays, -1, 0, 1, P.buffer, 0), "pack: stream: found -1"),
    "end": (lambda: P.plan.pack(P.arrays, 0, 0, 11, P.buffer, 0), "pack: begin, end: found 0, 11, wanted .* <= 10"),
    "complex end": (
        lambda: COMPLEXES.plan.pack(COMPLEXES.arrays, 0, 0, 5, COMPLEXES.buffer, 0),
        "pack: begin, end: found 0, 5, wanted .* <= 4",
    ),
    "begin": (lambda: P.plan.unpack(P.arrays, 0, -1, 2, P.buffer, 0), "unpack: begin, end: found -1, 2"),
    "order": (lambda: P.plan.reduce(0, 5, 4, P.buffer, [0], P.buffer, 0), "reduce: begin, end: found 5, 4"),
    "offset": (lambda: P.plan.pack(P.arrays, 0, 0, 1, P.buffer, -4), "pack: offset into buffer: found -4"),
    "alignment": (
        lambda: P.plan.pack(P.arrays, 0, 0, 1, P.buffer, 2),
        "pack: offset into buffer: found 2, wanted a multiple of 4",
    ),
    "buffer": (
        lambda: P.plan.pack(P.arrays, 0, 0, 10, P.buffer, 44),
        "pack: buffer: found 80 bytes, wanted 40 from offset 44 on",
    ),
    "far offset": (lambda: P.plan.pack(P.arrays, 0, 0, 0, P.buffer, 84), "pack: buffer: found 80 bytes, wanted 0 from offset 84"),
    "row": (lambda: P.plan.reduce_unpack(P.arrays, 0, 0, 10, P.buffer, [0, 44]), "reduce_unpack: buffer: found 80 bytes"),
    "no rows": (lambda: P.plan.reduce_unpack(P.arrays, 0, 0, 10, P.buffer, []), "reduce_unpack: offsets: found none"),
    "out": (lambda: P.plan.reduce(0, 0, 10, P.buffer, [0], _C.Buffer(39), 0), "reduce: out: found 39 bytes, wanted 40"),
    "overlap": (lambda: P.plan.reduce(0, 0, 10, P.buffer, [0], P.buffer, 4), "reduce: out_offset: found 4, inside a row"),
    "divisor": (lambda: P.plan.unpack(P.arrays, 0, 0, 1, P.buffer, 0, -2), "unpack: divisor: found -2"),
    "counts": (lambda: P.plan.unpack(P.arrays, 0, 0, 1, P.buffer, 0, 1, bytes(4)), "unpack: counts: found 4 bytes, wanted 8"),
    "count": (lambda: P.plan.unpack(P.arrays, 0, 0, 1, P.buffer, 0, 1, b"\0\0\0\0\xff\xff\xff\xff"), r"counts\[1\]: found -1"),
    "flags": (lambda: P.plan.pack(P.arrays, 0, 0, 1, P.buffer, 0, _C.Nonfinite(1)), "pack: nonfinite: found 1 flags, wanted 2"),
    "finite flags": (lambda: P.plan.check_finite(P.arrays, _C.Nonfinite(3)), "check_finite: nonfinite: found 3 flags, wanted 2"),
    "arrays": (lambda: P.plan.pack(COMPLEXES.arrays, 0, 0, 1, P.buffer, 0), "pack: arrays: found 1, wanted 2"),
    "key": (lambda: P.plan.pack(OTHER.arrays, 0, 0, 1, P.buffer, 0), "pack: arrays: found other dtypes, shapes or memory orders"),
    "numel": (
        lambda: plan([("float32", "float32", [0, 1], [4, 7])]).pack(P.arrays, 0, 0, 11, P.buffer, 0),
        r"pack: arrays\[1\]: found 6 elements of float32, wanted 7 of float32",
    ),
    "dtype": (
        lambda: plan([("int32", "int32", [0], [4])]).pack(P.arrays, 0, 1, 4, P.buffer, 0),
        r"pack: arrays\[0\]: found 4 elements of float32, wanted 4 of int32",
    ),
    "plan key": (lambda: plan([], b"short"), "Plan: key: found 5 bytes, wanted 16"),
    "plan arrays": (lambda: plan([], num_arrays=-1), "Plan: num_arrays: found -1"),
    "plan dtype": (lambda: plan([("float31", "float32", [], [])]), "Plan: dtype: found 'float31'"),
    "plan wire": (lambda: plan([("float32", "complex64", [], [])]), "Plan: wire dtype: found complex64 for gradients of float32"),
    "plan narrow": (lambda: plan([("float64", "float32", [], [])]), "Plan: wire dtype: found float32 for gradients of float64"),
    "plan halves": (lambda: plan([("float16", "bfloat16", [], [])]), "Plan: wire dtype: found bfloat16"),
    "plan counts": (lambda: plan([("float32", "float32", [0, 1], [4])]), "Plan: counts: found 1, wanted one for each of 2"),
    "plan index": (lambda: plan([("float32", "float32", [2], [4])]), "Plan: gradients: found index 2, wanted 0 to 1"),
    "plan count": (lambda: plan([("float32", "float32", [0], [-4])]), "Plan: counts: found -4"),
    "plan sum": (lambda: plan([("float32", "float32", [0, 1], [2**58, 2**60])]), "Plan: counts: found 1152921504606846976"),
    "threads": (lambda: _C.set_num_threads(0), "set_num_threads: num_threads: found 0, wanted 1 to"),
    "flag count": (lambda: _C.Nonfinite(-1), "Nonfinite: num_arrays: found -1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case):
    call, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_what_only_a_bug_can_ask_for():
    report = "internal error in gradpack .please report it.*"
    with pytest.raises(RuntimeError, match=report + "found bool"):
        BOOLS.plan.reduce_unpack(BOOLS.arrays, 0, 0, 4, BOOLS.buffer, [0])
    with pytest.raises(RuntimeError, match=report + "found bool"):
        BOOLS.plan.reduce(0, 0, 4, BOOLS.buffer, [0], BOOLS.buffer, 0)
    with pytest.raises(RuntimeError, match=report + "integers have no mean"):
        INTEGERS.plan.unpack(INTEGERS.arrays, 0, 0, 4, INTEGERS.buffer, 0, 2)
    with pytest.raises(RuntimeError, match=report + "integers have no mean"):
        INTEGERS.plan.unpack(INTEGERS.arrays, 0, 0, 4, INTEGERS.buffer, 0, 1, bytes(4))


def test_num_threads():
    program = "from gradpack import _C; print(_C.num_threads())"
    assert int(run_python(program).communicate(timeout=60)[0]) == min(8, len(os.sched_getaffinity(0)))
    before = _C.num_threads()
    _C.set_num_threads(5)
    assert _C.num_threads() == 5
    _C.set_num_threads(before)


def test_exit_while_threads_work():
    program = """
import threading, numpy as np
from gradpack import _C
_C.set_num_threads(4)
values = [np.ones(1_000_000, np.float32)]
arrays = _C.describe(values, "test", "values", None, "grad", "auto")
plan = _C.Plan(arrays.key, 1, [("float32", "float16", [0], [1_000_000])])
buffer = _C.Buffer(4_000_000)
def work():
    while True:
        plan.pack(arrays, 0, 0, 1_000_000, buffer, 0)
threading.Thread(target=work, daemon=True).start()
for _ in range(20):
    plan.pack(arrays, 0, 0, 1_000_000, buffer, 0)
print("done")
"""
    runs = [run_python(program) for _ in range(4)]
    for process in runs:
        try:
            out, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert (process.returncode, out, errors) == (0, "done\n", "")
