// Sums over up to 8 GPUs, by writes into one another's memory. peer_memory.cuh says which order of writes they rely on.
//
// Each rank has a workspace that all others can write. A call has a number, the epoch, which the workspaces count on the
// device, so that a replayed graph goes on counting. Data lie in one of two halves by the epoch's last bit. That is
// enough: a rank leaves call k + 1 when it has heard of every peer in call k + 1, so every peer has left call k, and what
// call k + 2 overwrites is no longer read. It takes calls that run one after the other: one stream, and no launch that
// reads or writes anything before the one ahead of it has ended; one that begins earlier waits first. (A packed word says
// that much too without a fence: it was sent by a later launch, and a launch has ended only when everything that it reads
// has come.)
//
//   packed    one shot: every word of 32 bits travels to every peer beside 32 bits of epoch. No fence, no separate flag:
//             one way across the link. Twice the bytes; for small messages.
//   one shot  values travel to every peer, then a flag for each block.
//   two shot  values travel to the rank that sums them (rows are dealt out to the ranks), and sums travel to every peer.
//   two shot e4m3  the same in eight bits a value, for messages whose bytes are what takes the time (quantized_sum.cuh).
//
// But for the last one, sums are taken in fp32 in the order of the ranks and rounded once, by every rank or by one for all: every rank has the
// same bits, whichever way was taken.
//
// A message is rows of `row_vectors` vectors of 16 bytes. A block owns rows, the same ones on every rank, and waits for
// the same block of its peers only. Behind the sum a row may go on: its residual is added and it is normed.
//
// Waits end at a deadline. Then the workspace is marked, later calls do not wait at all, the host finds who was missing,
// and the results are not numbers: nobody takes them for sums.
#pragma once

#include "peer_memory.cuh"

namespace sgl_kernel {

constexpr int MAX_RANKS = 8;
constexpr int MAX_BLOCKS = 64;
constexpr int ROW_VECTORS = 2048;  // most of a fused row: 16,384 values of 16 bits
constexpr int PACKED_VECTORS = 8192;  // most of a packed message: 128 KiB
constexpr int PHASES = 2;

enum Algorithm : int32_t { PACKED = 0, ONE_SHOT = 1, TWO_SHOT = 2, TWO_SHOT_E4M3 = 3 };
enum DType : int32_t { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };

// What a host finds when a wait has ended at its deadline.
struct Stall {
  uint32_t missing;  // 1 + the rank that was waited for; 0: nothing has happened
  uint32_t block, epoch, algorithm;
};

// At the start of a workspace. Zero when it is made, before any rank uses it.
struct Control {
  uint32_t epochs[MAX_BLOCKS];  // calls so far, a copy for each block
  uint32_t stalled;
  uint32_t unused[63];
  uint32_t flags[2][PHASES][MAX_BLOCKS][MAX_RANKS];  // half, phase, block, from whom: the epoch of what is there
};

struct AllReduceArguments {
  const void* input;            // [vectors]
  void* output;                 // [vectors]: the sums, or the normed rows; may be the input
  void* workspaces[MAX_RANKS];  // of each rank, as this rank addresses it
  const void* residual;         // [vectors] or null; fused rows only, like the next three
  void* total;                  // [vectors]: sum + residual; may be the residual
  const void* weight;           // [values of a row], fp32 or of the values' type
  Stall* stall;                 // memory of the host
  int64_t vectors;              // of 16 bytes
  int64_t data_vectors;         // of one half of the data: what the workspaces were made for
  int64_t deadline;             // nanoseconds that a wait may take
  int32_t row_vectors;
  int32_t rank, ranks;
  int32_t blocks;
  int32_t dtype;
  int32_t weight_is_float;
  float eps;
};

// --- the workspace ---------------------------------------------------------------------------------------------------

struct Places {
  const AllReduceArguments& args;
  uint32_t half;

  __device__ char* base(int owner) const { return static_cast<char*>(args.workspaces[owner]); }
  __device__ Control* control(int owner) const { return reinterpret_cast<Control*>(base(owner)); }

  __device__ uint32_t* flag(int owner, int phase, int from) const {
    return &control(owner)->flags[half][phase][block_index()][from];
  }

  // Two `Words` a vector, of a message from one rank.
  __device__ Words* packed(int owner, int from) const {
    return reinterpret_cast<Words*>(base(owner) + sizeof(Control)) +
           2 * PACKED_VECTORS * (half * MAX_RANKS + from);
  }

