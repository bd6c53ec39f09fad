// The C interface of sgl-kernel/csrc/all_reduce.cu where a rank is a process and a GPU thread a thread of it. Memory that
// peers open is a file in /dev/shm, whose name is the handle.
#define SGL_KERNEL_ON_CPU
#include "exchange.cuh"
#include "quantized_sum.cuh"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <memory>
#include <string>

using namespace sgl_kernel;

namespace {

constexpr int THREADS = 8;
std::map<void*, std::pair<size_t, std::string>> mapped;

int map(const char* name, size_t bytes, bool create, void** memory) {
  const int file = shm_open(name, create ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
  if (file < 0) return 1;
  struct stat status = {};
  if (create ? ftruncate(file, bytes) : fstat(file, &status)) return 2;
  if (!create) bytes = status.st_size;
  *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (*memory == MAP_FAILED) return 3;
  mapped[*memory] = {bytes, create ? name : ""};
  return 0;
}

int unmap(void* memory) {
  const auto found = mapped.find(memory);
  if (found == mapped.end()) return 4;
  munmap(memory, found->second.first);
  if (!found->second.second.empty()) shm_unlink(found->second.second.c_str());
  mapped.erase(found);
  return 0;
}

// Calls `kernel` as each thread of the launch.
template <class Kernel>
void launch(AllReduceArguments& args, Kernel kernel) {
  args.blocks = std::min(args.blocks, 3);
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::thread> threads;
  for (int block = 0; block < args.blocks; ++block) blocks.push_back(std::make_unique<Block>(THREADS));
  for (int i = 0; i < args.blocks * THREADS; ++i) {
    threads.emplace_back([&, i] {
      here = {i % THREADS, THREADS, i / THREADS, args.blocks, blocks[i / THREADS].get(), uint64_t(i + 1) * 77 + args.rank};
      kernel();
    });
  }
  for (std::thread& each : threads) each.join();
}

template <int DTYPE, bool FUSED>
void run(const AllReduceArguments& args, int algorithm) {
  if (algorithm == PACKED) all_reduce<DTYPE, FUSED, PACKED>(args);
  if (algorithm == ONE_SHOT) all_reduce<DTYPE, FUSED, ONE_SHOT>(args);
  if (algorithm == TWO_SHOT) all_reduce<DTYPE, FUSED, TWO_SHOT>(args);
  if constexpr (DTYPE != FLOAT32) {
    if (algorithm == TWO_SHOT_E4M3) two_shot_e4m3<DTYPE>(args);
  }
}

template <int DTYPE>
void run(const AllReduceArguments& args, int algorithm, bool fused) {
  fused ? run<DTYPE, true>(args, algorithm) : run<DTYPE, false>(args, algorithm);
}

}  // namespace

extern "C" {

int sgl_all_reduce(const AllReduceArguments* given, int algorithm, int fused, void*) {
  AllReduceArguments args = *given;
  if (!fused) args.row_vectors = THREADS;  // as wide as a block here
  if (data_vectors(args, algorithm) > args.data_vectors) return 5;
  if (args.blocks < 1 || args.blocks > MAX_BLOCKS) return 6;
  launch(args, [&] {
    if (args.dtype == BFLOAT16) run<BFLOAT16>(args, algorithm, fused);
    if (args.dtype == FLOAT16) run<FLOAT16>(args, algorithm, fused);
    if (args.dtype == FLOAT32) run<FLOAT32>(args, algorithm, fused);
  });
  return 0;
}

int sgl_exchange(const AllReduceArguments* given, int algorithm, int64_t stride, void*) {
  AllReduceArguments args = *given;
  if (algorithm == ONE_SHOT ? data_vectors(args, ONE_SHOT) > args.data_vectors : args.vectors > PACKED_VECTORS) return 5;
  if (args.blocks < 1 || args.blocks > MAX_BLOCKS || args.output == args.input) return 6;
  launch(args, [&] { algorithm == PACKED ? exchange<PACKED>(args, stride) : exchange<ONE_SHOT>(args, stride); });
  return 0;
}

int64_t sgl_all_reduce_workspace_bytes(int64_t data_vectors) { return workspace_bytes(data_vectors); }
int sgl_all_reduce_arguments_size() { return sizeof(AllReduceArguments); }

int sgl_peer_allocate(int device, int64_t bytes, void** memory, void* handle) {
  static int count = 0;
  char* name = static_cast<char*>(handle);
  snprintf(name, 64, "/all_reduce_on_cpu_%d_%d_%d", device, getpid(), count++);
  return map(name, bytes, true, memory);
}

int sgl_peer_open(int, const void* handle, void** memory) {
  return map(static_cast<const char*>(handle), 0, false, memory);
}

int sgl_peer_copy(void* to, const void* from, int64_t vectors, void*) {
  memcpy(to, from, 16 * vectors);
  return 0;
}

int sgl_peer_close(void* memory) { return unmap(memory); }
int sgl_peer_free(void* memory) { return unmap(memory); }
const char* sgl_error_string(int code) { return code == 1 ? "no such memory" : "failed"; }
}
