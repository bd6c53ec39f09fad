// Grouped products of tokens with their experts' weights: e4m3 by e2m1, both with an e8m0 scale for 32 columns.
//
// A block of threads computes Tile::M pairs of one expert by Tile::N rows of its weights, 128 columns of depth at a
// time. Stages of x, weights and scales are on their way to shared memory while an earlier one is multiplied; each has
//
//   x        [M, 128] e4m3 and
//   weights  [N, 128] e2m1, 16 of them in 8 bytes and 8 bytes free behind them, as the load of nibbles wants it;
//            both in rows of eight chunks of 16 bytes, chunk c of row r at place c ^ (r % 8): eight rows of one chunk
//            lie in different banks
//   scales   [M], [N] words: the four e8m0 of the 128 columns
//
// With GATED the tile's weight rows are 8 of gate, 8 of up, and so on, so that a thread has the gate and the up of the
// same places, and the result is gated(gate, up). Reference: native_ops.fused_moe of the server.
#pragma once

#include "block_scaled_mma.cuh"

namespace sgl_kernel {

// Pointers to device memory. Strides in elements of what is stored (bytes here).
struct MixedArguments {
  const uint8_t* x;            // [T, depth] e4m3
  const uint8_t* x_scale;      // [T, depth / 32] e8m0
  const uint8_t* w;            // [E, rows, depth / 2] e2m1, two to a byte
  const uint8_t* w_scale;      // [E, rows, depth / 32] e8m0
  const uint16_t* bias;        // [E, rows] of out's type, or null
  uint16_t* out;               // [pairs, columns]; columns: an even number
  const int32_t* sorted_pairs; // [blocks * M]: pair numbers, as many as there are pairs where there is none
  const int32_t* block_expert; // [blocks]
  const int32_t* num_blocks;   // [1]
  int64_t x_stride, xs_stride, w_stride, ws_stride, w_expert_stride, ws_expert_stride;
  int32_t num_pairs, pairs_per_row;  // pair p reads row p / pairs_per_row of x
  int32_t columns, depth;            // depth: a multiple of 32
  int32_t group_m;                   // so many row blocks share each column of weights while it is cached
  int32_t is_half;                   // out and bias are float16; otherwise bfloat16
  float alpha, offset, limit;        // of the gate; limit 0 clamps nothing, a negative one its function's result
};

constexpr int BLOCK_K = 128;
constexpr int CHUNK = 16;   // bytes of shared memory, and columns
constexpr int CHUNKS = BLOCK_K / CHUNK;
constexpr int GROUP = 32;   // columns of a scale, and of a matrix instruction

template <int M_, int N_, int WARPS_M_, int WARPS_N_, int STAGES_>
struct Tile {
  static constexpr int M = M_, N = N_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
  static constexpr int WARP_M = M / WARPS_M, WARP_N = N / WARPS_N;
  static constexpr int X_BYTES = M * BLOCK_K, W_BYTES = N * BLOCK_K, SCALE_BYTES = 4 * (M + N);
  static constexpr int STAGE_BYTES = X_BYTES + W_BYTES + SCALE_BYTES;
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
  static constexpr int PASS = THREADS / CHUNKS;  // rows whose chunks the threads copy at once
  static constexpr int SCALES = (M + N + THREADS - 1) / THREADS;  // rows whose scales a thread copies
  static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && M % PASS == 0 && N % PASS == 0);
  static_assert(SHARED_BYTES <= 101376, "more than a block of sm_120 may have");
};

// For some tens of pairs an expert, and for more.
using ShortTile = Tile<64, 128, 2, 4, 4>;
using TallTile = Tile<128, 256, 2, 4, 2>;

__device__ __forceinline__ uint8_t* chunk_at(uint8_t* rows, int row, int chunk) {
  return rows + row * BLOCK_K + ((chunk ^ (row & 7)) * CHUNK);
}

