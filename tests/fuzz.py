"""The fuzzer's cases, each made from its kind and number alone: `python tests/fuzz.py arrays 17` runs one again.

`python tests/fuzz.py arrays 0 1000` runs a range. For each case stdout gets its number before it runs and a digest of what it
computed after, so that a crash leaves the number of the case behind.
"""

import faulthandler
import os
import random
import sys
import traceback

import fuzz_arrays
import fuzz_layouts
import fuzz_objects

KINDS = {"layouts": fuzz_layouts.check, "arrays": fuzz_arrays.check, "objects": fuzz_objects.check}


def run(kind, first, end):
    for index in range(first, end):
        os.write(1, b"%d " % index)
        digest = KINDS[kind](random.Random(f"{kind} {index}"))
        os.write(1, b"%08x\n" % (digest or 0))


def main(kind, first, end=None):
    faulthandler.enable()
    try:
        run(kind, int(first), int(first) + 1 if end is None else int(end))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