  __device__ Vector* data(int owner) const {
    return reinterpret_cast<Vector*>(base(owner) + sizeof(Control)) + 4 * PACKED_VECTORS * MAX_RANKS +
           half * args.data_vectors;
  }
};

inline int64_t workspace_bytes(int64_t data_vectors) {
  return sizeof(Control) + 16 * (int64_t(4) * PACKED_VECTORS * MAX_RANKS + 2 * data_vectors);
}

inline int64_t rows_of(const AllReduceArguments& args) {
  return (args.vectors + args.row_vectors - 1) / args.row_vectors;
}

// Rows of a message whose values are e4m3 on their way, `row_vectors` of 16 each: twice as many values as before.
inline __host__ __device__ int64_t encoded_rows(const AllReduceArguments& args) {
  return (args.vectors / 2 + args.row_vectors - 1) / args.row_vectors;
}

// Vectors of such a row with its scales, a byte for every two.
inline __host__ __device__ int encoded_stride(int row_vectors) { return row_vectors + (row_vectors / 2 + 15) / 16; }

// Vectors of a half that a message takes.
inline int64_t data_vectors(const AllReduceArguments& args, int algorithm) {
  if (algorithm == ONE_SHOT) return args.vectors * args.ranks;
  if (algorithm == PACKED) return 0;
  if (algorithm == TWO_SHOT_E4M3) {
    return 2 * ((encoded_rows(args) + args.ranks - 1) / args.ranks) * args.ranks * encoded_stride(args.row_vectors);
  }
  return 2 * ((rows_of(args) + args.ranks - 1) / args.ranks) * args.ranks * args.row_vectors;
}

// --- values ----------------------------------------------------------------------------------------------------------

template <int DTYPE>
struct Values;

template <>
struct Values<FLOAT32> {
  static constexpr int COUNT = 4;
  static __device__ __forceinline__ float get(const Vector& vector, int i) { return float_of_bits(vector.word[i]); }
  static __device__ __forceinline__ Vector rounded(const float* values) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) vector.word[i] = bits_of_float(values[i]);
    return vector;
  }
};

template <int DTYPE>
struct Values {
  static constexpr int COUNT = 8;
  static __device__ __forceinline__ float get(const Vector& vector, int i) {
    const uint16_t bits = static_cast<uint16_t>(vector.word[i / 2] >> (i % 2 * 16));
    return DTYPE == BFLOAT16 ? value_of_bfloat16(bits) : value_of_half(bits);
  }
  static __device__ __forceinline__ uint32_t bits(float value) {
    return DTYPE == BFLOAT16 ? bfloat16_of(value) : half_of(value);
  }
  static __device__ __forceinline__ Vector rounded(const float* values) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) vector.word[i] = bits(values[2 * i]) | bits(values[2 * i + 1]) << 16;
    return vector;
  }
};

template <int DTYPE>
struct Sum {
  float values[Values<DTYPE>::COUNT] = {};

  __device__ __forceinline__ void add(const Vector& vector) {
#pragma unroll
    for (int i = 0; i < Values<DTYPE>::COUNT; ++i) values[i] += Values<DTYPE>::get(vector, i);
  }
  __device__ __forceinline__ Vector rounded(bool valid) {
    if (!valid) {
#pragma unroll
      for (int i = 0; i < Values<DTYPE>::COUNT; ++i) values[i] = float_of_bits(0x7fc00000u);
    }
    return Values<DTYPE>::rounded(values);
  }
};

// --- the call's number, and waiting ----------------------------------------------------------------------------------

// Zero is what new memory holds, so that no call has it; the last bit goes on alternating.
__device__ __forceinline__ uint32_t next_epoch(uint32_t epoch) { return epoch + 1 == 0 ? 2 : epoch + 1; }

struct Call {
  const AllReduceArguments& args;
  uint32_t epoch;
  Places places;

  __device__ explicit Call(const AllReduceArguments& arguments)
      : args(arguments),
        epoch(next_epoch(control()->epochs[block_index()])),
        places{arguments, epoch & 1} {}

  __device__ Control* control() const { return static_cast<Control*>(args.workspaces[args.rank]); }

