"""The CPU kernels' calls: reductions, flags, threads and the caller's thread state."""

import os
import struct
import threading
import time

import numpy as np
import pytest
import torch
from packing import COMPLEX, FLOATS, HALVES, INTS, SCALARS, Packing, name, normal, random_bits, raw

from gradpack import _C


@pytest.fixture(autouse=True)
def restore_threads():
    before = _C.num_threads()
    yield
    _C.set_num_threads(before)


# ---- reductions ------------------------------------------------------------------------------------------------------------


def reduced(rows, divisor):
    """The sum of the rows in order, in their accumulator's dtype, divided there."""
    total = rows[0].float().numpy() if rows.dtype.itemsize == 2 and rows.dtype.is_floating_point else rows[0].numpy()
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            total = total + row.to(torch.from_numpy(total).dtype).numpy()
        return torch.from_numpy(total / total.dtype.type(divisor) if rows.dtype.is_floating_point and divisor > 1 else total)


def assert_same(got, want):
    if not got.dtype.is_floating_point:
        return np.testing.assert_array_equal(raw(got), raw(want))
    assert torch.equal(got.isnan(), want.isnan())
    numbers = ~want.isnan()
    np.testing.assert_array_equal(raw(got[numbers]), raw(want[numbers]))


PAIRS = [(dtype, SCALARS.get(dtype, dtype)) for dtype in FLOATS + INTS + COMPLEX]
PAIRS += [(dtype, wire) for dtype in (torch.float32, torch.float64) for wire in HALVES.values()]


@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=lambda dtype: name(dtype))
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_reductions_sum_in_row_order_and_divide_once(dtype, wire, num_rows):
    divisor = num_rows if dtype.is_floating_point or dtype.is_complex else 1
    for patterns in (False, True):
        # Several blocks of sums, cut by gradients at odd places, one of them strided.
        square = torch.empty(60, 60, dtype=dtype)
        tensors = [torch.empty(count, dtype=dtype) for count in (1, 4100, 0, 5, 3000)] + [square.t()[:, 7:]]
        packing = Packing(tensors, wire, rows=num_rows)
        for row, seed in zip(packing.wires(), range(num_rows), strict=True):
            row.copy_(random_bits(row.numel(), wire, seed) if patterns or wire in INTS else normal(row.numel(), wire, seed))
        wanted = reduced(packing.wires().clone(), divisor)
        packing.reduce_unpack(divisor)
        got = torch.cat([(t.t() if t.dim() == 2 else t).reshape(-1) for t in tensors])
        assert_same(torch.view_as_real(got).reshape(-1) if dtype.is_complex else got, wanted.to(SCALARS.get(dtype, dtype)))
        # In place, onto the last row, in two ranges.
        half = packing.numel // 2
        for begin, end in ((0, half), (half, packing.numel)):
            offsets = [offset + begin * packing.element_bytes for offset in packing.offsets]
            packing.plan.reduce(0, begin, end, packing.buffer, offsets, packing.buffer, offsets[-1], divisor)
        assert_same(packing.wires()[-1], wanted.to(wire))


def test_a_sum_of_16_bit_floats_does_not_overflow():
    packing = Packing([torch.zeros(3, dtype=torch.float16)], rows=4)
    packing.wires().fill_(60000)
    packing.reduce_unpack(4, nonfinite=packing.nonfinite)
    assert packing.tensors[0].tolist() == [60000.0] * 3 and not packing.nonfinite.any()
    packing.reduce_unpack(1, nonfinite=packing.nonfinite)
    assert packing.tensors[0].isinf().all() and packing.nonfinite.indices() == [0]


def test_integers_wrap():
    packing = Packing([torch.zeros(2, dtype=torch.int32)], rows=2)
    packing.wires().copy_(torch.tensor([[2**31 - 1, -(2**31)], [1, -1]]))
    assert packing.reduce_unpack().tensors[0].tolist() == [-(2**31), 2**31 - 1]


def distinct(tensors):
    return [sorted({abs(x) for x in tensor.tolist()}) for tensor in tensors]


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=name)
def test_counts_take_the_place_of_the_divisor(dtype):
    values = [torch.full((n,), 12.0).to(dtype) for n in (3, 2000, 0, 5, 7)]
    packing = Packing(values, rows=2)
    packing.wires().copy_(packing.pack().wires()[0].clone().expand(2, -1))
    counts = struct.pack("5i", 3, 2, 5, 1, 0)
    packing.unpack(divisor=100, counts=counts)
    assert distinct(values) == [[4.0], [6.0], [], [12.0], [12.0]]
    packing.reduce_unpack(counts=counts)
    assert distinct(values) == [[8.0], [12.0], [], [24.0], [24.0]]
    packing.plan.reduce(0, 0, packing.numel, packing.buffer, packing.offsets, packing.buffer, 0, 1, counts)
    packing.unpack()
    assert distinct(values) == [[8.0], [12.0], [], [24.0], [24.0]]


