"""CUDA graphs of whole steps, one for each size and way of sampling.

Owns capture and replay, and the choice of sizes; what is captured is the caller's function. All
graphs share one memory pool, largest first, and nothing is captured after start-up. Called by the
runner.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Literal

import torch

Mode = Literal["plain", "filtered", "logits"]
"""How a step ends: every seat's token drawn from all tokens, or from those that the seats' filters
keep, or with the logits only, for rows that the host samples."""
MODES: tuple[Mode, ...] = ("plain", "filtered", "logits")

EXACT_SIZES = 16
"""Up to here every batch size has its own graph: padding one row of few costs most."""
STEPS = ((64, 8), (96, 16), (256, 32), (1024, 64))
"""(up to this size, distance of sizes) behind EXACT_SIZES."""
WIDEST_STEP = 128


def decode_graph_sizes(given: tuple[int, ...] | None, max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that get a graph, ascending; the last is always `max_num_seqs`."""
    sizes = list(given or _default_sizes(max_num_seqs))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def _default_sizes(max_num_seqs: int) -> list[int]:
    sizes = list(range(1, EXACT_SIZES + 1))
    for limit, distance in STEPS:
        sizes += range(sizes[-1] + distance, limit + 1, distance)
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + WIDEST_STEP)
    return sizes


def padded_size(sizes: Sequence[int], num_rows: int) -> int:
    """The smallest of the ascending sizes that holds the rows."""
    return sizes[bisect.bisect_left(sizes, num_rows)]


class StepGraphs:
    """Captured steps by (batch size, mode)."""

    def __init__(self, sizes: tuple[int, ...], stream: torch.cuda.Stream) -> None:
        self.sizes = sizes
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, Mode], torch.cuda.CUDAGraph] = {}

    def capture(
        self, run_step: Callable[[int, Mode], None], on_progress: Callable[[int, int], None]
    ) -> None:
        """Runs, captures and replays every step; raises what the step or CUDA raises."""
        total = len(self.sizes) * len(MODES)
        for size in reversed(self.sizes):
            for mode in MODES:
                self.capture_one(run_step, size, mode)
                on_progress(len(self._graphs), total)

    def capture_one(self, run_step: Callable[[int, Mode], None], size: int, mode: Mode) -> None:
        run_step(size, mode)  # compiles what is not compiled; a capture must not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run_step(size, mode)
        graph.replay()  # the first replay brings the graph to the device, which takes a while
        self._graphs[size, mode] = graph

    def replay(self, size: int, mode: Mode) -> None:
        """Enqueues one step; its inputs are where they were at the capture."""
        self._graphs[size, mode].replay()