  // Every copy is counted by one block, and a block counts its own: no other reads it.
  __device__ void end() const {
    block_barrier();
    for (int i = block_index() + thread_index() * block_count(); i < MAX_BLOCKS; i += block_threads() * block_count()) {
      control()->epochs[i] = epoch;
    }
  }

  __device__ void report(int missing, int algorithm) const {
    store_relaxed(&control()->stalled, 1);
    store_relaxed(&args.stall->block, block_index());
    store_relaxed(&args.stall->epoch, epoch);
    store_relaxed(&args.stall->algorithm, algorithm);
    store_release(&args.stall->missing, missing + 1);
  }
};

// Ends waits. Looks once in 256 polls, at the clock and for a wait of another thread, or of an earlier call, that has
// ended so.
struct Patience {
  const Call& call;
  int algorithm;
  uint64_t begun = 0;
  uint32_t polls = 0;

  __device__ __forceinline__ bool ended(int missing) {
    pause_polling();
    if (++polls % 256 != 0) return false;
    if (load_relaxed(&call.control()->stalled) != 0) return true;
    const uint64_t now = nanoseconds();
    if (begun == 0) begun = now;
    if (now - begun < static_cast<uint64_t>(call.args.deadline)) return false;
    call.report(missing, algorithm);
    return true;
  }
};

// What this block has written to the peers is there when they see the flag.
__device__ __forceinline__ void signal(const Call& call, int phase) {
  block_barrier();
  const int peer = thread_index();
  if (peer < call.args.ranks && peer != call.args.rank) {
    store_release(call.places.flag(peer, phase, call.args.rank), call.epoch);
  }
}

// Until the same block of every peer has signalled. False if one has not by the deadline.
__device__ __forceinline__ bool wait(const Call& call, int phase, int algorithm) {
  const int peer = thread_index();
  bool there = true;
  if (peer < call.args.ranks && peer != call.args.rank) {
    const uint32_t* flag = call.places.flag(call.args.rank, phase, peer);
    Patience patience{call, algorithm};
    while (there && load_acquire(flag) != call.epoch) there = !patience.ended(peer);
  }
  return block_all(there);
}

// --- rows ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t row_end(const AllReduceArguments& args, int64_t row) {
  const int64_t end = (row + 1) * args.row_vectors;
  return end < args.vectors ? end : args.vectors;
}

__device__ __forceinline__ int peer_after(const AllReduceArguments& args, int steps) {
  const int peer = args.rank + steps;
  return peer < args.ranks ? peer : peer - args.ranks;
}

// The values of weights that belong to vector `v` of a row.
template <int DTYPE>
__device__ __forceinline__ void scale_by_weight(float* values, const AllReduceArguments& args, int v) {
  constexpr int COUNT = Values<DTYPE>::COUNT;
  if (DTYPE != FLOAT32 && args.weight_is_float) {
    const auto* weight = static_cast<const Vector*>(args.weight) + 2 * v;
    const Vector low = load_vector(weight), high = load_vector(weight + 1);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] *= float_of_bits(i < 4 ? low.word[i] : high.word[i - 4]);
    return;
  }
  const Vector weight = load_vector(static_cast<const Vector*>(args.weight) + v);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] *= Values<DTYPE>::get(weight, i);
}

// Writes a row's results. `rounded_sum(i)` is vector i of the message, summed and rounded.
template <int DTYPE, bool FUSED, class RoundedSum>
__device__ __forceinline__ void finish_row(const AllReduceArguments& args, int64_t row, RoundedSum rounded_sum) {
  auto* output = static_cast<Vector*>(args.output);
  const int64_t begin = row * args.row_vectors, end = row_end(args, row);
  if constexpr (!FUSED) {
    for (int64_t i = begin + thread_index(); i < end; i += block_threads()) store_vector(output + i, rounded_sum(i));
    return;
  }
  // The norm sees the total as the next layer will read it.
  constexpr int COUNT = Values<DTYPE>::COUNT;
  Vector* totals = row_memory<ROW_VECTORS>();
  float squares = 0.0f;
#pragma unroll 1
  for (int64_t i = begin + thread_index(); i < end; i += block_threads()) {
    Sum<DTYPE> total;
    total.add(rounded_sum(i));
    if (args.residual != nullptr) total.add(load_vector(static_cast<const Vector*>(args.residual) + i));
    const Vector rounded = total.rounded(true);
    totals[i - begin] = rounded;
    store_vector(static_cast<Vector*>(args.total) + i, rounded);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const float value = Values<DTYPE>::get(rounded, j);
      squares += value * value;
    }
  }
  const float scale = inverse_root(block_sum(squares) / (args.row_vectors * COUNT) + args.eps);
  for (int64_t i = begin + thread_index(); i < end; i += block_threads()) {
    const Vector total = totals[i - begin];
    float values[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) values[j] = Values<DTYPE>::get(total, j) * scale;
    scale_by_weight<DTYPE>(values, args, static_cast<int>(i - begin));
    store_vector(output + i, Values<DTYPE>::rounded(values));
  }
}