# ---- flags -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=name)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_flags_name_the_arrays_that_hold_inf_or_nan(dtype, bad):
    def tensors():
        shapes = [(n,) for n in (1, 5, 31, 32, 33, 100, 1000)] + [(9, 40)]
        largest = torch.tensor(torch.finfo(SCALARS.get(dtype, dtype)).max, dtype=torch.float64)
        return [largest.to(dtype).repeat(shape) for shape in shapes]

    for index in range(8):
        for position in (0, -1, 20):
            values = tensors()
            values[-1] = values[-1][:, 3:37].t()
            target = values[index] if values[index].dim() == 1 else values[index].t()
            if position == 20 and target.numel() <= 20:
                continue
            place = target[-1] if target.dim() == 2 else target
            place[position] = bad if not dtype.is_complex else complex(0, bad)
            packing = Packing(values)
            calls = (
                lambda flags, p=packing: p.plan.check_finite(p.arrays, flags),
                lambda flags, p=packing: p.pack(nonfinite=flags),
                lambda flags, p=packing: p.unpack(nonfinite=flags),
                lambda flags, p=packing: p.unpack(divisor=3, nonfinite=flags),
                lambda flags, p=packing: p.reduce_unpack(nonfinite=flags),
            )
            for call in calls:
                flags = _C.Nonfinite(8)
                assert not flags.any()
                call(flags)
                assert flags.any() and flags.indices() == [index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_overflow_of_the_wire_is_flagged(dtype):
    values = [torch.full((40,), v, dtype=dtype) for v in (65504.0, 65519.0, 65520.0, -1e30)]
    packing = Packing(values, torch.float16)
    packing.pack(nonfinite=packing.nonfinite)
    assert packing.nonfinite.indices() == [2, 3]
    flags = _C.Nonfinite(4)
    Packing(values, torch.bfloat16).pack(nonfinite=flags)
    assert flags.indices() == []


def test_flags_stay_set():
    packing = Packing([torch.tensor([float("nan")]), torch.ones(1)]).pack()
    packing.plan.check_finite(packing.arrays, packing.nonfinite)
    packing.tensors[0].fill_(1)
    packing.plan.check_finite(packing.arrays, packing.nonfinite)
    assert packing.nonfinite.indices() == [0]


# ---- threads and thread state --------------------------------------------------------------------------------------------------


def everything(num_threads):
    """All bytes that the operations make of one big stream."""
    _C.set_num_threads(num_threads)
    values = random_bits(700_000, torch.float32, 5)
    tensors = [values[:11], values[11:300_001], values[300_001:600_001].reshape(600, 500).t(), values[600_001:]]
    packing = Packing(tensors, torch.bfloat16, rows=2).pack()
    packing.pack(offset=packing.offsets[1])
    packing.reduce_unpack(3, nonfinite=packing.nonfinite)
    out = [bytes(packing.buffer), raw(values).tobytes()]
    packing.plan.reduce(0, 0, packing.numel, packing.buffer, packing.offsets, packing.buffer, 0, 3)
    packing.unpack(divisor=7)
    return [*out, bytes(packing.buffer), raw(values).tobytes(), bytes(packing.nonfinite.indices())]


def test_threads_do_not_change_bits():
    alone = everything(1)
    for num_threads in (2, 4, 7):
        assert everything(num_threads) == alone


def test_a_forked_child_gets_threads_of_its_own():
    wanted = everything(4)
    child = os.fork()
    if child == 0:
        before = len(os.listdir("/proc/self/task"))
        same = everything(4) == wanted
        os._exit(0 if same and len(os.listdir("/proc/self/task")) == before + 3 else 1)
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert pid and os.waitstatus_to_exitcode(status) == 0


def test_python_threads_may_pack_at_once():
    _C.set_num_threads(4)
    wrong = []

    def work(seed):
        packing = Packing([normal(300_000, torch.float32, seed), normal(17, torch.float32, seed + 10)], torch.float16)
        wanted = torch.cat(packing.tensors).half()
        for _ in range(20):
            packing.wires().zero_()
            if not torch.equal(packing.pack().wires()[0], wanted):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_the_gil_is_released():
    packing = Packing([torch.zeros(20_000_000)])
    _C.set_num_threads(1)
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    packing.pack()
    seen, ticks[0] = ticks[0], 0
    packing.pack()
    seen = ticks[0]
    stop.set()
    thread.join()
    assert seen >= 2  # a pack of 80 MB takes more than 5 ms


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormals")
@pytest.mark.parametrize("num_threads", [1, 4])
def test_flushing_subnormals_does_not_change_bits(num_threads):
    wanted = everything(num_threads)
    small = torch.full((100,), 1e-39)
    pairs = [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.float64, torch.bfloat16)]

    packings = [Packing([(torch.arange(1, 101) * 1e-40).to(dtype)], wire, rows=2) for dtype, wire in pairs]
    inputs = [raw(packing.tensors[0]).copy() for packing in packings]

    def divided():
        results = []
        for packing, values in zip(packings, inputs, strict=True):
            raw(packing.tensors[0])[:] = values
            packing.pack().pack(offset=packing.offsets[1]).reduce_unpack(5)
            results.append(raw(packing.tensors[0]).tobytes())
            results.append(raw(packing.unpack(divisor=3).tensors[0]).tobytes())
        return results

    wanted_small = divided()
    assert all(any(result) for result in wanted_small)
    try:
        assert torch.set_flush_denormal(True)
        assert everything(num_threads) == wanted
        assert divided() == wanted_small
        assert (small * 1.0 == 0).all()  # and what the caller has set is back
    finally:
        torch.set_flush_denormal(False)
