"""The worker on a CUDA device: one decoder for all dense families, a batch that stays there,
CUDA graphs for decodes, and steps that are launched while others run.

Kernels are `cearx.kernels`; requests, seats and the exact sampler are the CPU worker's. Built by
`start.py`, driven by `cearx.worker.process` through `launch` and `collect`.
"""