// --- packed: one shot without flags ----------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t with_epoch(uint32_t value, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | value;
}

__device__ __forceinline__ bool of_epoch(const Words& words, uint32_t epoch) {
  return words.first >> 32 == epoch && words.second >> 32 == epoch;
}

// The sum of vector i, when all peers' words of it are here. Asks all of them at once: an answer takes as long as eight.
template <int DTYPE>
__device__ __forceinline__ Vector packed_sum(const Call& call, const Vector* input, int64_t i) {
  const AllReduceArguments& args = call.args;
  // Nothing is asked of this rank, nor of those that there are not: their words say nothing.
  Words low[MAX_RANKS], high[MAX_RANKS];
  Patience patience{call, PACKED};
  bool there = true;
  for (int missing = 0; there;) {
    missing = -1;
#pragma unroll
    for (int from = 0; from < MAX_RANKS; ++from) {
      const bool asked = from < args.ranks && from != args.rank;
      const Words* at = call.places.packed(args.rank, from) + 2 * i;
      low[from] = asked ? load_words(at) : Words{};
      high[from] = asked ? load_words(at + 1) : Words{};
    }
#pragma unroll
    for (int from = 0; from < MAX_RANKS; ++from) {
      const bool asked = from < args.ranks && from != args.rank;
      if (asked && !(of_epoch(low[from], call.epoch) && of_epoch(high[from], call.epoch))) missing = from;
    }
    if (missing < 0) break;
    there = !patience.ended(missing);
  }
  const Vector mine = load_vector(input + i);
  Sum<DTYPE> sum;
#pragma unroll
  for (int from = 0; from < MAX_RANKS; ++from) {
    if (from >= args.ranks) break;
    const uint64_t words[4] = {low[from].first, low[from].second, high[from].first, high[from].second};
    Vector vector = mine;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (from != args.rank) vector.word[w] = static_cast<uint32_t>(words[w]);
    }
    sum.add(vector);
  }
  return sum.rounded(there);
}

template <int DTYPE, bool FUSED>
__device__ __forceinline__ void packed_one_shot(const AllReduceArguments& args) {
  const Call call(args);
  const auto* input = static_cast<const Vector*>(args.input);
  // Any block may send any word: rows have an owner only where they arrive.
  const int64_t step = int64_t(block_count()) * block_threads();
  for (int64_t i = int64_t(block_index()) * block_threads() + thread_index(); i < args.vectors; i += step) {
    const Vector vector = load_vector(input + i);
    const Words low = {with_epoch(vector.word[0], call.epoch), with_epoch(vector.word[1], call.epoch)};
    const Words high = {with_epoch(vector.word[2], call.epoch), with_epoch(vector.word[3], call.epoch)};
    for (int steps = 1; steps < args.ranks; ++steps) {
      Words* to = call.places.packed(peer_after(args, steps), args.rank) + 2 * i;
      store_words(to, low);
      store_words(to + 1, high);
    }
  }
  const int64_t rows = (args.vectors + args.row_vectors - 1) / args.row_vectors;
  for (int64_t row = block_index(); row < rows; row += block_count()) {
    finish_row<DTYPE, FUSED>(args, row, [&](int64_t i) { return packed_sum<DTYPE>(call, input, i); });
  }
  call.end();
}

// --- one shot with flags ---------------------------------------------------------------------------------------------

