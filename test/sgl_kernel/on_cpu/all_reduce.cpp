// The protocol of sgl-kernel/csrc/all_reduce.cuh and exchange.cuh among threads: random calls, one after the other, against
// sums in fp32 and what the others gave.
//
//     all_reduce RANKS ROUNDS SEED [absent]
//
// Ranks drift: only calls of one rank wait for one another, as launches in a stream do. With `absent` the last rank never
// calls. Prints what is wrong, and exits with 1; the thread sanitizer exits with 66.
#define SGL_KERNEL_ON_CPU
#include "exchange.cuh"
#include "quantized_sum.cuh"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

using namespace sgl_kernel;

namespace {

constexpr int THREADS = 8, BLOCKS = 3;  // as many threads as ranks: each waits for one
constexpr int MOST_VECTORS = 96;
constexpr int MOST_PART = MOST_VECTORS / MAX_RANKS;
constexpr int64_t DATA_VECTORS = 8 * 2 * MOST_VECTORS;
constexpr int64_t DEADLINE = 10'000'000'000, SHORT_DEADLINE = 1'000'000'000;
constexpr float EPS = 1e-5f;

uint32_t mixed(uint32_t a, uint32_t b, uint32_t c) {
  uint64_t value = (uint64_t(a) << 40) ^ (uint64_t(b) << 20) ^ c ^ 0x9e3779b97f4a7c15u;
  for (int i = 0; i < 3; ++i) value = (value ^ value >> 31) * 0xbf58476d1ce4e5b9u;
  return static_cast<uint32_t>(value >> 32);
}

// What all ranks call in a round.
struct Round {
  int algorithm, dtype, blocks, row_vectors, vectors;
  bool exchanges, gathers, fused, in_place, residual;

  Round(uint32_t seed, uint32_t number) {
    auto draw = [&, i = 0](int below) mutable { return static_cast<int>(mixed(seed, number, i++) % below); };
    exchanges = draw(3) == 0;
    gathers = draw(2);
    algorithm = draw(exchanges ? 2 : 4);
    const bool e4m3 = algorithm == TWO_SHOT_E4M3;
    dtype = draw(e4m3 ? 2 : 3);
    blocks = 1 + draw(BLOCKS);
    fused = draw(2) && !e4m3 && !exchanges;
    residual = draw(4);
    in_place = !fused && !exchanges && draw(2);
    row_vectors = fused ? 1 + draw(12) : THREADS;
    vectors = fused ? row_vectors * (1 + draw(MOST_VECTORS / row_vectors)) : 1 + draw(MOST_VECTORS);
    if (e4m3) vectors = (vectors + 3) / 4 * 4;
    if (exchanges) vectors = 1 + draw(MOST_PART);
  }

  int stride() const { return gathers ? 0 : vectors; }

  // Vectors of the input, and of the output.
  int given(int ranks) const { return exchanges && !gathers ? ranks * vectors : vectors; }
  int taken(int ranks) const { return exchanges ? ranks * vectors : vectors; }
};

template <int DTYPE>
Vector value_of(uint32_t seed, uint32_t number, uint32_t who, uint32_t i) {
  float values[8];
  for (int j = 0; j < Values<DTYPE>::COUNT; ++j) {
    values[j] = static_cast<int32_t>(mixed(seed + who, number, 8 * i + j)) * (4.0f / 2147483648.0f);
  }
  return Values<DTYPE>::rounded(values);
}

// What a group of 32 values becomes as e4m3 with the least power of two that brings them to at most 448.
void pass_e4m3(float* values) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::abs(values[i]));
  int exponent = -126;
  while (std::ldexp(448.0f, exponent) < largest) ++exponent;
  for (int i = 0; i < 32; ++i) {
    values[i] = std::ldexp(value_of_e4m3(e4m3_of(std::ldexp(values[i], -exponent))), exponent);
  }
}

// The group of four vectors from `first` on, summed over the ranks in e4m3.
template <int DTYPE>
std::array<Vector, 4> summed_in_e4m3(uint32_t seed, uint32_t number, int ranks, int first) {
  float sum[32] = {};
  for (int r = 0; r < ranks; ++r) {
    float values[32];
    for (int i = 0; i < 32; ++i) values[i] = Values<DTYPE>::get(value_of<DTYPE>(seed, number, r, first + i / 8), i % 8);
    pass_e4m3(values);
    for (int i = 0; i < 32; ++i) sum[i] += values[i];
  }
  pass_e4m3(sum);
  std::array<Vector, 4> group;
  for (int i = 0; i < 4; ++i) group[i] = Values<DTYPE>::rounded(sum + 8 * i);
  return group;
}

