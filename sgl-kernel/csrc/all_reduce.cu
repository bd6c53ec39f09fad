// Launches of the collectives of all_reduce.cuh and the memory that peers share, with a C interface: no Python, no torch.
#include "quantized_sum.cuh"

#include <cuda_runtime.h>

#include <cstring>

namespace sgl_kernel {
namespace {

constexpr int THREADS = 512;
constexpr int64_t MAX_VECTORS = int64_t(1) << 31;

template <int DTYPE, bool FUSED, int ALGORITHM>
__global__ void __launch_bounds__(THREADS, 1) all_reduce_kernel(const __grid_constant__ AllReduceArguments args) {
  // Launched while the kernel ahead ends; the one behind may be launched while this one waits for its peers. It waits
  // itself before it reads what is summed here.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if constexpr (ALGORITHM == TWO_SHOT_E4M3) {
    two_shot_e4m3<DTYPE>(args);
  } else {
    all_reduce<DTYPE, FUSED, ALGORITHM>(args);
  }
}

template <int DTYPE, bool FUSED>
auto* kernel_of(int algorithm) {
  return algorithm == PACKED     ? all_reduce_kernel<DTYPE, FUSED, PACKED>
         : algorithm == ONE_SHOT ? all_reduce_kernel<DTYPE, FUSED, ONE_SHOT>
                                 : all_reduce_kernel<DTYPE, FUSED, TWO_SHOT>;
}

template <int DTYPE>
auto* kernel_of(int algorithm, bool fused) {
  if constexpr (DTYPE != FLOAT32) {
    if (algorithm == TWO_SHOT_E4M3) return all_reduce_kernel<DTYPE, false, TWO_SHOT_E4M3>;
  }
  return fused ? kernel_of<DTYPE, true>(algorithm) : kernel_of<DTYPE, false>(algorithm);
}

bool valid(const AllReduceArguments& args, int algorithm, bool fused) {
  if (args.ranks < 2 || args.ranks > MAX_RANKS || args.rank < 0 || args.rank >= args.ranks) return false;
  if (algorithm < PACKED || algorithm > TWO_SHOT_E4M3 || args.dtype < BFLOAT16 || args.dtype > FLOAT32) return false;
  if (args.vectors < 1 || args.vectors > MAX_VECTORS || args.row_vectors < 1) return false;
  if (args.blocks < 1 || args.blocks > MAX_BLOCKS) return false;
  if (fused && (args.row_vectors > ROW_VECTORS || args.vectors % args.row_vectors)) return false;
  // Rows of another width than a block are sent by other threads than finish them.
  const bool in_place = args.output == args.input || (fused && args.total == args.input);
  if (algorithm == PACKED && in_place && args.row_vectors != THREADS) return false;
  if (algorithm == PACKED) return args.vectors <= PACKED_VECTORS;
  // Whole groups of 32 values in 16 bits, of which no row has a part.
  const bool groups = args.vectors % 4 == 0 && args.row_vectors % 2 == 0 && args.dtype != FLOAT32;
  if (algorithm == TWO_SHOT_E4M3 && (fused || !groups)) return false;
  return data_vectors(args, algorithm) <= args.data_vectors;
}

}  // namespace
}  // namespace sgl_kernel

using sgl_kernel::AllReduceArguments;

extern "C" {

// output = the sum over the ranks; fused: total = sum + residual, output = norm of total. Every rank calls it with the
// same sizes, algorithm and blocks, in the same order. Returns a cudaError_t.
int sgl_all_reduce(const AllReduceArguments* args, int algorithm, int fused, void* stream) {
  using namespace sgl_kernel;
  if (!valid(*args, algorithm, fused)) return cudaErrorInvalidValue;
  auto* kernel = args->dtype == BFLOAT16  ? kernel_of<BFLOAT16>(algorithm, fused)
                 : args->dtype == FLOAT16 ? kernel_of<FLOAT16>(algorithm, fused)
                                          : kernel_of<FLOAT32>(algorithm, fused);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(args->blocks);
  launch.blockDim = dim3(THREADS);
  launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = &early;
  launch.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&launch, kernel, *args);
  return error != cudaSuccess ? error : cudaGetLastError();
}

// Of a workspace with halves of data of so many vectors of 16 bytes.
int64_t sgl_all_reduce_workspace_bytes(int64_t data_vectors) { return sgl_kernel::workspace_bytes(data_vectors); }

// sizeof(AllReduceArguments): what a caller's declaration of it is held to.
int sgl_all_reduce_arguments_size() { return sizeof(AllReduceArguments); }

// Zeroed memory of a device that peers can open by `handle`, 64 bytes. Not of a caching allocator: with
// expandable segments its memory has no such handles.
int sgl_peer_allocate(int device, int64_t bytes, void** memory, void* handle) {
  cudaIpcMemHandle_t ipc;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaMalloc(memory, bytes);
  if (error == cudaSuccess) error = cudaMemset(*memory, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&ipc, *memory);
  static_assert(sizeof(ipc) == 64);
  if (error == cudaSuccess) std::memcpy(handle, &ipc, sizeof(ipc));
  return error;
}

int sgl_peer_open(int device, const void* handle, void** memory) {
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, handle, sizeof(ipc));
  const cudaError_t error = cudaSetDevice(device);
  return error != cudaSuccess ? error : cudaIpcOpenMemHandle(memory, ipc, cudaIpcMemLazyEnablePeerAccess);
}

int sgl_peer_close(void* memory) { return cudaIpcCloseMemHandle(memory); }

int sgl_peer_free(void* memory) { return cudaFree(memory); }
}
