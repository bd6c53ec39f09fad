// The product of e4m3 by e2m1 with a scale for 32 values, and the loads of its operands from shared memory.
//
// sm_120 and sm_121 have an instruction for each. Anywhere else they are emulated: the same function of the same
// registers of the same lanes, slowly, so that the kernels can be checked on other GPUs. Fragments as in the PTX ISA,
// "Matrix Fragments for mma.m16n8k32" (8-bit types) and "Block Scaling for mma.sync"; g = lane / 4, t = lane % 4:
//
//   a[i]  row g + 8 (i % 2), columns 16 (i / 2) + 4 t to + 3 of A [16, 32], the first in the lowest byte
//   b[i]  column g, rows 16 i + 4 t to + 3 of B [32, 8]
//   d[i]  row g + 8 (i / 2), column 2 t + i % 2 of D [16, 8]
//   a_scale  row g from lanes with t = 0, row g + 8 from those with t = 1; b_scale  column g from lanes with t = 0
//
// An e2m1 takes a byte: its code is in bits 5 to 2, the others are zero.
#pragma once

#include "machine.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#if !defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && !defined(__CUDA_ARCH_SPECIFIC__)
#error "compile for sm_120f (or sm_120a, sm_121a): plain sm_120 has no block-scaled products"
#endif
#define SGL_KERNEL_BLOCK_SCALED 1
#else
#define SGL_KERNEL_BLOCK_SCALED 0
#endif

namespace sgl_kernel {

constexpr uint32_t E8M0_ONE = 127;

// Four 8x16 matrices of bytes. Matrix i has its rows at the addresses that lanes 8 i to 8 i + 7 give, 16 bytes each;
// this lane gets bytes 4 t to 4 t + 3 of row g of each.
__device__ __forceinline__ void load_bytes(uint32_t (&to)[4], const uint8_t* row) {
#ifdef __CUDA_ARCH__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
#else
  for (int i = 0; i < 4; ++i) {
    const uint8_t* mine = of_lane(row, 8 * i + lane_index() / 4) + 4 * (lane_index() % 4);
    to[i] = mine[0] | mine[1] << 8 | mine[2] << 16 | static_cast<uint32_t>(mine[3]) << 24;
  }
#endif
}

// The same of matrices of nibbles: a row is 8 bytes at a multiple of 16, the even column in the low bits. Each comes
// as a byte, with its code in bits 3 to 0.
__device__ __forceinline__ void emulated_load_nibbles(uint32_t (&to)[4], const uint8_t* row) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t* mine = of_lane(row, 8 * i + lane_index() / 4) + 2 * (lane_index() % 4);
    const uint32_t two = mine[0] | mine[1] << 8;
    to[i] = (two & 0xf) | (two & 0xf0) << 4 | (two & 0xf00) << 8 | (two & 0xf000) << 12;
  }
}

__device__ __forceinline__ void load_nibbles(uint32_t (&to)[4], const uint8_t* row) {
#if SGL_KERNEL_BLOCK_SCALED
  asm volatile("ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
#else
  emulated_load_nibbles(to, row);
#endif
}

__device__ __forceinline__ float e4m3_value(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float value = exponent ? ldexpf(8.0f + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return byte & 0x80 ? -value : value;
}

// Of a byte with the code in bits 5 to 2.
__device__ __forceinline__ float e2m1_value(uint32_t byte) {
  const int exponent = byte >> 3 & 3, mantissa = byte >> 2 & 1;
  const float value = exponent ? ldexpf(2.0f + mantissa, exponent - 2) : 0.5f * mantissa;
  return byte & 0x20 ? -value : value;
}

// 2 ** (first - 127) * 2 ** (second - 127) * sum
__device__ __forceinline__ float scaled(float sum, uint32_t first, uint32_t second) {
  return first == 255 || second == 255 ? NAN : ldexpf(sum, static_cast<int>(first + second) - 254);
}

struct Fragments {
  float d[4];
  uint32_t a[4], b[2], a_scale, b_scale;  // scales: their byte alone
};

// Not inlined: kernels have hundreds of these.
static __device__ __noinline__ Fragments emulated_multiply_add(Fragments at) {
  const int g = lane_index() / 4, t = lane_index() % 4;
  float sums[4] = {};
#pragma unroll 1
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint32_t rows[4], columns[2][2];
    for (int i = 0; i < 4; ++i) rows[i] = of_lane(at.a[i], 4 * g + quarter);
    for (int column = 0; column < 2; ++column) {
      for (int i = 0; i < 2; ++i) columns[column][i] = of_lane(at.b[i], 4 * (2 * t + column) + quarter);
    }
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        for (int shift = 0; shift < 32; shift += 8) {
          sums[i] += e4m3_value(rows[i / 2 + 2 * half] >> shift & 255) *
                     e2m1_value(columns[i % 2][half] >> shift & 255);
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = of_lane(at.a_scale, 4 * g + i / 2), column = of_lane(at.b_scale, 4 * (2 * t + i % 2));
    at.d[i] += scaled(sums[i], row, column);
  }
  return at;
}

template <int Byte>
__device__ __forceinline__ void emulated_multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                      uint32_t a_scale, uint32_t b_scale) {
  const Fragments found = emulated_multiply_add({{d[0], d[1], d[2], d[3]},
                                                 {a[0], a[1], a[2], a[3]},
                                                 {b[0], b[1]},
                                                 a_scale >> 8 * Byte & 255,
                                                 b_scale >> 8 * Byte & 255});
  for (int i = 0; i < 4; ++i) d[i] = found.d[i];
}

// d += (A * a_scale) @ (B * b_scale), where byte `Byte` of the scales' words counts.
template <int Byte>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             uint32_t a_scale, uint32_t b_scale) {
#if SGL_KERNEL_BLOCK_SCALED
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %13}, {%11}, {%12, %13};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scale), "r"(b_scale), "n"(Byte),
        "n"(0));
#else
  emulated_multiply_add<Byte>(d, a, b, a_scale, b_scale);
#endif
}

}  // namespace sgl_kernel
