"""The CPU kernels: exact on every element, the same bits whatever the instruction set, the threads and the cuts."""

import ctypes
import itertools
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from packing import COMPLEX, FLOATS, HALVES, INTS, Packing, name, normal, random_bits, raw
from programs import available_levels, run_python
from reference import rounded

from gradpack import _C

# ---- one element -----------------------------------------------------------------------------------------------------------


def assert_packs_rounded(values, wire):
    got = Packing([values.clone()], HALVES[wire]).pack().wires()[0]
    want = rounded(values.double().numpy(), wire)
    numbers = ~np.isnan(want)
    assert np.array_equal(got.double().numpy()[numbers].view(np.uint64), want[numbers].view(np.uint64))
    assert got.isnan().numpy()[~numbers].all()


@pytest.mark.parametrize("wire", HALVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_16_bit_pattern_both_ways(wire, dtype):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(HALVES[wire])
    packing = Packing([torch.zeros(65536, dtype=dtype)], HALVES[wire])
    packing.wires()[0].copy_(patterns)
    wide = packing.unpack().tensors[0]
    numbers = ~patterns.isnan()
    assert torch.equal(wide[numbers].view(torch.uint8), patterns[numbers].to(dtype).view(torch.uint8))
    assert wide[~numbers].isnan().all()
    packing.wires().zero_()
    back = packing.pack().wires()[0]
    assert torch.equal(back[numbers].view(torch.uint16), patterns[numbers].view(torch.uint16))
    assert back[~numbers].isnan().all()
    if wire == "float16":  # NaNs keep sign and payload and become quiet, as F16C does it
        assert torch.equal(back[~numbers].view(torch.int16), patterns[~numbers].view(torch.int16) | 0x200)


@pytest.mark.parametrize("wire", HALVES)
def test_every_float32_exponent(wire):
    dropped = {"float16": 13, "bfloat16": 16}[wire]
    tails = {
        t & 0x7FFFFF
        for k in range(dropped - 2, 24)
        for t in ((1 << k) - 1, 1 << k, (1 << k) + 1, 3 << k, (3 << k) - 1, (3 << k) + 1)
    }
    fractions = np.array(sorted(tails | {0, 1, 0x7FFFFF, 0x7FFFFE, 0x400001, 0x555555, 0x2AAAAA}), np.uint32)
    exponents = np.arange(256, dtype=np.uint32) << 23
    signs = np.array([0, 1 << 31], np.uint32)
    assert_packs_rounded(torch.from_numpy((signs[:, None, None] | exponents[:, None] | fractions).ravel().view(np.float32)), wire)


@pytest.mark.parametrize("wire", HALVES)
def test_float64_is_rounded_once(wire):
    digits = {"float16": 11, "bfloat16": 8}[wire]
    ties = np.ldexp(1 + (2 * np.arange(64) + 1) * 2.0**-digits, np.arange(-150, 130)[:, None]).ravel()
    # A little off a tie, too little for float32 to hold: rounding through float32 would make a tie of it.
    near = np.concatenate([ties * (1 + 2.0**-50), ties * (1 - 2.0**-50), ties])
    tiny = np.ldexp(1 + np.arange(16) / 16, np.arange(-1074, -120)[:, None]).ravel()
    huge = np.ldexp(2 - 2.0 ** -np.arange(1, 53), np.arange(10, 1023, 7)[:, None]).ravel()
    edges = np.array([0.0, np.inf, np.nan, 65504, 65519.999999999, 65520, 65520.00000001, 3.4028235677973366e38, 1.7e308, 5e-324])
    values = np.concatenate([near, tiny, huge, edges, random_bits(20000, torch.float64).numpy()])
    values = np.concatenate([values, -values])
    assert_packs_rounded(torch.from_numpy(values), wire)
    with np.errstate(all="ignore"):
        through_float32 = rounded(near.astype(np.float32).astype(np.float64), wire)
    assert (through_float32 != rounded(near, wire)).any()  # the cases above do tell the two apart


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("divisor", [*range(1, 18), 1000, 4096])
def test_division_is_correctly_rounded(dtype, divisor):
    whole = torch.arange(-200, 200).to(dtype) * (divisor if divisor < 18 else 1)
    values = torch.cat([whole, normal(2000, dtype), normal(2000, dtype) * 1e-7, random_bits(2000, dtype)])
    want = (values.float() if dtype.itemsize == 2 else values).numpy()
    with np.errstate(all="ignore"):
        want = torch.from_numpy(want / want.dtype.type(divisor)).to(dtype)
    packing = Packing([values.clone()]).pack().unpack(divisor=divisor)
    numbers = ~want.isnan()
    assert np.array_equal(raw(packing.tensors[0][numbers]), raw(want[numbers]))
    assert packing.tensors[0][~numbers].isnan().all()
    if divisor < 18 and dtype.itemsize > 2:
        assert torch.equal(packing.tensors[0][:400].double(), torch.arange(-200, 200).double())


@pytest.mark.parametrize("wire", HALVES)
def test_division_of_a_16_bit_wire_is_not_rounded_to_16_bits(wire):
    for dtype in (torch.float32, torch.float64):
        packing = Packing([normal(1000, dtype)], HALVES[wire]).pack().unpack(divisor=3)
        assert torch.equal(packing.tensors[0], (packing.wires()[0].float() / 3).to(dtype))


# ---- instruction sets --------------------------------------------------------------------------------------------------------

# Prints a digest for each group of cases. Runs of every length and alignment up to two registers, and a streamed one.
DIGESTS = """
import hashlib, itertools, sys
import torch
sys.path.insert(0, {tests!r})
from packing import COMPLEX, FLOATS, INTS, HALVES, Packing, name, random_bits, raw, _C

def digest(dtype, wire):
    sha = hashlib.sha256()
    for count, start in [(n, s) for n in range(35) for s in (0, 1, 5)] + [(n, s) for n in (63, 67, 130, 1001) for s in range(34)]:
        source = random_bits(count + start + 8, dtype, seed=count)
        packing = Packing([source[start:start + count], source[start + count:start + count + 3].clone()], wire, rows=3)
        flags = packing.nonfinite
        for row in range(3):
            packing.wires()[row].copy_(random_bits(packing.wires().shape[1], packing.wire, seed=row + 1000 * count))
        halves = dtype in FLOATS + COMPLEX
        packing.reduce_unpack(divisor=3 if halves else 1, nonfinite=flags)
        sha.update(raw(source))
        packing.plan.reduce(0, 0, packing.numel, packing.buffer, packing.offsets, packing.buffer, 0, 5 if halves else 1)
        sha.update(packing.buffer)
        for divisor in (1, 2, 7) if halves else (1,):
            packing.unpack(divisor=divisor, nonfinite=flags if divisor != 2 else None)
            sha.update(raw(source))
            packing.pack(nonfinite=flags if divisor == 2 else None)
            sha.update(packing.buffer)
        packing.plan.check_finite(packing.arrays, flags)
        sha.update(bytes(flags.indices()))
    return sha.hexdigest()

print(_C.simd_name())
pairs = [(d, None) for d in FLOATS + COMPLEX + INTS] + [(d, w) for d in (torch.float32, torch.float64) for w in HALVES.values()]
for dtype, wire in pairs:
    print(name(dtype), wire, digest(dtype, wire))
for wire in (torch.float32, torch.float16, torch.bfloat16):
    values = random_bits(9_000_003, torch.float32)
    packing = Packing([values[:7], values[7:5_000_000], values[5_000_001:]], wire).pack().unpack(divisor=3)
    print("streamed", wire, hashlib.sha256(raw(values)).hexdigest())
"""


def test_instruction_sets_give_the_same_bits():
    program = DIGESTS.format(tests=os.path.dirname(__file__))
    runs = {level: run_python(program, GRADPACK_SIMD=level) for level in available_levels()}
    outputs = {}
    for level, process in runs.items():
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        first, *outputs[level] = out.splitlines()
        assert first == level
    for level, lines in outputs.items():
        assert lines == outputs["scalar"], level


def test_the_best_instruction_set_is_the_default():
    if "GRADPACK_SIMD" not in os.environ:
        assert _C.simd_name() == available_levels()[-1]


def test_an_unknown_instruction_set_is_refused():
    program = "from gradpack import _C\nfor _ in range(2):\n  try: _C.simd_name()\n  except ValueError as error: print(error)"
    out, _ = run_python(program, GRADPACK_SIMD="mmx").communicate(timeout=60)
    assert len(out.splitlines()) == 2 and all("GRADPACK_SIMD: found 'mmx', wanted" in line for line in out.splitlines())


# ---- walks -----------------------------------------------------------------------------------------------------------------


def views(dtype):
    base = random_bits(1920, dtype, seed=3)
    cube = base.reshape(6, 8, 40)
    yield from (cube.clone(), cube.permute(2, 0, 1), cube[:, 1:7, 3:37], cube[::2, ::3, ::5], cube.transpose(0, 1)[1:])
    yield from (cube[0, 0, 0], cube[:, :0], cube[1, :, 5], cube[..., :33].permute(1, 0, 2), base[:1])
    yield torch.empty_strided((70, 90), (1, 100), dtype=dtype).copy_(base[:90].expand(70, 90)).t()  # rows of 280 bytes and more
    yield torch.as_strided(base.clone(), (2, 2, 2, 2, 2, 2, 2), (900, 400, 180, 80, 33, 13, 5))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, *COMPLEX, torch.bool], ids=name)
