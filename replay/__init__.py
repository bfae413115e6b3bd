"""`cearx replay`: re-runs the scheduler over a trace log and compares every decision.

Pure functions over a trace; no torch, no GPU, no sockets.
"""
