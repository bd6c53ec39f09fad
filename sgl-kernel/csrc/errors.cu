// What the codes mean that the other functions of the C interface return.
#include <cuda_runtime.h>

extern "C" const char* sgl_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
