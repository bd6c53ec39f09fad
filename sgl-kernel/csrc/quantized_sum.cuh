// The two shots of all_reduce.cuh with half of the bytes: values of 16 bits travel as e4m3 with a scale for each 32.
//
// python/sglang/srt/distributed/quantized_sums.py says what the numbers are, and is the reference, bit for bit: every rank
// encodes its values, also those that it sums itself; summands are decoded and added in fp32 in the order of the ranks;
// the sum is encoded once, and all ranks decode the same bytes.
//
// A row is `row_vectors` vectors of 16 e4m3 each, which are twice as many of the message's, and behind them a byte of
// scale for every two. A thread makes one vector of a row. It looks at the other half of its group as well, so that no
// threads exchange anything: what it reads twice comes from a cache. Rows, blocks, flags and waits are those of two shots.
#pragma once

#include "all_reduce.cuh"

namespace sgl_kernel {

constexpr int CODES = 16;  // e4m3 in a vector: half a group
constexpr uint32_t NO_NUMBERS = 255;  // the scale of a group that is not finite
constexpr int IN_FLIGHT = 4;  // ranks whose summands are read at once: those of eight take more registers than there are

// Where rows lie in a half of the data: those of this rank's share from every rank, then the sums of all shares.
struct EncodedRows {
  const AllReduceArguments& args;
  int64_t vectors, rows, share;
  int stride;  // vectors of a row with its scales

  __device__ explicit EncodedRows(const AllReduceArguments& arguments)
      : args(arguments),
        vectors(arguments.vectors / 2),
        rows(encoded_rows(arguments)),
        share((rows + arguments.ranks - 1) / arguments.ranks),
        stride(encoded_stride(arguments.row_vectors)) {}

  // Vectors that row `row` has.
  __device__ int width(int64_t row) const {
    const int64_t rest = vectors - row * args.row_vectors;
    return rest < args.row_vectors ? static_cast<int>(rest) : args.row_vectors;
  }
  __device__ Vector* summand(const Call& call, int owner, int from, int64_t r) const {
    return call.places.data(owner) + (from * share + r) * stride;
  }
  __device__ Vector* total(const Call& call, int where, int64_t row) const {
    return call.places.data(where) + (args.ranks * share + row) * stride;
  }
};

__device__ __forceinline__ uint8_t* scale_of(const AllReduceArguments& args, Vector* row, int i) {
  return reinterpret_cast<uint8_t*>(row + args.row_vectors) + i / 2;
}

// The least power of two, as its exponent plus 127, with which no value is larger than 448. `bits`: of the largest
// magnitude; those of what is no number are larger than any number's.
__device__ __forceinline__ uint32_t scale_for(uint32_t bits) {
  const uint32_t exponent = bits >> 23;
  if (exponent == 255) return NO_NUMBERS;
  const uint32_t scale = exponent + ((bits & 0x7fffff) > 0x600000);  // 448 is 1.75 times 2**8
  return scale < 9 ? 1 : scale - 8;
}

__device__ __forceinline__ Vector encode(const float* values, uint32_t scale) {
  const float inverse = scale == NO_NUMBERS ? 0.0f : float_of_bits((254 - scale) << 23);
  Vector codes;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float* four = values + 4 * w;
    codes.word[w] = e4m3_pair_of(four[0] * inverse, four[1] * inverse) |
                    static_cast<uint32_t>(e4m3_pair_of(four[2] * inverse, four[3] * inverse)) << 16;
  }
  return codes;
}

__device__ __forceinline__ float power_of(uint32_t scale) {
  return float_of_bits(scale == NO_NUMBERS ? 0x7fc00000u : scale << 23);
}

// values[CODES] += the decoded ones.
__device__ __forceinline__ void add_decoded(float* values, const Vector& codes, float power) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float first, second;
      values_of_e4m3_pair(static_cast<uint16_t>(codes.word[w] >> (16 * half)), first, second);
      values[4 * w + 2 * half] += first * power;
      values[4 * w + 2 * half + 1] += second * power;
    }
  }
}