__device__ __forceinline__ float gated(float gate, float up, const MixedArguments& args) {
  const float limit = fabsf(args.limit);
  if (limit > 0.0f) up = fminf(fmaxf(up, -limit), limit);
  if (args.limit > 0.0f) gate = fminf(gate, limit);
  float result = gate / (1.0f + expf(-args.alpha * gate));
  if (args.limit < 0.0f) result = fminf(result, limit);
  return (up + args.offset) * result;
}

__device__ __forceinline__ float bias_at(const MixedArguments& args, int64_t at) {
  if (args.bias == nullptr) return 0.0f;
  return args.is_half ? value_of_half(args.bias[at]) : value_of_bfloat16(args.bias[at]);
}

// To out's type and back.
__device__ __forceinline__ float rounded(const MixedArguments& args, float value) {
  return args.is_half ? value_of_half(half_of(value)) : value_of_bfloat16(bfloat16_of(value));
}

// Two neighbours, at an even place.
__device__ __forceinline__ void store_two(const MixedArguments& args, int64_t at, float first, float second) {
  const uint32_t low = args.is_half ? half_of(first) : bfloat16_of(first);
  const uint32_t high = args.is_half ? half_of(second) : bfloat16_of(second);
  *reinterpret_cast<uint32_t*>(args.out + at) = low | high << 16;
}

// Which pairs and which rows of weights a block of threads multiplies.
template <class T, bool GATED>
struct Place {
  static constexpr int COLUMNS = GATED ? T::N / 2 : T::N;  // of the result

  int block, column, expert;  // column: the first one
  bool there;

  __device__ __forceinline__ Place(const MixedArguments& args, int program) {
    const int across = (args.columns + COLUMNS - 1) / COLUMNS, used = *args.num_blocks;
    there = program < used * across;
    if (!there) return;
    const int per_group = args.group_m * across, first = program / per_group * args.group_m;
    const int rows = min(used - first, args.group_m), rest = program % per_group;
    block = first + rest % rows;
    column = rest / rows * COLUMNS;
    expert = args.block_expert[block];
  }

  // Of row m of the tile: its pair, or -1.
  __device__ __forceinline__ int pair(const MixedArguments& args, int m) const {
    const int found = args.sorted_pairs[int64_t(block) * T::M + m];
    return found < args.num_pairs ? found : -1;
  }

  // Of weight row n of the tile: its column of the result, which may be past the end.
  __device__ __forceinline__ int column_of(int n) const { return column + (GATED ? n / 16 * 8 + n % 8 : n); }

  // And its row in the expert's weights, or -1.
  __device__ __forceinline__ int weight_row(const MixedArguments& args, int n) const {
    const int found = column_of(n);
    if (found >= args.columns) return -1;
    return GATED && n / 8 % 2 ? args.columns + found : found;
  }
};

// What a thread copies: one chunk of every PASS-th row, and the scales of SCALES rows.
template <class T, bool GATED>
struct Copies {
  // Rows of the tile that are PASS apart are so many rows of the weights apart.
  static constexpr int W_STEP = GATED ? T::PASS / 2 : T::PASS;
  static_assert(T::PASS % 16 == 0);

  const uint8_t* x;                       // its chunk of row 0
  const uint8_t* w;                       // its chunk of its first row
  const uint8_t* scales[T::SCALES] = {};  // null: there are none
  int64_t x_stride, w_step;               // of a row, and of W_STEP rows
  int x_row[T::M / T::PASS];              // negative: not there
  int w_rows;                             // so many of its rows are inside
  int chunk, row, depth;

