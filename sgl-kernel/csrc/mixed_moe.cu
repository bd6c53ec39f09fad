// Launches of the grouped products of mixed_moe.cuh, with a C interface: no Python, no torch.
#include "mixed_moe.cuh"

#include <cuda_runtime.h>

namespace sgl_kernel {
namespace {

template <class T, bool GATED>
__global__ void __launch_bounds__(T::THREADS, 1) mixed_moe_kernel(const __grid_constant__ MixedArguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  mixed_product<T, GATED>(args, shared, blockIdx.x);
}

template <class T, bool GATED>
int launch(const MixedArguments& args, int max_blocks, cudaStream_t stream) {
  constexpr int COLUMNS = Place<T, GATED>::COLUMNS;
  const int64_t programs = int64_t(max_blocks) * ((args.columns + COLUMNS - 1) / COLUMNS);
  if (programs == 0) return cudaSuccess;
  auto* kernel = mixed_moe_kernel<T, GATED>;
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SHARED_BYTES);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<static_cast<unsigned>(programs), T::THREADS, T::SHARED_BYTES, stream>>>(args);
  return cudaGetLastError();
}

template <bool GATED>
int launch_with(const MixedArguments& args, int block_m, int max_blocks, cudaStream_t stream) {
  switch (block_m) {
    case TallTile::M:
      return launch<TallTile, GATED>(args, max_blocks, stream);
    case ShortTile::M:
      return launch<ShortTile, GATED>(args, max_blocks, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace sgl_kernel

extern "C" {

// out = gated(x @ gate^T, x @ up^T) with weights [E, 2 * columns, depth]. block_m: 64 or 128, as the pairs are grouped.
// Returns a cudaError_t.
int sgl_mixed_moe_gate_up(const sgl_kernel::MixedArguments* args, int block_m, int max_blocks, void* stream) {
  return sgl_kernel::launch_with<true>(*args, block_m, max_blocks, static_cast<cudaStream_t>(stream));
}

// out = x @ w^T with weights [E, columns, depth].
int sgl_mixed_moe_down(const sgl_kernel::MixedArguments* args, int block_m, int max_blocks, void* stream) {
  return sgl_kernel::launch_with<false>(*args, block_m, max_blocks, static_cast<cudaStream_t>(stream));
}

// Dynamic shared memory of a block; 0 for a block_m that there is not.
int sgl_mixed_moe_shared_bytes(int block_m) {
  using namespace sgl_kernel;
  return block_m == TallTile::M ? TallTile::SHARED_BYTES : block_m == ShortTile::M ? ShortTile::SHARED_BYTES : 0;
}

// sizeof(MixedArguments): what a caller's declaration of it is held to.
int sgl_mixed_moe_arguments_size() { return sizeof(sgl_kernel::MixedArguments); }
}