template <int COUNT>
__device__ __forceinline__ uint32_t largest_bits(const float* values) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const uint32_t bits = bits_of_float(values[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Vector `i` of row `row` of this rank's values -> its codes, and its group's scale.
template <int DTYPE>
__device__ __forceinline__ Vector encoded_input(const AllReduceArguments& args, int64_t row, int i, uint32_t& scale) {
  const auto* from = static_cast<const Vector*>(args.input) + 2 * (row * args.row_vectors + i);
  const Vector halves[2] = {load_vector(from), load_vector(from + 1)};
  const auto* other = i % 2 ? from - 2 : from + 2;
  const Vector others[2] = {load_vector(other), load_vector(other + 1)};
  float values[CODES], group[CODES];
#pragma unroll
  for (int j = 0; j < CODES; ++j) {
    values[j] = Values<DTYPE>::get(halves[j / 8], j % 8);
    group[j] = Values<DTYPE>::get(others[j / 8], j % 8);
  }
  const uint32_t largest[2] = {largest_bits<CODES>(values), largest_bits<CODES>(group)};
  scale = scale_for(largest[0] > largest[1] ? largest[0] : largest[1]);
  return encode(values, scale);
}

// The sum over the ranks of vector `i` of row `r` of this rank's share -> its codes, and its group's scale.
__device__ __forceinline__ Vector encoded_sum(
    const EncodedRows& places, const Call& call, int64_t r, int i, bool valid, uint32_t& scale) {
  const AllReduceArguments& args = places.args;
  float values[2][CODES] = {};  // this vector's, and the other one's of its group
#pragma unroll 1
  for (int first = 0; first < args.ranks; first += IN_FLIGHT) {
    Vector codes[IN_FLIGHT][2];
    uint32_t scales[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      if (first + j >= args.ranks) continue;
      Vector* row = places.summand(call, args.rank, first + j, r);
      codes[j][0] = load_vector(row + i);
      codes[j][1] = load_vector(row + (i ^ 1));
      scales[j] = load_byte(scale_of(args, row, i));
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      if (first + j >= args.ranks) continue;
      const float power = power_of(scales[j]);
      add_decoded(values[0], codes[j][0], power);
      add_decoded(values[1], codes[j][1], power);
    }
  }
  const uint32_t largest[2] = {largest_bits<CODES>(values[0]), largest_bits<CODES>(values[1])};
  scale = valid ? scale_for(largest[0] > largest[1] ? largest[0] : largest[1]) : NO_NUMBERS;
  return encode(values[0], scale);
}

template <int DTYPE>
__device__ __forceinline__ void two_shot_e4m3(const AllReduceArguments& args) {
  const Call call(args);
  const EncodedRows places(args);
  const int64_t share = places.share;
  // A block's rows are those of its number in every rank's share.
  for (int steps = 0; steps < args.ranks; ++steps) {
    const int owner = steps + 1 < args.ranks ? peer_after(args, steps + 1) : args.rank;
    for (int64_t r = block_index(); r < share && owner * share + r < places.rows; r += block_count()) {
      const int64_t row = owner * share + r;
      Vector* to = places.summand(call, owner, args.rank, r);
      for (int i = thread_index(); i < places.width(row); i += block_threads()) {
        uint32_t scale;
        store_vector(to + i, encoded_input<DTYPE>(args, row, i, scale));
        if (i % 2 == 0) store_byte(scale_of(args, to, i), static_cast<uint8_t>(scale));
      }
    }
  }
  signal(call, 0);
  bool valid = wait(call, 0, TWO_SHOT_E4M3);
  for (int64_t r = block_index(); r < share && args.rank * share + r < places.rows; r += block_count()) {
    const int64_t row = args.rank * share + r;
    for (int i = thread_index(); i < places.width(row); i += block_threads()) {
      uint32_t scale;
      const Vector codes = encoded_sum(places, call, r, i, valid, scale);
      for (int steps = 0; steps < args.ranks; ++steps) {
        Vector* to = places.total(call, peer_after(args, steps), row);
        store_vector(to + i, codes);
        if (i % 2 == 0) store_byte(scale_of(args, to, i), static_cast<uint8_t>(scale));
      }
    }
  }
  signal(call, 1);
  valid = wait(call, 1, TWO_SHOT_E4M3) && valid;
  for (int owner = 0; owner < args.ranks; ++owner) {
    for (int64_t r = block_index(); r < share && owner * share + r < places.rows; r += block_count()) {
      const int64_t row = owner * share + r;
      Vector* total = places.total(call, args.rank, row);
      auto* output = static_cast<Vector*>(args.output) + 2 * row * args.row_vectors;
      for (int i = thread_index(); i < places.width(row); i += block_threads()) {
        float values[CODES] = {};
        const uint32_t scale = valid ? load_byte(scale_of(args, total, i)) : NO_NUMBERS;
        add_decoded(values, load_vector(total + i), power_of(scale));
        store_vector(output + 2 * i, Values<DTYPE>::rounded(values));
        store_vector(output + 2 * i + 1, Values<DTYPE>::rounded(values + 8));
      }
    }
  }
  call.end();
}

}  // namespace sgl_kernel
