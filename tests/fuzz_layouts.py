"""Random layouts against what layout.py promises, in numbers alone, so that streams of 2**33 elements cost nothing."""

from gradpack.dtypes import COMPRESS, DTYPES
from gradpack.layout import MAX_PACKS, ArraySpec, plan_layout, wire_itemsize

_FEW_PACKS = 500  # what a case may take its time over


def random_shape(rng):
    kind = rng.random()
    if kind < 0.1:
        return ()
    if kind < 0.2:
        return (rng.choice([0, 5]), 0, rng.choice([1, 1 << 40]))
    if kind < 0.4:
        return (1 << rng.randrange(34), *([rng.randrange(1, 4)] * rng.randrange(2)))
    return tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 5)))


def random_specs(rng):
    dtypes = rng.sample(list(DTYPES), rng.randrange(1, 5))
    return [ArraySpec(random_shape(rng), rng.choice(dtypes)) for _ in range(rng.randrange(13))]


def random_policy(rng, specs):
    policy = {"compress": rng.choice(list(COMPRESS))}
    cut = rng.random()
    if cut < 0.3:
        policy["cut"] = "gradient"
    elif cut < 0.5:
        policy["alignment"] = rng.choice([2, 16, 48, 64, 4096])
    if rng.random() < 0.5:
        policy["splits"] = rng.choice([1, 2, 3, 7, rng.randrange(1, _FEW_PACKS)])
        return policy
    largest = max((16 * sum(spec.numel for spec in specs if spec.dtype == dtype) for dtype in DTYPES), default=0)
    fewest = largest // _FEW_PACKS + 1
    policy["bytes_per_pack"] = rng.choice([fewest, rng.randrange(fewest, 4 * fewest + 2), 2 * largest + 1])
    return policy


def wanted_cuts(total, offsets, itemsize, policy):
    """The cuts of one stream as the documentation of plan_layout has them."""
    if (size := policy.get("bytes_per_pack")) is not None:
        size = max(1, size // itemsize)
        cuts = [*range(0, total, size), total] if total else [0, 0]
    else:
        splits = policy.get("splits", 4)
        cuts = [total // splits * index for index in range(splits)] + [total]
    if policy.get("cut") == "gradient":
        return [min(offsets, key=lambda offset: (abs(offset - cut), offset)) for cut in cuts]
    line = -(-policy.get("alignment", 1) // itemsize)
    return [cut // line * line for cut in cuts[:-1]] + [total]


def check_cover(layout, absent):
    """Every element in exactly one span: the spans of each gradient, in order, go from its first element to its last."""
    reached = dict.fromkeys(range(len(layout.specs)), 0)
    for pack in layout.packs:
        at = 0
        for span in pack.spans:
            assert span.count > 0 and span.pack_offset == at, f"{span} in {pack} after {at} elements"
            assert span.gradient_offset == reached[span.gradient], f"{span} after {reached[span.gradient]} elements"
            assert layout.specs[span.gradient].dtype == pack.group.dtype
            at += span.count
            reached[span.gradient] += span.count
        assert at == pack.numel and pack.nbytes == at * wire_itemsize(pack.group.dtype, pack.group.wire)
    assert reached == {index: 0 if index in absent else spec.numel for index, spec in enumerate(layout.specs)}


def check_cuts(layout, policy):
    for group in layout.groups:
        offsets = [0]
        for index in group.gradients:
            offsets.append(offsets[-1] + layout.specs[index].numel)
        assert list(group.offsets) == offsets
        assert list(group.cuts) == wanted_cuts(offsets[-1], offsets, group.wire_itemsize, policy)


def description(specs, policy):
    """All that a fingerprint speaks of."""
    packs = ("bytes_per_pack", policy["bytes_per_pack"]) if "bytes_per_pack" in policy else ("splits", policy.get("splits", 4))
    rest = policy.get("cut", "even"), policy["compress"], policy.get("alignment", 1)
    return [(spec.shape, spec.dtype) for spec in specs], packs, rest


def changed(rng, specs, policy):
    """The same list and policy, or ones that differ in a single thing, which may be one that no fingerprint speaks of."""
    specs, policy = list(specs), dict(policy)
    change = rng.randrange(8)
    index = rng.randrange(len(specs)) if specs else 0
    if change == 0 and specs:
        specs[index] = ArraySpec((*specs[index].shape, 1), specs[index].dtype)
    elif change == 1 and specs:
        specs[index] = ArraySpec(specs[index].shape, rng.choice(list(DTYPES)))
    elif change == 2 and specs:
        specs[index] = ArraySpec(specs[index].shape, specs[index].dtype, tuple(range(len(specs[index].shape)))[::-1])
    elif change == 3 and len(specs) > 1:
        specs[index], specs[index - 1] = specs[index - 1], specs[index]
    elif change == 4:
        specs.insert(index, ArraySpec((0,), "float32"))
    elif change == 5:
        policy["compress"] = rng.choice(list(COMPRESS))
    elif change == 6:
        policy["splits"] = policy.get("splits", 4) + rng.randrange(2)
    return specs, policy


def check_refusal(rng, specs):
    """Numbers of packs beyond the limit are refused, and no other ones."""
    specs = [*specs, ArraySpec((rng.randrange(MAX_PACKS - 2, MAX_PACKS + 3) if rng.random() < 0.02 else 1 << 33,), "int8")]
    total = sum(spec.numel for spec in specs if spec.dtype == "int8")
    options = [{"splits": rng.choice([0, -1, MAX_PACKS + 1, 1 << 70])}, {"bytes_per_pack": rng.choice([0, -1, 1])}]
    options = rng.choice([*options, {"absent": [len(specs)]}, {"alignment": 0}, {"alignment": 2, "cut": "gradient"}])
    legal = options == {"bytes_per_pack": 1} and total <= MAX_PACKS
    try:
        plan_layout([spec for spec in specs if spec.dtype == "int8"] if legal else specs, **options)
        assert legal, f"{options} for {total} bytes was not refused"
    except ValueError as error:
        assert not legal and f"plan_layout: {next(iter(options))}: found " in str(error), error


def check(rng):
    specs = random_specs(rng)
    policy = random_policy(rng, specs)
    absent = {index for index in range(len(specs)) if rng.random() < 0.15}
    layout = plan_layout(specs, absent=absent, **policy)
    check_cover(layout, absent)
    check_cuts(layout, policy)
    other_specs, other_policy = changed(rng, specs, policy)
    try:
        other = plan_layout(other_specs, **other_policy)
    except ValueError as error:
        assert "bytes_per_pack" in str(error), error
    else:
        same = description(specs, policy) == description(other_specs, other_policy)
        assert (layout.fingerprint() == other.fingerprint()) == same, f"{specs} {policy}, {other_specs} {other_policy}"
    if rng.random() < 0.1:
        check_refusal(rng, specs)