def test_pack_then_unpack_is_the_identity(dtype):
    # Each in memory of its own: the views overlap.
    tensors = [torch.empty_strided(view.shape, view.stride(), dtype=dtype).copy_(view) for view in views(dtype)]
    for tensor in list(tensors):
        before = raw(tensor).copy()
        alone = Packing([tensor]).pack()
        if tensor.is_contiguous():
            assert bytes(alone.buffer) == before.tobytes()
        tensor.zero_()
        alone.unpack()
        assert np.array_equal(raw(tensor), before)
    together = Packing(tensors).pack()
    before = [raw(tensor).copy() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    together.unpack()
    assert all(np.array_equal(raw(tensor), was) for tensor, was in zip(tensors, before, strict=True))


def test_packing_order_is_memory_order():
    matrix = torch.arange(42.0).reshape(6, 7)
    for tensor in (matrix, matrix.t(), matrix[:, ::2], matrix.t()[2:5]):
        got = Packing([tensor]).pack().wires()[0]
        assert torch.equal(got, tensor.flatten() if tensor.stride(0) >= tensor.stride(-1) else tensor.t().flatten())


def test_elements_between_those_of_a_view_are_not_written():
    base = torch.arange(400.0)
    packing = Packing([base.reshape(10, 40)[1:8:2, 4:31:3]]).pack()
    packing.wires().fill_(-1)
    packing.unpack()
    want = torch.arange(400.0)
    want.reshape(10, 40)[1:8:2, 4:31:3] = -1
    assert torch.equal(base, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex64], ids=name)
