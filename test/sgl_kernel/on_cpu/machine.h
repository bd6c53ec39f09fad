// The names of sgl-kernel/csrc/machine.cuh on a CPU: each thread of a block is a fiber, all of one system thread.
//
// Copies that are on their way happen when they are waited for, so that what reads them too early sees the poison that
// shared memory begins with. A barrier that not all of its threads come to ends the program with a message.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "floats.h"

#include <setjmp.h>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __noinline__

namespace sgl_kernel {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  bool there;
};

struct Barrier {
  int arrived = 0, passed = 0;
};

struct Fiber {
  ucontext_t start;
  jmp_buf rest;  // where it goes on; jumps cost a tenth of swapcontext, which calls the system
  bool started = false;
  std::vector<char> stack = std::vector<char>(STACK_BYTES);
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  Barrier* waits_for = nullptr;
  int passed = 0;
  bool ended = false;
};

class Block {
 public:
  Block(int threads, std::function<void()> kernel) : fibers_(threads), warps_(threads / WARP), kernel_(kernel) {}

  void run() {
    current = this;
    for (Fiber& fiber : fibers_) {
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.data();
      fiber.start.uc_stack.ss_size = fiber.stack.size();
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, &Block::enter, 0);
    }
    for (size_t left = fibers_.size(); left > 0;) {
      bool moved = false;
      for (thread_ = 0; thread_ < static_cast<int>(fibers_.size()); ++thread_) {
        Fiber& fiber = fibers_[thread_];
        if (fiber.ended || (fiber.waits_for && fiber.waits_for->passed == fiber.passed)) continue;
        moved = true;
        resume(fiber);
        left -= fiber.ended;
      }
      if (!moved) {
        fprintf(stderr, "a barrier that not all of its threads come to\n");
        abort();
      }
    }
  }

  void wait(Barrier& barrier, int threads) {
    Fiber& fiber = fibers_[thread_];
    if (++barrier.arrived == threads) {
      barrier.arrived = 0;
      ++barrier.passed;
      return;
    }
    fiber.waits_for = &barrier;
    fiber.passed = barrier.passed;
    if (!_setjmp(fiber.rest)) _longjmp(scheduler_, 1);
  }

  void wait_warp() { wait(warps_[thread_ / WARP], WARP); }
  void wait_block() { wait(whole_, static_cast<int>(fibers_.size())); }

  // Values alternate between two places: nobody writes to one before all have read it.
  uint64_t exchange(uint64_t value, int lane) {
    static thread_local uint64_t values[2][1024];
    static thread_local int turns[1024];
    const int mine = thread_, turn = turns[mine]++ % 2;
    values[turn][mine] = value;
    wait_warp();
    return values[turn][mine / WARP * WARP + lane];
  }

  Fiber& fiber() { return fibers_[thread_]; }
  int thread() const { return thread_; }

  static inline Block* current = nullptr;

 private:
  static void enter() {
    Block* block = current;
    block->kernel_();
    block->fibers_[block->thread_].ended = true;
    _longjmp(block->scheduler_, 1);
  }

  void resume(Fiber& fiber) {
    if (_setjmp(scheduler_)) return;
    if (fiber.started) _longjmp(fiber.rest, 1);
    fiber.started = true;
    setcontext(&fiber.start);
  }

  std::vector<Fiber> fibers_;
  std::vector<Barrier> warps_;
  Barrier whole_;
  std::function<void()> kernel_;
  jmp_buf scheduler_;
  int thread_ = 0;
};

inline int thread_index() { return Block::current->thread(); }
inline int lane_index() { return thread_index() % WARP; }

inline void copy_16(void* to, const void* from, bool there) {
  Block::current->fiber().open.push_back({to, from, 16, there});
}

inline void copy_8(void* to, const void* from, bool there) {
  Block::current->fiber().open.push_back({to, from, 8, there});
}

inline void commit_copies() {
  Fiber& fiber = Block::current->fiber();
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

template <int Pending>
inline void wait_copies() {
  auto& groups = Block::current->fiber().groups;
  for (; groups.size() > Pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      if (copy.there) {
        memcpy(copy.to, copy.from, copy.bytes);
      } else {
        memset(copy.to, 0, copy.bytes);
      }
    }
  }
}

inline void block_barrier() { Block::current->wait_block(); }

inline uint32_t of_lane(uint32_t value, int lane) {
  return static_cast<uint32_t>(Block::current->exchange(value, lane));
}

inline const uint8_t* of_lane(const uint8_t* value, int lane) {
  return reinterpret_cast<const uint8_t*>(Block::current->exchange(reinterpret_cast<uint64_t>(value), lane));
}

template <class T>
inline T min(T a, T b) {
  return a < b ? a : b;
}

template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

}  // namespace sgl_kernel