struct Rank {
  std::vector<Vector> workspace, input, output, residual, weight;
  Stall stall = {};
  Barrier turn{BLOCKS * THREADS};
  std::vector<std::unique_ptr<Block>> blocks;
  int wrong = 0;
};

struct Test {
  int ranks, rounds;
  uint32_t seed;
  bool absent;
  std::vector<std::unique_ptr<Rank>> all;

  AllReduceArguments arguments(int rank, const Round& round) {
    Rank& mine = *all[rank];
    AllReduceArguments args = {};
    args.input = mine.input.data();
    args.output = round.in_place ? mine.input.data() : mine.output.data();
    for (int i = 0; i < ranks; ++i) args.workspaces[i] = all[i]->workspace.data();
    args.residual = round.residual ? mine.residual.data() : nullptr;
    args.total = mine.residual.data();
    args.weight = mine.weight.data();
    args.stall = &mine.stall;
    args.vectors = round.vectors;
    args.data_vectors = DATA_VECTORS;
    args.deadline = absent ? SHORT_DEADLINE : DEADLINE;
    args.row_vectors = round.row_vectors;
    args.rank = rank;
    args.ranks = ranks;
    args.blocks = round.blocks;
    args.dtype = round.dtype;
    args.eps = EPS;
    return args;
  }

  template <int DTYPE>
  void run(const AllReduceArguments& args, const Round& round) {
    if (round.exchanges) {
      return round.algorithm == PACKED ? exchange<PACKED>(args, round.stride()) : exchange<ONE_SHOT>(args, round.stride());
    }
    if constexpr (DTYPE != FLOAT32) {
      if (round.algorithm == TWO_SHOT_E4M3) return two_shot_e4m3<DTYPE>(args);
    }
    switch (2 * round.algorithm + round.fused) {
      case 0: return all_reduce<DTYPE, false, PACKED>(args);
      case 1: return all_reduce<DTYPE, true, PACKED>(args);
      case 2: return all_reduce<DTYPE, false, ONE_SHOT>(args);
      case 3: return all_reduce<DTYPE, true, ONE_SHOT>(args);
      case 4: return all_reduce<DTYPE, false, TWO_SHOT>(args);
      default: return all_reduce<DTYPE, true, TWO_SHOT>(args);
    }
  }

  template <int DTYPE>
  void fill(int rank, int number, const Round& round) {
    Rank& mine = *all[rank];
    for (int i = 0; i < round.given(ranks); ++i) mine.input[i] = value_of<DTYPE>(seed, number, rank, i);
    for (int i = 0; i < round.vectors; ++i) {
      mine.residual[i] = value_of<DTYPE>(seed, number, 100, i);
      mine.weight[i % round.row_vectors] = value_of<DTYPE>(seed, number, 101, i % round.row_vectors);
    }
  }

  template <int DTYPE>
  int check(int rank, int number, const Round& round) {
    constexpr int COUNT = Values<DTYPE>::COUNT;
    Rank& mine = *all[rank];
    int wrong = 0;
    if (round.exchanges) {
      for (int from = 0; from < ranks; ++from) {
        for (int i = 0; i < round.vectors; ++i) {
          const Vector wanted = value_of<DTYPE>(seed, number, from, rank * round.stride() + i);
          wrong += memcmp(&wanted, &mine.output[from * round.vectors + i], 16) != 0;
        }
      }
      return wrong;
    }
    if constexpr (DTYPE != FLOAT32) {
      if (round.algorithm == TWO_SHOT_E4M3) {
        for (int i = 0; i < round.vectors; i += 4) {
          const auto wanted = summed_in_e4m3<DTYPE>(seed, number, ranks, i);
          wrong += memcmp(wanted.data(), &(round.in_place ? mine.input : mine.output)[i], 64) != 0;
        }
        return wrong;
      }
    }
    for (int row = 0; row * round.row_vectors < round.vectors; ++row) {
      const int end = std::min((row + 1) * round.row_vectors, round.vectors);
      double squares = 0;
      for (int i = row * round.row_vectors; i < end; ++i) {
        float sum[8] = {};
        for (int r = 0; r < ranks; ++r) {
          const Vector theirs = value_of<DTYPE>(seed, number, r, i);
          for (int j = 0; j < COUNT; ++j) sum[j] += Values<DTYPE>::get(theirs, j);
        }
        Vector wanted = Values<DTYPE>::rounded(sum);
        if (round.fused) {
          const Vector residual = value_of<DTYPE>(seed, number, 100, i);
          for (int j = 0; j < COUNT; ++j) {
            sum[j] = Values<DTYPE>::get(wanted, j) + (round.residual ? Values<DTYPE>::get(residual, j) : 0.0f);
          }
          wanted = Values<DTYPE>::rounded(sum);
          for (int j = 0; j < COUNT; ++j) squares += std::pow(Values<DTYPE>::get(wanted, j), 2);
        }
        const Vector& actual = round.fused ? mine.residual[i] : round.in_place ? mine.input[i] : mine.output[i];
        wrong += memcmp(&wanted, &actual, 16) != 0;
      }
      if (!round.fused) continue;
      const double scale = 1.0 / std::sqrt(squares / (round.row_vectors * COUNT) + EPS);
      for (int i = row * round.row_vectors; i < end; ++i) {
        for (int j = 0; j < COUNT; ++j) {
          const double wanted = Values<DTYPE>::get(mine.residual[i], j) * scale *
                                Values<DTYPE>::get(mine.weight[i % round.row_vectors], j);
          wrong += !(std::abs(Values<DTYPE>::get(mine.output[i], j) - wanted) <= 0.01 * std::abs(wanted) + 1e-4);
        }
      }
    }
    return wrong;
  }

