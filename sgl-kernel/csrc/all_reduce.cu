// Launches of the collectives of all_reduce.cuh and exchange.cuh, and the memory that peers share, with a C interface: no Python, no torch.
#include "exchange.cuh"
#include "quantized_sum.cuh"

#include <cuda_runtime.h>

#include <cstring>

namespace sgl_kernel {
namespace {

constexpr int THREADS = 512;
constexpr int64_t MAX_VECTORS = int64_t(1) << 31;

// Launched while the kernel ahead ends; the one behind may be launched while this one waits for its peers. It waits
// itself before it reads what is made here.
__device__ __forceinline__ void begin() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int DTYPE, bool FUSED, int ALGORITHM>
__global__ void __launch_bounds__(THREADS, 1) all_reduce_kernel(const __grid_constant__ AllReduceArguments args) {
  begin();
  if constexpr (ALGORITHM == TWO_SHOT_E4M3) {
    two_shot_e4m3<DTYPE>(args);
  } else {
    all_reduce<DTYPE, FUSED, ALGORITHM>(args);
  }
}

template <int ALGORITHM>
__global__ void __launch_bounds__(THREADS, 1)
    exchange_kernel(const __grid_constant__ AllReduceArguments args, const int64_t stride) {
  begin();
  exchange<ALGORITHM>(args, stride);
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

bool valid(const AllReduceArguments& args) {
  return args.ranks >= 2 && args.ranks <= MAX_RANKS && args.rank >= 0 && args.rank < args.ranks && args.vectors >= 1 &&
         args.vectors <= MAX_VECTORS && args.blocks >= 1 && args.blocks <= MAX_BLOCKS;
}

bool valid_exchange(const AllReduceArguments& args, int algorithm) {
  if (!valid(args) || args.output == args.input || args.ranks * args.vectors > MAX_VECTORS) return false;
  if (algorithm == PACKED) return args.vectors <= PACKED_VECTORS;
  return algorithm == ONE_SHOT && data_vectors(args, algorithm) <= args.data_vectors;
}

bool valid_sum(const AllReduceArguments& args, int algorithm, bool fused) {
  if (!valid(args) || args.row_vectors < 1) return false;
  if (algorithm < PACKED || algorithm > TWO_SHOT_E4M3 || args.dtype < BFLOAT16 || args.dtype > FLOAT32) return false;
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

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int blocks, void* stream, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(THREADS);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace
}  // namespace sgl_kernel

using sgl_kernel::AllReduceArguments;

extern "C" {

// output = the sum over the ranks; fused: total = sum + residual, output = norm of total. Every rank calls it with the
// same sizes, algorithm and blocks, in the same order. Returns a cudaError_t.
int sgl_all_reduce(const AllReduceArguments* args, int algorithm, int fused, void* stream) {
  using namespace sgl_kernel;
  if (!valid_sum(*args, algorithm, fused)) return cudaErrorInvalidValue;
  auto* kernel = args->dtype == BFLOAT16  ? kernel_of<BFLOAT16>(algorithm, fused)
                 : args->dtype == FLOAT16 ? kernel_of<FLOAT16>(algorithm, fused)
                                          : kernel_of<FLOAT32>(algorithm, fused);
  return launch(kernel, args->blocks, stream, *args);
}

// output [ranks, vectors] = part `rank` of every rank's input; `stride`: vectors between the parts of this one's, 0 if all
// ranks get the same. Every rank calls it with the same sizes, algorithm and blocks, in the same order. Returns a
// cudaError_t.
int sgl_exchange(const AllReduceArguments* args, int algorithm, int64_t stride, void* stream) {
  using namespace sgl_kernel;
  if (!valid_exchange(*args, algorithm)) return cudaErrorInvalidValue;
  auto* kernel = algorithm == PACKED ? exchange_kernel<PACKED> : exchange_kernel<ONE_SHOT>;
  return launch(kernel, args->blocks, stream, *args, stride);
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
