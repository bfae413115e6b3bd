"""Drives a model's forward as the worker's loop does, over scattered blocks full of NaN.

The pool starts as NaN everywhere, so that reading a slot that no token was written to shows in
the logits. Block ids are handed out in random order.
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from cearx.worker.attention import AttentionMetadata
from cearx.worker.kv_cache import KVCache
from cearx.worker.models.interface import LanguageModel


@dataclass
class PagedSequence:
    """A request's tokens and how many of them have keys and values in the pool."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed


class PagedSteps:
    def __init__(
        self, model: LanguageModel, kv_cache: KVCache, *, seed: int = 0, scattered: bool = True
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        for layer_SHD in kv_cache.layers_SHD:
            layer_SHD.fill_(torch.nan)
        self.free_blocks = list(range(kv_cache.num_blocks))
        if scattered:
            random.Random(seed).shuffle(self.free_blocks)
        else:
            self.free_blocks.reverse()

    def release(self, sequence: PagedSequence) -> None:
        """Gives the blocks back with NaN in them, as after a request that failed."""
        block_size = self.kv_cache.block_size
        for block in sequence.blocks:
            for layer_SHD in self.kv_cache.layers_SHD:
                layer_SHD[block * block_size : (block + 1) * block_size] = torch.nan
        self.free_blocks += sequence.blocks
        sequence.blocks = []
        sequence.num_computed = 0

    @torch.inference_mode()
    def step(self, rows: list[tuple[PagedSequence, int]]) -> list[Tensor]:
        """Computes `count` further tokens of every sequence; logits [count, V] of each.

        Rows of one token stand first, as decodes do.
        """
        num_decodes = sum(count == 1 for _, count in rows)
        assert all(count == 1 for _, count in rows[:num_decodes]), "decodes first"
        block_size = self.kv_cache.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, count in rows:
            end = sequence.num_computed + count
            while len(sequence.blocks) * block_size < end:
                sequence.blocks.append(self.free_blocks.pop())
            for position in range(sequence.num_computed, end):
                ids.append(sequence.token_ids[position])
                positions.append(position)
                block = sequence.blocks[position // block_size]
                slots.append(block * block_size + position % block_size)
            starts.append(len(ids))
            sequence.num_computed = end
        longest = max(len(sequence.blocks) for sequence, _ in rows)
        # Entries past a row's length must not be looked at: 10**9 would be out of any pool.
        tables = [s.blocks + [10**9] * (longest - len(s.blocks)) for s, _ in rows]
        metadata = AttentionMetadata(
            num_decodes=num_decodes,
            cu_seqlens_q=torch.tensor(starts),
            seq_lens=torch.tensor([sequence.num_computed for sequence, _ in rows]),
            block_tables=torch.tensor(tables),
            slot_mapping=torch.tensor(slots),
        )
        logits_TV = self.model.forward(
            torch.tensor(ids),
            torch.tensor(positions),
            self.kv_cache,
            metadata,
            torch.arange(len(ids)),
        )
        return [logits_TV[a:b] for a, b in pairwise(starts)]
