"""A produced tree beside its pristine one on a GPU: the same kernels, the same requests, the results compared."""
