"""One file an operation: Triton kernels for GPUs, and what `cpu_compiler.py` compiles for CPUs."""