  __device__ __forceinline__ Copies(const MixedArguments& args, const Place<T, GATED>& place)
      : x_stride(args.x_stride),
        w_step(args.w_stride * W_STEP),
        chunk(thread_index() % CHUNKS),
        row(thread_index() / CHUNKS),
        depth(args.depth) {
    x = args.x + chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < T::M / T::PASS; ++i) {
      const int pair = place.pair(args, row + i * T::PASS);
      x_row[i] = pair < 0 ? -1 : pair / args.pairs_per_row;
    }
    const int first = place.weight_row(args, row), left = args.columns - place.column_of(row);
    w_rows = first < 0 ? 0 : (left + W_STEP - 1) / W_STEP;
    w = args.w + place.expert * args.w_expert_stride + max(first, 0) * args.w_stride + chunk * (CHUNK / 2);
#pragma unroll
    for (int i = 0; i < T::SCALES; ++i) {
      const int at = thread_index() + i * T::THREADS;
      if (at < T::M) {
        const int pair = place.pair(args, at);
        if (pair >= 0) scales[i] = args.x_scale + int64_t(pair / args.pairs_per_row) * args.xs_stride;
      } else if (at < T::M + T::N) {
        const int found = place.weight_row(args, at - T::M);
        if (found >= 0) scales[i] = args.w_scale + place.expert * args.ws_expert_stride + found * args.ws_stride;
      }
    }
  }

  // x and weights of step `step` to a stage; zeros past the end, where nothing is read.
  __device__ __forceinline__ void start(uint8_t* stage, int step) const {
    const bool inside = step * BLOCK_K + chunk * CHUNK < depth;
    const uint8_t* x_at = x + step * BLOCK_K;
    const uint8_t* w_at = w + step * (BLOCK_K / 2);
#pragma unroll
    for (int i = 0; i < T::M / T::PASS; ++i) {
      const bool there = inside && x_row[i] >= 0;
      copy_16(chunk_at(stage, row + i * T::PASS, chunk), there ? x_at + x_row[i] * x_stride : x, there);
    }
#pragma unroll
    for (int i = 0; i < T::N / T::PASS; ++i) {
      const bool there = inside && i < w_rows;
      copy_8(chunk_at(stage + T::X_BYTES, row + i * T::PASS, chunk), there ? w_at + i * w_step : w, there);
    }
  }

  // The four scales of a step of each row, bytes of a word; ones where there are none. Rows need not be aligned.
  __device__ __forceinline__ void load_scales(uint32_t (&words)[T::SCALES], int step) const {
#pragma unroll
    for (int row = 0; row < T::SCALES; ++row) {
      words[row] = 0x01010101u * E8M0_ONE;
      if (scales[row] == nullptr) continue;
#pragma unroll
      for (int i = 0; i < BLOCK_K / GROUP; ++i) {
        const int group = step * (BLOCK_K / GROUP) + i;
        const uint32_t byte = group * GROUP < depth ? scales[row][group] : E8M0_ONE;
        words[row] = (words[row] & ~(255u << 8 * i)) | byte << 8 * i;
      }
    }
  }

  __device__ __forceinline__ void store_scales(uint8_t* stage, const uint32_t (&words)[T::SCALES]) const {
#pragma unroll
    for (int row = 0; row < T::SCALES; ++row) {
      const int at = thread_index() + row * T::THREADS;
      if (at < T::M + T::N) reinterpret_cast<uint32_t*>(stage + T::X_BYTES + T::W_BYTES)[at] = words[row];
    }
  }
};

// A warp's part of the sums: WARP_M by WARP_N, from (m, n) of the tile on.
template <class T>
struct Sums {
  static constexpr int ROWS = T::WARP_M / 16, COLUMNS = T::WARP_N / 8;

  float d[ROWS][COLUMNS][4] = {};
  int m, n;

  __device__ __forceinline__ Sums() {
    const int warp = thread_index() / 32;
    m = warp / T::WARPS_N * T::WARP_M;
    n = warp % T::WARPS_N * T::WARP_N;
  }

