// Parts that up to 8 GPUs send one another as they are, by writes into one another's memory. Workspaces, the count of
// calls, flags, waits and their deadline are those of all_reduce.cuh, and calls of both kinds may follow one another:
// each rank hears of every peer here, too.
//
//   packed    every word of 32 bits travels beside 32 bits of epoch, without a flag; for small parts.
//   one shot  values travel, then a flag for each block.
//
// `vectors` are those of a part. Part p of the input begins at vector `p * stride` and goes to rank p: with a stride of 0
// all ranks get the same one. The output has a part of each rank, in their order, and is not the input.
//
// Items are a part's vectors for each peer, counted by how many ranks the receiver is behind the sender. So a block
// receives what the same block of its peers has sent.
#pragma once

#include "all_reduce.cuh"

namespace sgl_kernel {

constexpr uint32_t NO_NUMBER = 0x7fc07fc0u;  // in each of the types

struct Parts {
  const AllReduceArguments& args;
  const int64_t stride;

  __device__ const Vector* given(int peer) const {
    return static_cast<const Vector*>(args.input) + peer * stride;
  }
  __device__ Vector* taken(int from) const { return static_cast<Vector*>(args.output) + from * args.vectors; }

  // Calls `item(steps, i)` for each vector i of a part and each peer, which is `steps` ranks before or behind this one.
  template <class Item>
  __device__ __forceinline__ void each_item(Item item) const {
    const int64_t step = int64_t(block_count()) * block_threads(), count = (args.ranks - 1) * args.vectors;
    for (int64_t j = int64_t(block_index()) * block_threads() + thread_index(); j < count; j += step) {
      const uint32_t before = static_cast<uint32_t>(j) / static_cast<uint32_t>(args.vectors);
      item(static_cast<int>(before) + 1, j - before * args.vectors);
    }
  }

  __device__ __forceinline__ void keep_own() const {
    const int64_t step = int64_t(block_count()) * block_threads();
    for (int64_t i = int64_t(block_index()) * block_threads() + thread_index(); i < args.vectors; i += step) {
      store_vector(taken(args.rank) + i, load_vector(given(args.rank) + i));
    }
  }
};

__device__ __forceinline__ int peer_before(const AllReduceArguments& args, int steps) {
  const int peer = args.rank - steps;
  return peer < 0 ? peer + args.ranks : peer;
}

__device__ __forceinline__ Vector no_numbers() { return {{NO_NUMBER, NO_NUMBER, NO_NUMBER, NO_NUMBER}}; }

// Vector i of the part from `from`, when it is here.
__device__ __forceinline__ Vector packed_vector(const Call& call, int from, int64_t i) {
  const Words* at = call.places.packed(call.args.rank, from) + 2 * i;
  Patience patience{call, PACKED};
  while (true) {
    const Words low = load_words(at), high = load_words(at + 1);
    if (of_epoch(low, call.epoch) && of_epoch(high, call.epoch)) {
      return {{static_cast<uint32_t>(low.first), static_cast<uint32_t>(low.second), static_cast<uint32_t>(high.first),
               static_cast<uint32_t>(high.second)}};
    }
    if (patience.ended(from)) return no_numbers();
  }
}

__device__ __forceinline__ void packed_exchange(const AllReduceArguments& args, int64_t stride) {
  const Call call(args);
  const Parts parts{args, stride};
  parts.each_item([&](int steps, int64_t i) {
    const int peer = peer_after(args, steps);
    const Vector vector = load_vector(parts.given(peer) + i);
    Words* to = call.places.packed(peer, args.rank) + 2 * i;
    store_words(to, {with_epoch(vector.word[0], call.epoch), with_epoch(vector.word[1], call.epoch)});
    store_words(to + 1, {with_epoch(vector.word[2], call.epoch), with_epoch(vector.word[3], call.epoch)});
  });
  parts.keep_own();
  parts.each_item([&](int steps, int64_t i) {
    const int from = peer_before(args, steps);
    store_vector(parts.taken(from) + i, packed_vector(call, from, i));
  });
  call.end();
}

__device__ __forceinline__ void one_shot_exchange(const AllReduceArguments& args, int64_t stride) {
  const Call call(args);
  const Parts parts{args, stride};
  parts.each_item([&](int steps, int64_t i) {
    const int peer = peer_after(args, steps);
    store_vector(call.places.data(peer) + args.rank * args.vectors + i, load_vector(parts.given(peer) + i));
  });
  signal(call, 0);
  parts.keep_own();
  const bool valid = wait(call, 0, ONE_SHOT);
  const Vector* data = call.places.data(args.rank);
  parts.each_item([&](int steps, int64_t i) {
    const int from = peer_before(args, steps);
    store_vector(parts.taken(from) + i, valid ? load_vector(data + from * args.vectors + i) : no_numbers());
  });
  call.end();
}

template <int ALGORITHM>
__device__ __forceinline__ void exchange(const AllReduceArguments& args, int64_t stride) {
  if constexpr (ALGORITHM == PACKED) packed_exchange(args, stride);
  if constexpr (ALGORITHM == ONE_SHOT) one_shot_exchange(args, stride);
}

}  // namespace sgl_kernel
