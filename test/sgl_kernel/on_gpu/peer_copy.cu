// What a copy to a peer takes: the floor of anything that goes there.
#include <cuda_runtime.h>

extern "C" int peer_copy(void* to, const void* from, long long bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
}
