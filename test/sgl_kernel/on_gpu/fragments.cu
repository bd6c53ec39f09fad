// One warp, on a GPU: the matrix instruction and the load of nibbles beside their emulation.
#include "block_scaled_mma.cuh"

#include <cuda_runtime.h>

using namespace sgl_kernel;

namespace {

struct Operands {
  const uint32_t *a, *b, *a_scale, *b_scale;  // [32, 4], [32, 2], [32], [32]
  const uint8_t* rows;                        // [32, 16]
  float *here, *emulated, *plain;             // [32, 4], zeros before
  uint32_t *nibbles, *emulated_nibbles;       // [32, 4]
};

// Of e2m1 in bits 5 to 2: the e4m3 with the same bits in its exponent and mantissa, 64 times less.
__device__ uint32_t e4m3_of(uint32_t codes) { return (codes & 0x20202020) << 2 | (codes & 0x1c1c1c1c); }

__global__ void compare(Operands at) {
  __shared__ __align__(16) uint8_t rows[32 * 16];
  const int lane = lane_index();
  for (int i = 0; i < 16; ++i) rows[16 * lane + i] = at.rows[16 * lane + i];
  __syncwarp();
  uint32_t a[4], b[2], found[4], wanted[4];
  float here[4] = {}, emulated[4] = {};
  for (int i = 0; i < 4; ++i) a[i] = at.a[4 * lane + i];
  for (int i = 0; i < 2; ++i) b[i] = at.b[2 * lane + i];
  multiply_add<2>(here, a, b, at.a_scale[lane], at.b_scale[lane]);
  emulated_multiply_add<2>(emulated, a, b, at.a_scale[lane], at.b_scale[lane]);
  load_nibbles(found, rows + 16 * lane);
  emulated_load_nibbles(wanted, rows + 16 * lane);
  // Without scales: the same fragments, and an instruction that sm_89 and later have.
  float plain[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(plain[0]), "+f"(plain[1]), "+f"(plain[2]), "+f"(plain[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(e4m3_of(b[0])), "r"(e4m3_of(b[1])));
  for (int i = 0; i < 4; ++i) {
    at.here[4 * lane + i] = here[i];
    at.emulated[4 * lane + i] = emulated[i];
    at.plain[4 * lane + i] = 64.0f * plain[i];
    at.nibbles[4 * lane + i] = found[i];
    at.emulated_nibbles[4 * lane + i] = wanted[i];
  }
}

}  // namespace

extern "C" int compare_fragments(const uint32_t* a, const uint32_t* b, const uint32_t* a_scale, const uint32_t* b_scale,
                                 const uint8_t* rows, float* here, float* emulated, float* plain, uint32_t* nibbles,
                                 uint32_t* emulated_nibbles) {
  compare<<<1, 32>>>({a, b, a_scale, b_scale, rows, here, emulated, plain, nibbles, emulated_nibbles});
  return cudaDeviceSynchronize();
}
