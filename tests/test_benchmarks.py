"""The benchmarks measure what they say: shapes are those of the models, wrong elements are counted, the driver pairs turns."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


def conv_and_norm(inputs: int, outputs: int, kernel: int) -> list[tuple[int, ...]]:
    return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]


def resnet50() -> list[tuple[int, ...]]:
    shapes, channels = conv_and_norm(3, 64, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += conv_and_norm(channels, width, 1) + conv_and_norm(width, width, 3) + conv_and_norm(width, 4 * width, 1)
            if block == 0:
                shapes += conv_and_norm(channels, 4 * width, 1)
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def mobilenetv2() -> list[tuple[int, ...]]:
    shapes, channels = conv_and_norm(3, 32, 3), 32
    for expansion, width, blocks in ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)):
        for _ in range(blocks):
            inside = expansion * channels
            shapes += conv_and_norm(channels, inside, 1) if expansion > 1 else []
            shapes += conv_and_norm(1, inside, 3) + conv_and_norm(inside, width, 1)
            channels = width
    return [*shapes, *conv_and_norm(320, 1280, 1), (1000, 1280), (1000,)]


def bert_base() -> list[tuple[int, ...]]:
    square, width = [(768, 768), (768,)], [(768,), (768,)]
    layer = [*square * 4, *width, (3072, 768), (3072,), (768, 3072), (768,), *width]
    return [(30522, 768), (512, 768), (2, 768), *width, *layer * 12, *square]


def gpt2() -> list[tuple[int, ...]]:
    width = [(768,), (768,)]
    layer = [*width, (768, 2304), (2304,), (768, 768), (768,), *width, (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *layer * 12, *width]


@pytest.mark.parametrize("module", ["shapes"], indirect=True)
@pytest.mark.parametrize("formula", [resnet50, mobilenetv2, bert_base, gpt2])
def test_shapes_are_those_of_the_published_model(module: ModuleType, formula) -> None:
    shapes = module.load(formula.__name__)
    assert module.count(shapes) == module.PUBLISHED[formula.__name__]
    assert Counter(shapes) == Counter(formula())


@pytest.mark.parametrize("module", ["shapes"], indirect=True)
def test_file_and_table_name_the_same_models(module: ModuleType) -> None:
    files = {path.stem: json.loads(path.read_text())["parameters"] for path in module.FOLDER.iterdir()}
    assert files == module.PUBLISHED
    # The published policies have 17, 48 and 84×84×4 numbers to look at.
    assert {name: (len(module.load(name)), module.count(module.load(name))) for name in module.FORMULAS} == {
        "small2000": (2000, 2_000_000),
        "policy_45k": (13, 6 + 2 * (17 * 64 + 64 + 64 * 64 + 64) + 64 * 6 + 6 + 64 + 1),
        "policy_1500k": (17, 380_313),
        "atari": (12, 8_224 + 32_832 + 36_928 + 3_136 * 512 + 512 + 512 * 18 + 18 + 512 + 1),
        "scalar": (1, 1),
    }


@pytest.mark.parametrize("module", ["peers"], indirect=True)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_wrong_element_is_seen(module: ModuleType, dtype: torch.dtype, world: int) -> None:
    shapes = [(3, 50), (), (20_000,), (0,), (7,)]
    ranks = [module.Gradients(shapes, dtype, rank, world) for rank in range(world)]
    for rank in ranks:
        rank.fill()
    sums = [sum(tensors) for tensors in zip(*(rank.tensors for rank in ranks), strict=True)]
    assert ranks[0].wrong(sums, world) == 0
    assert ranks[0].wrong(ranks[1].tensors) > 10_000
    sums[2][12_345] += world
    assert ranks[0].wrong(sums, world) == 1
    assert ranks[0].wrong([None, *sums[1:]], world) == 151


@pytest.mark.parametrize("module", ["rows"], indirect=True)
def test_driver_pairs_turns_and_keeps_to_the_order(module: ModuleType) -> None:
    turns: list[str] = []

    def piece(name: str, seconds: float, every: int = 1):
        return module.Piece(name, lambda: turns.append(name) or seconds, lambda: turns.append(f"before {name}"), every)

    samples = module.interleave([piece("a", 1.0), piece("b", 3.0), piece("c", 8.0, every=2)], 3, warmup=1)
    # Forwards, backwards from the second on, forwards from the third on, backwards; c every other time.
    assert turns[1::2] == ["a", "b", *"acb", *"ab", *"cba"]
    assert turns[::2] == [f"before {name}" for name in turns[1::2]]
    assert samples["a"].seconds == [1.0] * 3
    assert [math.isnan(seconds) for seconds in samples["c"].seconds] == [False, True, False]
    fields = module.timings([samples["c"]], [samples["a"]], moved=4_000_000_000)
    assert (fields["median_ms"], fields["gb_per_s"], fields["ratio"], fields["ratio_runs"]) == (8000.0, 0.5, 8.0, [8.0])
    assert module.timings([samples["b"].less(samples["b"])], [samples["a"]], moved=1)["gb_per_s"] is None
    assert module.over_ranks([samples["a"], samples["b"]]).seconds == [3.0] * 3
    assert module.percentile(range(1, 101), 99) == 99


def test_quick_run_finds_no_wrong_element(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "bench_allreduce.py"), "--quick", "--models", "scalar", "policy_45k"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert {row["case"] for row in found["rows"]} == {"scalar", "policy_45k"}
    assert {row["piece"] for row in found["rows"]} >= {"flat", "cat", "per tensor", "DDP default (net)", "gradpack", "memcpy"}
    assert [row for row in found["rows"] if row["wrong"]] == []
    assert done.stdout.count("\nPASS ") + done.stdout.count("\nMISS ") == len(found["verdicts"]) == 2
    assert done.stdout.endswith("\n0 wrong elements\n")
