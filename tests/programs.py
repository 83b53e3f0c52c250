"""Python programs in processes of their own, and the SIMD levels to run them with."""

import os
import subprocess
import sys


def run_python(program, **settings):
    return start_python("-c", program, **settings)


def start_python(*arguments, **settings):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def available_levels():
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith("flags")), "").split()
    avx2 = {"avx2", "f16c"} <= set(flags)
    avx512 = avx2 and {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags)
    return ["scalar"] + ["avx2"] * avx2 + ["avx512"] * avx512
