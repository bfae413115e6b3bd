"""Triton kernels. Empty until the GPU worker arrives: the CPU path is plain torch."""
