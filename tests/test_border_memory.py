"""The border: memory order, keys, overlaps."""

import itertools

import numpy as np
import pytest
from border_arrays import FakeCuPy, describe, key, order
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpack.errors import LayoutError


def channels_last(shape, dtype=np.float32):
    batch, channels, height, width = shape
    return np.zeros((batch, height, width, channels), dtype).transpose(0, 3, 1, 2)


def test_orders():
    image = np.zeros((2, 3, 4, 5))
    assert order(image) == ()
    assert order(channels_last((2, 3, 4, 5))) == (0, 2, 3, 1)
    assert order(image.transpose(3, 1, 0, 2)) == (2, 1, 3, 0)
    assert order(np.zeros((3, 4)).T) == (1, 0)
    assert order(np.zeros((3, 4))[::-1, ::-1]) == ()
    assert order(np.zeros((3, 1, 4)).T) == (2, 1, 0)
    assert order(np.zeros((1, 4)).T) == ()
    assert order(channels_last((2, 1, 4, 5))) == ()


def zeros(*shape):
    return np.zeros(shape, np.float32)


def test_keys():
    image = zeros(2, 3, 4, 5)
    assert key(image) == key(zeros(2, 3, 4, 9)[..., :5]) == key(np.ones((2, 3, 4, 5), np.float32))
    assert key(channels_last((2, 3, 4, 5))) == key(channels_last((2, 9, 4, 5))[:, 2:5])
    distinct = [
        [],
        [image],
        [channels_last((2, 3, 4, 5))],
        [image.transpose(0, 1, 3, 2)],
        [image.astype(np.float64)],
        [image.astype(np.int32)],
        [zeros(2, 3, 20)],
        [zeros(2, 3), zeros(4, 5)],
        [zeros(4, 5), zeros(2, 3)],
        [zeros(2, 3, 4), zeros(5)],
        [image, zeros()],
        [zeros(0)],
        [zeros(1)],
        [zeros(1, 1)],
        [FakeCuPy(np.zeros((2, 3, 4, 5), np.float32))],
    ]
    keys = [describe(objects).key for objects in distinct]
    assert len(set(keys)) == len(distinct)
    assert all(len(k) == 16 for k in keys)
    cube = np.zeros((2, 2, 2))
    assert len({key(cube.transpose(axes)) for axes in itertools.permutations(range(3))}) == 6


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_key_is_equal_exactly_where_shape_and_order_are(permutation, sizes):
    strided = np.zeros(sizes).transpose(permutation)
    same = np.zeros([size + 1 for size in sizes])[tuple(slice(0, size) for size in sizes)].transpose(permutation)
    assert key(strided) == key(same)
    moving = [d for d in permutation if sizes[d] > 1]
    assert (key(strided) == key(np.zeros(strided.shape))) == (moving == sorted(moving)) == (order(strided) == ())


def test_pack_logically_changes_no_fact():
    arrays = describe([zeros(3, 4).T, zeros(2)])
    before = arrays.key, arrays.order(0), arrays.shape(0)
    arrays.pack_logically([0, 1, 0])
    assert (arrays.key, arrays.order(0), arrays.shape(0)) == before
    with pytest.raises(IndexError):
        arrays.pack_logically([2])


def test_overlaps_are_named():
    base = zeros(4, 6)
    with pytest.raises(LayoutError, match=r"^allreduce: grads\[2\] 'c': the same memory as grads\[0\] 'a'"):
        describe([base, zeros(1), base.view()], names=["a", "b", "c"])
    with pytest.raises(LayoutError, match=r"grads\[1\]: overlaps the memory of grads\[0\]"):
        describe([base[2:], base[:3]])
    with pytest.raises(LayoutError, match=r"grads\[1\]: overlaps the memory of grads\[0\]"):
        describe([base, base[1].view(np.int8)])


def test_interleaved_views_are_legal():
    base = zeros(64, 200)
    assert len(describe(list(base.T))) == 200
    assert len(describe([base[:, :50], base[:, 50:], zeros(3)])) == 3
    assert len(describe([base[::2, ::2], base[1::2, ::2], base[::2, 1::2], base[1::2, 1::2]])) == 4
    with pytest.raises(LayoutError, match=r"grads\[57\]: overlaps the memory of grads\[13\]"):
        columns = list(base.T)
        columns[57] = base[3:9, 13]
        describe(columns)
    # Far beyond what a bitmap could hold: decided from the numbers alone.
    huge = np.zeros(2, np.int8)
    make = lambda shift, size: FakeCuPy(huge, shape=(size,), strides=(4,), data=((1 << 60) + shift, False))  # noqa: E731
    assert len(describe([make(0, 1 << 58), make(1, 1 << 58), make(2, 1 << 58)])) == 3
    with pytest.raises(LayoutError):
        describe([make(0, 1 << 58), make(1 << 59, 1 << 20)])


BUFFER = np.zeros(96, np.float64)


@st.composite
def strided_views(draw):
    dtype = np.dtype(draw(st.sampled_from(["u1", "i2", "f4", "f8", "c16"])))
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    strides = [draw(st.integers(-9, 9)) * dtype.itemsize for _ in sizes]
    low = sum(min(0, (n - 1) * s) for n, s in zip(sizes, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(sizes, strides, strict=True)) + dtype.itemsize
    scalar = min(dtype.itemsize, 8)
    first, last = -(low // scalar), (BUFFER.nbytes - high) // scalar
    if first > last:
        return draw(strided_views())
    return np.ndarray(sizes, dtype, BUFFER, draw(st.integers(first, last)) * scalar, strides)


def overlaps_itself(view):
    places = {
        sum(i * s for i, s in zip(index, view.strides, strict=True)) for index in itertools.product(*map(range, view.shape))
    }
    return len(places) < view.size


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.lists(strided_views(), min_size=1, max_size=3))
def test_overlaps_are_decided_exactly(views):
    own = [i for i, view in enumerate(views) if overlaps_itself(view)]
    pairs = [(i, j) for i, j in itertools.combinations(range(len(views)), 2) if np.shares_memory(views[i], views[j])]
    if own:
        with pytest.raises(BufferError, match=rf"grads\[{own[0]}\]: .*several elements at one address"):
            describe(views, protocol="buffer")
    elif pairs:
        with pytest.raises(LayoutError) as raised:
            describe(views, protocol="buffer")
        assert any(f"grads[{j}]: " in str(raised.value) and f"grads[{i}]: every" in str(raised.value) for i, j in pairs)
    else:
        assert len(describe(views, protocol="buffer")) == len(views)
