// Memory that several GPUs write: what the collectives use besides machine.cuh.
//
// The memory model relied on is PTX's, at system scope, and nothing beyond it:
//
// - A rank writes to its peers' memory (posted writes) and reads its own. Nothing is read across the link but by the
//   peer's own polling, which stays in its memory, and no atomic operation crosses the link: PCIe has none to offer.
// - `store_release` orders every write that this thread has made, or knows of by a barrier of its block, before the
//   flag; `load_acquire` orders every read behind it, and of all threads that meet it in a barrier. One flag stands for
//   the writes of a whole block so.
// - A 64-bit word that carries its own flag (`load_words`, `store_words`) needs no order among words: an aligned scalar
//   of 64 bits is read whole or not at all. A pair of them is two scalars, in any order.
//
// test/sgl_kernel/on_cpu/threads/machine.h gives these names where each GPU thread is a thread of the CPU.
#pragma once

#ifdef SGL_KERNEL_ON_CPU
#include "machine.h"
#else

#include "machine.cuh"

namespace sgl_kernel {

__device__ __forceinline__ int block_index() { return blockIdx.x; }
__device__ __forceinline__ int block_count() { return gridDim.x; }
__device__ __forceinline__ int block_threads() { return blockDim.x; }

// 16 bytes of values.
struct __align__(16) Vector {
  uint32_t word[4];
};

// Two words of 32 bits of values below 32 bits of flag.
struct __align__(16) Words {
  uint64_t first, second;
};

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];\n" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;\n" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;\n" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ Words load_words(const Words* from) {
  Words words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];\n"
               : "=l"(words.first), "=l"(words.second)
               : "l"(from)
               : "memory");
  return words;
}

__device__ __forceinline__ void store_words(Words* to, Words words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};\n" ::"l"(to), "l"(words.first), "l"(words.second)
               : "memory");
}

// Of memory that nobody else writes while this kernel runs, or not before a flag says so: never through a cache that
// assumes it constant.
__device__ __forceinline__ Vector load_vector(const Vector* from) {
  Vector vector;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(vector.word[0]), "=r"(vector.word[1]), "=r"(vector.word[2]), "=r"(vector.word[3])
               : "l"(from)
               : "memory");
  return vector;
}

__device__ __forceinline__ void store_vector(Vector* to, Vector vector) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(vector.word[0]), "r"(vector.word[1]),
               "r"(vector.word[2]), "r"(vector.word[3])
               : "memory");
}

// Of a vector's memory, like these; neighbouring threads' bytes travel together.
__device__ __forceinline__ uint8_t load_byte(const uint8_t* from) {
  uint32_t value;
  asm volatile("ld.global.u8 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return static_cast<uint8_t>(value);
}

__device__ __forceinline__ void store_byte(uint8_t* to, uint8_t value) {
  asm volatile("st.global.u8 [%0], %1;\n" ::"l"(to), "r"(static_cast<uint32_t>(value)) : "memory");
}

// A clock of this GPU, in nanoseconds.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(now));
  return now;
}

__device__ __forceinline__ void pause_polling() {}

// A barrier of the block that says whether all threads came with true.
__device__ __forceinline__ bool block_all(bool value) { return __syncthreads_and(value); }

// The sum over the threads of the block, for each of them; a barrier.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();  // of a sum before
  if (lane_index() == 0) sums[thread_index() / 32] = value;
  __syncthreads();
  value = lane_index() < block_threads() / 32 ? sums[lane_index()] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Shared memory of the block for a row of vectors; each thread reads what it wrote itself.
template <int COUNT>
__device__ __forceinline__ Vector* row_memory() {
  __shared__ Vector vectors[COUNT];
  return vectors;
}

__device__ __forceinline__ float inverse_root(float value) { return rsqrtf(value); }

}  // namespace sgl_kernel

#endif