  // How much in the results is a number, of an exchange in what the rank that is not there should have sent.
  template <int DTYPE>
  int numbers(int rank, const Round& round) {
    int numbers = 0;
    for (int i = round.exchanges ? (ranks - 1) * round.vectors : 0; i < round.taken(ranks); ++i) {
      const Vector& actual = round.in_place ? all[rank]->input[i] : all[rank]->output[i];
      for (int j = 0; j < Values<DTYPE>::COUNT; ++j) numbers += !std::isnan(Values<DTYPE>::get(actual, j));
    }
    return numbers;
  }

  template <int DTYPE>
  void step(int rank, int number, const Round& round, int phase) {
    Rank& mine = *all[rank];
    if (phase == 0) fill<DTYPE>(rank, number, round);
    if (phase == 1) run<DTYPE>(arguments(rank, round), round);
    if (phase == 2) mine.wrong += absent ? numbers<DTYPE>(rank, round) : check<DTYPE>(rank, number, round);
  }

  void thread(int rank, int block, int thread) {
    Rank& mine = *all[rank];
    for (int number = 0; number < rounds; ++number) {
      const Round round(seed, number);
      here = {thread, THREADS, block, round.blocks, mine.blocks[block].get(), mixed(seed + rank, number, 8 * block + thread)};
      for (int phase = 0; phase < 3; ++phase) {
        if (phase == 1 ? block < round.blocks : block == 0 && thread == 0) {
          if (round.dtype == BFLOAT16) step<BFLOAT16>(rank, number, round, phase);
          if (round.dtype == FLOAT16) step<FLOAT16>(rank, number, round, phase);
          if (round.dtype == FLOAT32) step<FLOAT32>(rank, number, round, phase);
        }
        mine.turn.wait();
      }
    }
  }

  int run_all() {
    for (int rank = 0; rank < ranks; ++rank) {
      auto& mine = *all.emplace_back(std::make_unique<Rank>());
      mine.workspace.resize(workspace_bytes(DATA_VECTORS) / 16);
      // The count goes over its end on the way.
      for (auto& epoch : reinterpret_cast<Control*>(mine.workspace.data())->epochs) epoch = 0u - 2 - rounds / 2;
      for (auto* vectors : {&mine.input, &mine.output, &mine.residual, &mine.weight}) vectors->resize(MOST_VECTORS);
      for (int block = 0; block < BLOCKS; ++block) mine.blocks.push_back(std::make_unique<Block>(THREADS));
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks - absent; ++rank) {
      for (int i = 0; i < BLOCKS * THREADS; ++i) {
        threads.emplace_back([this, rank, i] { thread(rank, i / THREADS, i % THREADS); });
      }
    }
    for (std::thread& each : threads) each.join();
    int failed = 0;
    for (int rank = 0; rank < ranks - absent; ++rank) {
      const Rank& mine = *all[rank];
      const int missing = static_cast<int>(mine.stall.missing) - 1;
      if (mine.wrong) printf("rank %d: %d %s\n", rank, mine.wrong, absent ? "results look like numbers" : "wrong values");
      if (missing >= 0 && !absent) printf("rank %d waited for rank %d in vain\n", rank, missing);
      if (absent && missing != ranks - 1) printf("rank %d reports %d as missing\n", rank, missing);
      failed += mine.wrong || (absent ? missing != ranks - 1 : missing >= 0);
    }
    return failed != 0;
  }
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  Test test{atoi(arguments[1]), atoi(arguments[2]), static_cast<uint32_t>(atoi(arguments[3])), count > 4, {}};
  return test.run_all();
}
