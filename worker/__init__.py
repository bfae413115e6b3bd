"""The worker: loads a model, owns the KV blocks' memory, executes step plans and samples.

Runs in its own process (`python -m cearx.worker`), talks to the core only.
"""