def test_every_range_of_a_small_stream(dtype):
    square = random_bits(16, dtype).reshape(4, 4)
    tensors = [
        random_bits(3, dtype, 1),
        square.t()[:, 1:],
        random_bits(0, dtype),
        random_bits(1, dtype, 2),
        random_bits(2, dtype, 4),
    ]
    packing = Packing(tensors)
    whole = bytes(packing.pack().buffer)
    size = packing.element_bytes
    for begin, end in itertools.combinations_with_replacement(range(packing.numel + 1), 2):
        ctypes.memset(packing.buffer.address, 0xA5, len(packing.buffer))
        packing.pack(begin, end)
        got = bytes(packing.buffer)
        assert got[begin * size : end * size] == whole[begin * size : end * size]
        assert set(got[: begin * size] + got[end * size :]) <= {0xA5}
        # The complement of the range stays as it is.
        for tensor in tensors:
            tensor.zero_()
        packing.unpack(begin, end)
        packing.pack(0, packing.numel)
        assert bytes(packing.buffer) == bytes(begin * size) + whole[begin * size : end * size] + bytes(
            (packing.numel - end) * size
        )
        ctypes.memmove(packing.buffer.address, whole, len(whole))
        packing.unpack()


@hypothesis.given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool]),
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_cuts_do_not_matter(dtype, shapes, seed):
    generator = np.random.default_rng(seed)
    tensors = []
    for shape in shapes:
        spread = [size * int(generator.integers(1, 3)) for size in shape]
        base = random_bits(int(np.prod(spread)), dtype, seed)
        view = base.reshape(spread)[tuple(slice(None, None, max(1, w // max(1, s))) for w, s in zip(spread, shape, strict=True))]
        tensors.append(view.permute(generator.permutation(len(shape)).tolist()))
    before = [raw(tensor).copy() for tensor in tensors]
    packing = Packing(tensors)
    cuts = [0, *sorted(generator.integers(0, packing.numel + 1, 3).tolist()), packing.numel]
    for begin, end in itertools.pairwise(cuts):
        packing.pack(begin, end)
    for tensor in tensors:
        tensor.zero_()
    for begin, end in itertools.pairwise(cuts):
        packing.unpack(begin, end)
    assert all(np.array_equal(raw(tensor), was) for tensor, was in zip(tensors, before, strict=True))


def test_absent_gradients_pack_as_zeros_and_are_not_written():
    present = torch.nn.Parameter(torch.ones(5))
    present.grad = torch.full((5,), 2.0)
    packing = Packing([torch.nn.Parameter(torch.full((4,), 7.0)), present, torch.nn.Parameter(torch.ones(3))])
    packing.wires().fill_(9)
    assert packing.pack().wires()[0].tolist() == [0.0] * 4 + [2.0] * 5 + [0.0] * 3
    packing.wires().fill_(3)
    packing.unpack().reduce_unpack()
    packing.plan.check_finite(packing.arrays, packing.nonfinite)
    assert packing.tensors[0].tolist() == [7.0] * 4 and present.grad.tolist() == [3.0] * 5
