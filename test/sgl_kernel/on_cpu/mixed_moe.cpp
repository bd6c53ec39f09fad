// The kernels of sgl-kernel/csrc/mixed_moe.cuh, and the emulated instructions alone, for a CPU.
#define SGL_KERNEL_ON_CPU
#include "mixed_moe.cuh"

using namespace sgl_kernel;

namespace {

constexpr uint8_t POISON = 0xff;  // an e4m3 and an e8m0 that are not numbers

template <class T, bool GATED>
void run(const MixedArguments& args, int max_blocks) {
  const int across = (args.columns + Place<T, GATED>::COLUMNS - 1) / Place<T, GATED>::COLUMNS;
  for (int program = 0; program < max_blocks * across; ++program) {
    std::vector<uint8_t> memory(T::SHARED_BYTES + 128, POISON);
    uint8_t* shared = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
    Block(T::THREADS, [&] { mixed_product<T, GATED>(args, shared, program); }).run();
  }
}

template <bool GATED>
int run_with(const MixedArguments& args, int block_m, int max_blocks) {
  if (block_m == TallTile::M) run<TallTile, GATED>(args, max_blocks);
  if (block_m == ShortTile::M) run<ShortTile, GATED>(args, max_blocks);
  return block_m == TallTile::M || block_m == ShortTile::M ? 0 : 1;
}

}  // namespace

extern "C" {

int sgl_mixed_moe_gate_up(const MixedArguments* args, int block_m, int max_blocks, void*) {
  return run_with<true>(*args, block_m, max_blocks);
}

int sgl_mixed_moe_down(const MixedArguments* args, int block_m, int max_blocks, void*) {
  return run_with<false>(*args, block_m, max_blocks);
}

int sgl_mixed_moe_arguments_size() { return sizeof(MixedArguments); }

const char* sgl_error_string(int) { return "no such tile"; }

// One warp: d [32, 4] += of a [32, 4], b [32, 2], scales [32], lane by lane.
void one_multiply_add(const uint32_t* a, const uint32_t* b, const uint32_t* a_scale, const uint32_t* b_scale, float* d,
                      int byte) {
  Block(WARP, [&] {
    const int lane = lane_index();
    const uint32_t mine[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
    const uint32_t codes[2] = {b[2 * lane], b[2 * lane + 1]};
    float sums[4] = {d[4 * lane], d[4 * lane + 1], d[4 * lane + 2], d[4 * lane + 3]};
    if (byte == 0) multiply_add<0>(sums, mine, codes, a_scale[lane], b_scale[lane]);
    if (byte == 3) multiply_add<3>(sums, mine, codes, a_scale[lane], b_scale[lane]);
    for (int i = 0; i < 4; ++i) d[4 * lane + i] = sums[i];
  }).run();
}

// One warp's load from rows [32, 16] of bytes: lane i gives the address of row i. to [32, 4].
void one_load(const uint8_t* rows, uint32_t* to, int nibbles) {
  Block(WARP, [&] {
    const int lane = lane_index();
    uint32_t words[4];
    nibbles ? load_nibbles(words, rows + 16 * lane) : load_bytes(words, rows + 16 * lane);
    for (int i = 0; i < 4; ++i) to[4 * lane + i] = words[i];
  }).run();
}
}