template <int DTYPE, bool FUSED>
__device__ __forceinline__ void one_shot(const AllReduceArguments& args) {
  const Call call(args);
  const auto* input = static_cast<const Vector*>(args.input);
  const int64_t rows = (args.vectors + args.row_vectors - 1) / args.row_vectors;
  for (int64_t row = block_index(); row < rows; row += block_count()) {
    for (int64_t i = row * args.row_vectors + thread_index(); i < row_end(args, row); i += block_threads()) {
      const Vector vector = load_vector(input + i);
      for (int steps = 1; steps < args.ranks; ++steps) {
        store_vector(call.places.data(peer_after(args, steps)) + args.rank * args.vectors + i, vector);
      }
    }
  }
  signal(call, 0);
  const bool valid = wait(call, 0, ONE_SHOT);
  const Vector* data = call.places.data(args.rank);
  for (int64_t row = block_index(); row < rows; row += block_count()) {
    finish_row<DTYPE, FUSED>(args, row, [&](int64_t i) {
      Vector vectors[MAX_RANKS];
#pragma unroll
      for (int from = 0; from < MAX_RANKS; ++from) {
        if (from < args.ranks) vectors[from] = load_vector(from == args.rank ? input + i : data + from * args.vectors + i);
      }
      Sum<DTYPE> sum;
#pragma unroll
      for (int from = 0; from < MAX_RANKS; ++from) {
        if (from < args.ranks) sum.add(vectors[from]);
      }
      return sum.rounded(valid);
    });
  }
  call.end();
}

// --- two shot --------------------------------------------------------------------------------------------------------

template <int DTYPE, bool FUSED>
__device__ __forceinline__ void two_shot(const AllReduceArguments& args) {
  const Call call(args);
  const auto* input = static_cast<const Vector*>(args.input);
  const int width = args.row_vectors;
  const int64_t rows = (args.vectors + width - 1) / width;
  const int64_t share = (rows + args.ranks - 1) / args.ranks;  // rows that a rank sums
  const int64_t gathered = args.ranks * share * width;         // where in the data the sums begin
  // A block's rows are those of its number in every rank's share.
  for (int steps = 1; steps < args.ranks; ++steps) {
    const int owner = peer_after(args, steps);
    Vector* to = call.places.data(owner) + args.rank * share * width;
    for (int64_t r = block_index(); r < share && owner * share + r < rows; r += block_count()) {
      const int64_t row = owner * share + r, begin = row * width;
      for (int64_t i = begin + thread_index(); i < row_end(args, row); i += block_threads()) {
        store_vector(to + r * width + i - begin, load_vector(input + i));
      }
    }
  }
  signal(call, 0);
  bool valid = wait(call, 0, TWO_SHOT);
  const Vector* data = call.places.data(args.rank);
  for (int64_t r = block_index(); r < share && args.rank * share + r < rows; r += block_count()) {
    const int64_t row = args.rank * share + r, begin = row * width;
    for (int64_t i = begin + thread_index(); i < row_end(args, row); i += block_threads()) {
      Vector vectors[MAX_RANKS];
#pragma unroll
      for (int from = 0; from < MAX_RANKS; ++from) {
        if (from >= args.ranks) continue;
        vectors[from] = load_vector(from == args.rank ? input + i : data + (from * share + r) * width + i - begin);
      }
      Sum<DTYPE> sum;
#pragma unroll
      for (int from = 0; from < MAX_RANKS; ++from) {
        if (from < args.ranks) sum.add(vectors[from]);
      }
      const Vector rounded = sum.rounded(valid);
      for (int steps = 0; steps < args.ranks; ++steps) {
        store_vector(call.places.data(peer_after(args, steps)) + gathered + i, rounded);
      }
    }
  }
  signal(call, 1);
  valid = wait(call, 1, TWO_SHOT) && valid;
  for (int owner = 0; owner < args.ranks; ++owner) {
    for (int64_t r = block_index(); r < share && owner * share + r < rows; r += block_count()) {
      finish_row<DTYPE, FUSED>(args, owner * share + r, [&](int64_t i) {
        Sum<DTYPE> sum;
        sum.add(load_vector(data + gathered + i));
        return sum.rounded(valid);
      });
    }
  }
  call.end();
}

template <int DTYPE, bool FUSED, int ALGORITHM>
__device__ __forceinline__ void all_reduce(const AllReduceArguments& args) {
  if constexpr (ALGORITHM == PACKED) packed_one_shot<DTYPE, FUSED>(args);
  if constexpr (ALGORITHM == ONE_SHOT) one_shot<DTYPE, FUSED>(args);
  if constexpr (ALGORITHM == TWO_SHOT) two_shot<DTYPE, FUSED>(args);
}

}  // namespace sgl_kernel
