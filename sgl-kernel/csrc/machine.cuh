// What the kernels use of a GPU besides plain C++: copies on their way, barriers, values of other lanes, 16-bit floats.
//
// One name for each, so that the same kernels can be compiled for a CPU as well: test/sgl_kernel/on_cpu/machine.h
// gives these names there.
#pragma once

#ifdef SGL_KERNEL_ON_CPU
#include "machine.h"
#else

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace sgl_kernel {

__device__ __forceinline__ int thread_index() { return threadIdx.x; }
__device__ __forceinline__ int lane_index() { return threadIdx.x & 31; }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 (8) bytes to shared memory; with `there` false it writes zeros, and reads nothing. `from` must be the
// address of something in either case.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_8(void* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 8 : 0)
               : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Until all groups of this thread but the last `Pending` are there.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ void block_barrier() { __syncthreads(); }

__device__ __forceinline__ uint32_t of_lane(uint32_t value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

__device__ __forceinline__ const uint8_t* of_lane(const uint8_t* value, int lane) {
  return reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(value), lane));
}

__device__ __forceinline__ float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t bits_of_float(float value) { return __float_as_uint(value); }

// Bits of 16-bit floats.
__device__ __forceinline__ float value_of_half(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ __forceinline__ float value_of_bfloat16(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
__device__ __forceinline__ uint16_t half_of(float value) { return __half_as_ushort(__float2half_rn(value)); }
__device__ __forceinline__ uint16_t bfloat16_of(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// Two e4m3, the first in the low byte: to nearest, ties to even, saturating at 448.
__device__ __forceinline__ uint16_t e4m3_pair_of(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ void values_of_e4m3_pair(uint16_t pair, float& first, float& second) {
  const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
  first = values.x;
  second = values.y;
}

}  // namespace sgl_kernel

#endif
