"""Linear layers that are split over ranks: by output features, by input features, by vocabulary.

Owns each layer's share of the weights and where partial results meet (`tensor_parallel.py`). Shares
are cut when a checkpoint's tensors are filled in. Models build these; the weights compute:
`panel_weight.py` in float32, `packed_weight.py` in other types.

T tokens, K input features, N output features of this rank, V vocabulary of this rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding

from cearx.worker.block_quantised import BlockQuantised
from cearx.worker.packed_weight import PackedWeight
from cearx.worker.tensor_parallel import TensorParallel, shard_size
from cearx.worker.weights import WeightSlot

if TYPE_CHECKING:
    from cearx.worker.panel_weight import PanelWeight


class ColumnParallelLinear:
    """Parts with one input, merged into one product; each rank computes a share of every part.

    `parts` are (name, output features, unit): a rank's share of a part is a multiple of its unit
    (a head). A part with fewer units than ranks is held by several ranks (key-value heads).
    """

    is_gated = False
    """Whether two equal parts are combined block by block."""

    def __init__(
        self,
        in_features: int,
        parts: tuple[tuple[str, int, int], ...],
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        self.in_features = in_features
        self.parts = parts
        self.tp = tp
        self.sizes = {name: _share(name, size, unit, tp) for name, size, unit in parts}
        total = sum(self.sizes.values())
        self.weight = _new_weight(total, in_features, dtype, halves=self.is_gated)
        self.has_bias = bias

    def slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        first_row = 0
        for name, size, _ in self.parts:
            rows = self.sizes[name]
            holders = self.tp.size * rows // size  # ranks that hold the same share
            first = self.tp.rank // holders * rows
            share = slice(first, first + rows)
            slots[f"{name}.weight"] = WeightSlot(
                (size, self.in_features),
                partial(self._fill_rows, first_row, share),
                _quantised_fill(self.weight, first_row, share),
            )
            if self.has_bias:
                slots[f"{name}.bias"] = WeightSlot(
                    (size,), partial(self._fill_bias, first_row, share)
                )
            first_row += rows
        return slots

    def _fill_rows(self, first_row: int, share: slice, weight_NK: Tensor) -> None:
        self.weight.store_rows(first_row, weight_NK[share])

    def _fill_bias(self, first_row: int, share: slice, bias_N: Tensor) -> None:
        self.weight.store_bias(first_row, bias_N[share])

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.weight.product(x_TK)


class GatedLinear(ColumnParallelLinear):
    """`silu(gate(x)) * up(x)`: both products merged, the activation applied block by block."""

    is_gated = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        super().__init__(
            in_features, (("gate", out_features, 1), ("up", out_features, 1)), bias, dtype, tp
        )

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.weight.gated_product(x_TK)


class RowParallelLinear:
    """Each rank holds a share of the input features; the partial products are summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
        unit: int = 1,
    ) -> None:
        """A rank's share of the input is a multiple of `unit`."""
        self.shape = (out_features, in_features)
        self.tp = tp
        self.has_bias = bias
        self.in_share = shard_size(in_features // unit, tp, "input heads or features") * unit
        self.weight = _new_weight(out_features, self.in_share, dtype)

    def slots(self) -> dict[str, WeightSlot]:
        # Columns are not cut out of quantised blocks: several ranks hold them as floats.
        quantised = _quantised_fill(self.weight, 0, slice(None)) if self.tp.size == 1 else None
        slots = {"weight": WeightSlot(self.shape, self._fill_columns, quantised)}
        if self.has_bias:
            slots["bias"] = WeightSlot(self.shape[:1], self._fill_bias)
        return slots

    def _fill_columns(self, weight_NK: Tensor) -> None:
        first = self.tp.rank * self.in_share
        self.weight.store_rows(0, weight_NK[:, first : first + self.in_share])

    def _fill_bias(self, bias_N: Tensor) -> None:
        if self.tp.rank == 0:  # the sum over ranks must hold it once
            self.weight.store_bias(0, bias_N)

    def add_to(self, x_TK: Tensor, residual_TN: Tensor) -> None:
        """Adds the product, summed over ranks, to the residual stream in place."""
        if self.tp.size == 1:
            self.weight.add_product(x_TK, residual_TN)
        else:
            residual_TN.add_(self.tp.all_reduce(self.weight.product(x_TK)))


class VocabParallelHead:
    """Hidden states to logits; ranks hold consecutive shares of the vocabulary, the last padded."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.tp = tp
        self.share = -(-vocab_size // tp.size)
        self.weight = _new_weight(self.share, hidden_size, dtype)

    def slots(self) -> dict[str, WeightSlot]:
        quantised = _quantised_fill(self.weight, 0, slice(None)) if self.tp.size == 1 else None
        return {"weight": WeightSlot((self.vocab_size, self.hidden_size), self._fill, quantised)}

    def _fill(self, weight_VK: Tensor) -> None:
        self.weight.store_rows(0, vocabulary_share(weight_VK, self.share, self.tp))

    def forward(self, x_TK: Tensor) -> Tensor:
        """Logits of the whole vocabulary in float32."""
        logits_TV = self.tp.all_gather(self.weight.product(x_TK))
        return logits_TV[:, : self.vocab_size].float()


class VocabParallelEmbedding:
    """Token ids to hidden states; a tied embedding reads the columns of the head's weight.

    Where the head's weight is rounded at load, the embedding keeps the checkpoint's own rows.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        tp: TensorParallel,
        tied_to: VocabParallelHead | None,
    ) -> None:
        self.vocab_size = vocab_size
        self.tp = tp
        self.share = -(-vocab_size // tp.size)
        self.tied_to = tied_to
        rows = 0 if tied_to is not None else self.share
        self.weight_VK = torch.empty(rows, hidden_size, dtype=dtype)
        self._exact_VK: Tensor | None = None
        """In the checkpoint's type."""

    def slots(self) -> dict[str, WeightSlot]:
        if self.tied_to is not None:
            slots = self.tied_to.slots()
            return {name: replace(slot, keep_exact=self._keep) for name, slot in slots.items()}
        shape = (self.vocab_size, self.weight_VK.shape[1])
        return {"weight": WeightSlot(shape, self._fill)}

    def _fill(self, weight_VK: Tensor) -> None:
        self.weight_VK.copy_(vocabulary_share(weight_VK, self.share, self.tp))

    def _keep(self, weight_VK: Tensor) -> None:
        self._exact_VK = weight_VK.clone()

    def forward(self, input_ids_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self._look_up(input_ids_T)
        local_T = input_ids_T - self.tp.rank * self.share
        elsewhere_T = (local_T < 0) | (local_T >= self.share)
        hidden_TK = self._look_up(local_T.masked_fill(elsewhere_T, 0))
        return self.tp.all_reduce(hidden_TK.masked_fill_(elsewhere_T[:, None], 0.0))

    def _look_up(self, local_ids_T: Tensor) -> Tensor:
        if self._exact_VK is not None:
            return embedding(local_ids_T, self._exact_VK).float()
        if self.tied_to is not None:
            return self.tied_to.weight.columns(local_ids_T)
        return embedding(local_ids_T, self.weight_VK)


def vocabulary_share(weight_VK: Tensor, share: int, tp: TensorParallel) -> Tensor:
    """This rank's rows, with zero rows where the vocabulary ends before the share does."""
    rows_VK = weight_VK[tp.rank * share : (tp.rank + 1) * share]
    if rows_VK.shape[0] == share:
        return rows_VK
    padding = rows_VK.new_zeros(share - rows_VK.shape[0], rows_VK.shape[1])
    return torch.cat((rows_VK, padding))


def _new_weight(
    out_features: int, in_features: int, dtype: torch.dtype, *, halves: bool = False
) -> "PanelWeight | PackedWeight":
    if dtype == torch.float32:
        from cearx.worker.panel_weight import PanelWeight  # loads a compiler: not for other types

        return PanelWeight(out_features, in_features)
    return PackedWeight(out_features, in_features, dtype, halves=halves)


def _quantised_fill(
    weight: "PanelWeight | PackedWeight", first_row: int, share: slice
) -> Callable[[BlockQuantised], None] | None:
    """Keeps `share` of a matrix of quantised blocks from `first_row` on, if the weight can."""
    if isinstance(weight, PackedWeight):
        return None
    return lambda blocks: weight.store_quantised(first_row, blocks.rows(share))


def _share(name: str, size: int, unit: int, tp: TensorParallel) -> int:
    """Features of a part on this rank: a share of its units, or one unit held by several ranks."""
    num_units = size // unit
    if num_units >= tp.size:
        return shard_size(num_units, tp, f"number of units of {name}") * unit
    if tp.size % num_units:
        raise ValueError(f"{name}: {num_units} units cannot be shared by {tp.size} ranks")
    return unit
