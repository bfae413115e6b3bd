"""The engine's core: the pure scheduler, its event log, the wire types and the processes' shell.

Owns requests, blocks, budgets and events, the messages between processes, and the supervisor that
starts them. Never imports torch, nor any other folder of ours: every folder may import this one.
"""
