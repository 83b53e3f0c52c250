"""Shapes of the gradients that the benchmarks work on, in the order of named_parameters().

Those of published models are in shapes/*.json, which generate_shapes.py writes; the others follow from a line of arithmetic.
"""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

Shapes = list[tuple[int, ...]]

FOLDER = Path(__file__).parent / "shapes"
PUBLISHED = {"resnet50": 25_557_032, "bert_base": 109_482_240, "gpt2": 124_439_808, "mobilenetv2": 3_504_872}
"""Parameter counts of the models in shapes/, as their authors give them."""


def dense(*widths: int) -> Shapes:
    """Weights and biases of a chain of fully connected layers, in torch's layout."""
    return [shape for inputs, outputs in itertools.pairwise(widths) for shape in ((outputs, inputs), (outputs,))]


def actor_critic(observations: int, hidden: tuple[int, ...], actions: int) -> Shapes:
    """Separate networks for actions and value, and a standard deviation for each action."""
    return [(actions,), *dense(observations, *hidden, actions), *dense(observations, *hidden, 1)]


def nature_cnn(actions: int) -> Shapes:
    """The network of Mnih et al. 2015 for 84×84 images of 4 frames, with a head for actions and one for the value."""
    convolutions: Shapes = []
    side, channels = 84, 4
    for outputs, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        convolutions += [(outputs, channels, kernel, kernel), (outputs,)]
        side, channels = (side - kernel) // stride + 1, outputs
    return [*convolutions, *dense(channels * side * side, 512), *dense(512, actions), *dense(512, 1)]


FORMULAS: dict[str, Callable[[], Shapes]] = {
    # The size of a normalisation layer's weight: each tensor costs more to handle than to copy.
    "small2000": lambda: [(1000,)] * 2000,
    # The usual policy for MuJoCo's HalfCheetah (17 observations, 6 actions): two layers of 64, 44 KB.
    "policy_45k": lambda: actor_critic(17, (64, 64), 6),
    # Legged robots (48 observations, 12 actions), layers of 512, 256 and 128: 1.5 MB.
    "policy_1500k": lambda: actor_critic(48, (512, 256, 128), 12),
    # Atari with all 18 actions: 6.8 MB.
    "atari": lambda: nature_cnn(18),
    "scalar": lambda: [()],
}

NAMES = [*PUBLISHED, *FORMULAS]


def load(name: str) -> Shapes:
    """The shapes of the model `name`, one of NAMES."""
    if name in FORMULAS:
        return FORMULAS[name]()
    return [tuple(shape) for shape in json.loads((FOLDER / f"{name}.json").read_text())["shapes"]]


def count(shapes: Shapes) -> int:
    """The number of elements of all gradients together."""
    return sum(math.prod(shape) for shape in shapes)
