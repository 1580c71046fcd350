"""Triton kernels for CUDA devices, one for one with `backends.torch_runtime.reference`."""
