// The names of sgl-kernel/csrc/peer_memory.cuh on a CPU: each thread of each block of each rank is a thread of the system.
//
// What the kernels call plain loads and stores are plain here, and flags are atomic with the order that their names say.
// So the thread sanitizer sees a race where a flag does not cover what it stands for, or a buffer is written too early.
#pragma once

#include <sched.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "../floats.h"

#define __device__
#define __host__
#define __forceinline__ inline

namespace sgl_kernel {

class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  // Whether all came with true.
  bool wait(bool value = true) {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ = all_ && value;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      ++turn_;
      result_ = all_;
      all_ = true;
      changed_.notify_all();
      return result_;
    }
    const int turn = turn_;
    changed_.wait(lock, [&] { return turn_ != turn; });
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int threads_, arrived_ = 0, turn_ = 0;
  bool all_ = true, result_ = true;
};

struct alignas(16) Vector {
  uint32_t word[4];
};

struct alignas(16) Words {
  uint64_t first, second;
};

// What the threads of a block share.
struct Block {
  explicit Block(int threads) : barrier(threads), sums(threads), row(2048) {}
  Barrier barrier;
  std::vector<float> sums;
  std::vector<Vector> row;
};

// Where this thread is, and whether it dawdles.
struct Position {
  int thread, threads, block, blocks;
  Block* shared;
  uint64_t random;
};
inline thread_local Position here;

// At every access that others may see: now and then another thread goes first.
inline void dawdle() {
  here.random = here.random * 6364136223846793005u + 1442695040888963407u;
  const uint32_t value = here.random >> 40;
  if (value % 64 == 0) sched_yield();
  if (value % 4096 == 1) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

inline int thread_index() { return here.thread; }
inline int block_index() { return here.block; }
inline int block_count() { return here.blocks; }
inline int block_threads() { return here.threads; }

inline uint32_t load_acquire(const uint32_t* flag) {
  dawdle();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

inline uint32_t load_relaxed(const uint32_t* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }

inline void store_release(uint32_t* flag, uint32_t value) {
  dawdle();
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

inline void store_relaxed(uint32_t* to, uint32_t value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }

// Two scalars, which may come and go in any order. A word that is here also says that its sender's launch before has ended,
// with everything that it read: acquire and release stand for that end of a launch, and for nothing in the launch.
inline Words load_words(const Words* from) {
  dawdle();
  const bool backwards = here.random >> 63;
  Words words;
  if (backwards) words.second = __atomic_load_n(&from->second, __ATOMIC_ACQUIRE);
  words.first = __atomic_load_n(&from->first, __ATOMIC_ACQUIRE);
  if (!backwards) words.second = __atomic_load_n(&from->second, __ATOMIC_ACQUIRE);
  return words;
}

inline void store_words(Words* to, Words words) {
  const bool backwards = here.random >> 63;
  if (backwards) __atomic_store_n(&to->second, words.second, __ATOMIC_RELEASE);
  dawdle();
  __atomic_store_n(&to->first, words.first, __ATOMIC_RELEASE);
  if (!backwards) __atomic_store_n(&to->second, words.second, __ATOMIC_RELEASE);
}

inline Vector load_vector(const Vector* from) { return *from; }

inline void store_vector(Vector* to, Vector vector) {
  dawdle();
  *to = vector;
}

inline uint8_t load_byte(const uint8_t* from) { return *from; }

inline void store_byte(uint8_t* to, uint8_t value) {
  dawdle();
  *to = value;
}

inline uint64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void pause_polling() { sched_yield(); }
inline void block_barrier() { here.shared->barrier.wait(); }
inline bool block_all(bool value) { return here.shared->barrier.wait(value); }

inline float block_sum(float value) {
  here.shared->sums[here.thread] = value;
  block_barrier();
  float sum = 0.0f;
  for (float each : here.shared->sums) sum += each;
  block_barrier();
  return sum;
}

template <int COUNT>
Vector* row_memory() {
  return here.shared->row.data();
}

inline float inverse_root(float value) { return 1.0f / sqrtf(value); }

}  // namespace sgl_kernel
