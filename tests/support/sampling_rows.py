"""Rows to sample, on the device and by the worker's sampler on the CPU, for comparison.

Used by the kernels' tests and by the scripts that run on a GPU.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from cearx.core.messages import SamplingParams
from cearx.kernels.sampling import Mode, sample
from cearx.kernels.sampling_state import SamplingScratch, SamplingTable
from cearx.worker.sampler import Sampler
from cearx.worker.sampling_rule import SamplingRule

SPARE = 1


@dataclass(frozen=True)
class Row:
    """One row's rule and the number of its output."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_outputs: int = 0


def on_device(
    logits_RV: torch.Tensor, rows: list[Row], mode: Mode, device: torch.device
) -> tuple[list[int], SamplingTable]:
    """The tokens of rows whose seats are the rows' numbers, backwards, before the spare one."""
    num_rows, vocab = logits_RV.shape
    table = SamplingTable.allocate(num_rows + SPARE, device)
    seats = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32)
    for name in (field.name for field in fields(Row)):
        values = torch.tensor([float(getattr(row, name)) for row in rows], dtype=torch.float64)
        if name == "seed":
            values = torch.tensor([row.seed for row in rows])
        column = getattr(table, f"{name}_S")
        column[seats.long().to(device)] = values.to(column.dtype).to(device)
    scratch = SamplingScratch.allocate(num_rows, vocab, device)
    for field in fields(scratch):
        getattr(scratch, field.name).fill_(-77)
    tokens = torch.full((num_rows,), -5, dtype=torch.int32, device=device)
    sample(logits_RV.to(device), seats.to(device), table, tokens, scratch, mode=mode)
    return tokens.tolist(), table


def on_cpu(logits_RV: torch.Tensor, rows: list[Row]) -> list[int]:
    """What the worker samples."""
    sampler = Sampler(logits_RV.shape[1])
    tokens = []
    for logits_V, row in zip(logits_RV.float(), rows, strict=True):
        params = SamplingParams(
            temperature=float(np.float32(row.temperature)),
            top_k=row.top_k,
            top_p=float(np.float32(row.top_p)),
            min_p=float(np.float32(row.min_p)),
            seed=row.seed,
        )
        rule = SamplingRule(params, (), logits_RV.shape[1])
        raw_V = logits_V.numpy()
        tokens.append(sampler._choose(rule, raw_V, int(raw_V.argmax()), row.num_outputs))
    return tokens
