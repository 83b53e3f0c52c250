"""What is wanted of gradpack beside the other ways, and whether a run of bench_allreduce.py met it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from rows import Samples, paired_medians


@dataclass(frozen=True)
class Goal:
    """Medians over runs of medians over iterations: how many times as long ``other`` takes as ``ours``.

    Attributes:
        model: Whose gradients.
        ours: A piece of bench_allreduce.py.
        other: What it is compared with; of several the quickest.
        near: How many times as long it is to take at least where the processors share a cache.
        far: The same where they do not; None: no more is wanted there than that it was measured.
        ranks: Their number.
        dtype: Of the gradients.
    """

    model: str
    ours: str
    other: tuple[str, ...]
    near: float
    far: float | None
    ranks: int = 2
    dtype: str = "float32"

    def verdict(self, samples: Mapping[str, list[Samples]], near: bool) -> str:
        """A line that begins with PASS, MISS or, where nothing was wanted of such a machine, with NOTE."""
        others = [name for name in self.other if name in samples]
        found = {
            name: statistics.median(paired_medians(samples[self.ours], samples[name], lambda mine, its: its / mine))
            for name in others
        }
        name = min(found, key=lambda one: found[one])
        wanted = self.near if near else self.far
        said = f"{self.model}, {self.ranks} ranks, {self.dtype}: {name} / {self.ours} {found[name]:.3f}"
        if wanted is None:
            return f"NOTE {said}"
        return f"{'PASS' if found[name] >= wanted else 'MISS'} {said}, wanted at least {wanted:.2f}"


@dataclass(frozen=True)
class Limit:
    """The same for what is to take at most ``most_ms`` longer than another."""

    model: str
    ours: str
    other: tuple[str]
    most_ms: float
    ranks: int = 2
    dtype: str = "float32"

    def verdict(self, samples: Mapping[str, list[Samples]], near: bool) -> str:
        """See ``Goal.verdict``."""
        (name,) = self.other
        pairs = paired_medians(samples[self.ours], samples[name], lambda mine, its: 1e3 * (mine - its))
        more = statistics.median(pairs)
        met = "PASS" if more <= self.most_ms else "MISS"
        said = f"{self.model}, {self.ranks} ranks, {self.dtype}: {self.ours} - {name} {more:.3f} ms"
        return f"{met} {said}, wanted at most {self.most_ms}"


DDP, HOOK, SCALE = ("DDP default",), ("DDP fp16 hook",), ("scale in place",)
DEEPSPEED = ("DeepSpeed flat", "DeepSpeed per tensor")

GOALS: list[Goal | Limit] = [
    Goal("resnet50", "gradpack", DDP, 9.0, 6.0),
    Goal("resnet50", "gradpack fp16", HOOK, 12.0, None),
    *(Goal(model, "gradpack", DDP, 8.0, 6.0) for model in ("bert_base", "gpt2")),
    *(Goal(model, "gradpack fp16", HOOK, 9.0, None) for model in ("bert_base", "gpt2")),
    Goal("small2000", "gradpack", DDP, 13.0, None),
    Goal("resnet50", "gradpack", DDP, 8.5, None, ranks=4),
    *(Goal("resnet50", "gradpack", ("MPI flat",), 6.0, None, ranks=ranks) for ranks in (2, 4)),
    Goal("resnet50", "gradpack", DEEPSPEED, 2.5, 2.0),
    Goal("resnet50", "gradpack", DEEPSPEED, 3.3, None, dtype="bfloat16"),
    # At most 1.25, 1.5 and 2.2 times the bound, and 2.3 times where no cache is shared.
    *(Goal(model, "gradpack", SCALE, 1 / 1.25, 1 / 2.3) for model in ("resnet50", "bert_base", "gpt2")),
    Goal("mobilenetv2", "gradpack", SCALE, 1 / 1.5, None),
    Goal("small2000", "gradpack", SCALE, 1 / 2.2, None),
    # By gloo alone.
    *(
        Goal(model, "gradpack over gloo", ("flat",), 1 / 1.05, 1 / 1.05)
        for model in ("policy_45k", "resnet50", "bert_base", "gpt2")
    ),
    *(Limit(model, "gradpack over gloo", ("flat",), 0.5) for model in ("scalar", "policy_1500k", "atari")),
    Goal("small2000", "gradpack over gloo", ("flat",), 1.0, 1.0),
    Goal("small2000", "gradpack over gloo", DDP, 1.5, 1.5),
]


def verdicts(model: str, dtype: str, ranks: int, samples: Mapping[str, list[Samples]], near: bool) -> list[str]:
    """A line for each goal that such a run can judge."""
    return [
        goal.verdict(samples, near)
        for goal in GOALS
        if (goal.model, goal.dtype, goal.ranks) == (model, dtype, ranks)
        and goal.ours in samples
        and any(name in samples for name in goal.other)
    ]
