// A copy whose loads and stores are those of the collectives: for looking at what a link does with them.
#include "peer_memory.cuh"

#include <cuda_runtime.h>

namespace sgl_kernel {
namespace {

__global__ void peer_copy_kernel(Vector* to, const Vector* from, int64_t vectors) {
  const int64_t step = int64_t(block_count()) * block_threads();
  for (int64_t i = int64_t(block_index()) * block_threads() + thread_index(); i < vectors; i += step) {
    store_vector(to + i, load_vector(from + i));
  }
}

}  // namespace
}  // namespace sgl_kernel

// Vectors of 16 bytes between any two memories that the device can address. Returns a cudaError_t.
extern "C" int sgl_peer_copy(void* to, const void* from, int64_t vectors, void* stream) {
  using namespace sgl_kernel;
  if (vectors < 1) return cudaErrorInvalidValue;
  peer_copy_kernel<<<8, 256, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<Vector*>(to),
                                                                   static_cast<const Vector*>(from), vectors);
  return cudaGetLastError();
}
