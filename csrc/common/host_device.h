// Marks a function that both a CPU and a CUDA kernel call.
#pragma once

// Always inlined: cpu_runs_avx512.cc is compiled for instructions that the rest of the program may not have, and an inline
// function that it emitted out of line could be the copy that the linker keeps for everyone.
#if defined(__CUDACC__)
#define GP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GP_HOST_DEVICE inline __attribute__((always_inline))
#endif
