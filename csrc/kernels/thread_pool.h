// The threads that CPU kernels share.
#pragma once

#include <cstdint>

namespace gradpack {

// Threads that one call may use, the calling one included. At first the processors that this process may run on, at
// most 8.
void set_pool_threads(int num_threads);
int pool_threads();

// Calls run(context, block) once for each block in [0, num_blocks), from the calling thread and from threads of the pool, in
// no particular order, and returns when all have returned. `run` must not throw. A call that finds the pool at work for
// another thread does all its blocks itself. In the child of a fork the pool starts anew.
void run_blocks(int64_t num_blocks, void (*run)(void* context, int64_t block), void* context);

}  // namespace gradpack
