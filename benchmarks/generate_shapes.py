"""Writes shapes/*.json anew, from the default configurations of Hugging Face's transformers.

The models are made on torch's meta device, so nothing is downloaded and no weight takes memory. `--check` writes nothing and ends
with an error where a file is not what would be written::

    pip install torch transformers
    python benchmarks/generate_shapes.py [--check]
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch
import transformers
from shapes import FOLDER, PUBLISHED

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "resnet50": lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)),
    "bert_base": lambda: transformers.BertModel(transformers.BertConfig()),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    "mobilenetv2": lambda: transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(num_labels=1000)),
}


def text_of(name: str) -> str:
    with torch.device("meta"):
        model = MODELS[name]()
    shapes = [list(parameter.shape) for parameter in model.parameters()]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == PUBLISHED[name], (name, parameters)
    # One shape a line, so that a difference shows which.
    lines = ",\n  ".join(json.dumps(shape) for shape in shapes)
    return f'{{"model": "{type(model).__name__}", "parameters": {parameters}, "shapes": [\n  {lines}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    different = []
    for name in MODELS:
        path, text = FOLDER / f"{name}.json", text_of(name)
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            different.append(path.name)
    print(f"different: {', '.join(different)}" if different else f"{len(MODELS)} files, parameter counts as published")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