  __device__ __forceinline__ void add(uint8_t* stage) {
    const int g = lane_index() / 4, second = lane_index() % 2;
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(stage + T::X_BYTES + T::W_BYTES);
    uint32_t x_scale[ROWS], w_scale[COLUMNS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) x_scale[i] = scales[m + 16 * i + g + 8 * second];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) w_scale[j] = scales[T::M + n + 8 * j + g];
    add_group<0>(stage, x_scale, w_scale);
    add_group<1>(stage, x_scale, w_scale);
    add_group<2>(stage, x_scale, w_scale);
    add_group<3>(stage, x_scale, w_scale);
  }

  template <int Group>
  __device__ __forceinline__ void add_group(uint8_t* stage, const uint32_t (&x_scale)[ROWS],
                                            const uint32_t (&w_scale)[COLUMNS]) {
    const int matrix = lane_index() / 8, row = lane_index() % 8;
    uint32_t x[ROWS][4];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      load_bytes(x[i], chunk_at(stage, m + 16 * i + matrix % 2 * 8 + row, 2 * Group + matrix / 2));
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 2) {
      uint32_t w[4];
      load_nibbles(w, chunk_at(stage + T::X_BYTES, n + 8 * j + matrix / 2 * 8 + row, 2 * Group + matrix % 2));
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t codes[2] = {w[2 * k] << 2, w[2 * k + 1] << 2};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) multiply_add<Group>(d[i][j + k], x[i], codes, x_scale[i], w_scale[j + k]);
      }
    }
  }

  // d's rows and columns as in block_scaled_mma.cuh.
  template <bool GATED>
  __device__ __forceinline__ void store(const MixedArguments& args, const Place<T, GATED>& place) const {
    constexpr int WIDTH = GATED ? 2 : 1;
    const int g = lane_index() / 4, t = lane_index() % 4;
    const int64_t biases = int64_t(place.expert) * args.columns * WIDTH;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pair = place.pair(args, m + 16 * i + 8 * half + g);
        if (pair < 0) continue;
#pragma unroll
        for (int j = 0; j < COLUMNS; j += WIDTH) {
          const int column = place.column_of(n + 8 * j + 2 * t);
          if (column >= args.columns) continue;
          float values[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            values[k] = d[i][j][2 * half + k] + bias_at(args, biases + column + k);
            if constexpr (GATED) {
              const float up = d[i][j + 1][2 * half + k] + bias_at(args, biases + args.columns + column + k);
              values[k] = gated(rounded(args, values[k]), rounded(args, up), args);  // as separate steps would round
            }
          }
          store_two(args, int64_t(pair) * args.columns + column, values[0], values[1]);
        }
      }
    }
  }
};

template <class T, bool GATED>
__device__ __forceinline__ void mixed_product(const MixedArguments& args, uint8_t* shared, int program) {
  const Place<T, GATED> place(args, program);
  if (!place.there) return;
  const Copies<T, GATED> copies(args, place);
  const int steps = (args.depth + BLOCK_K - 1) / BLOCK_K;
#pragma unroll
  for (int step = 0; step < T::STAGES - 1; ++step) {
    if (step < steps) {
      uint32_t scales[T::SCALES];
      copies.load_scales(scales, step);
      copies.start(shared + step * T::STAGE_BYTES, step);
      copies.store_scales(shared + step * T::STAGE_BYTES, scales);
    }
    commit_copies();
  }
  Sums<T> sums;
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    wait_copies<T::STAGES - 2>();
    block_barrier();  // this step's stage is there for all, and all have left the one before it
    const int next = step + T::STAGES - 1;
    uint8_t* next_stage = shared + (stage == 0 ? T::STAGES - 1 : stage - 1) * T::STAGE_BYTES;
    uint32_t next_scales[T::SCALES] = {};
    if (next < steps) {
      copies.start(next_stage, next);
      copies.load_scales(next_scales, next);
    }
    commit_copies();
    sums.add(shared + stage * T::STAGE_BYTES);
    if (next < steps) copies.store_scales(next_stage, next_scales);
    stage = stage == T::STAGES - 1 ? 0 : stage + 1;
  }
  // Read again: kept, it would take registers from the loop.
  sums.template store<GATED>(args, Place<T, GATED>(args, program));
}

}  // namespace sgl_kernel
