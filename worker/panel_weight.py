"""A weight matrix for CPUs that is multiplied as float32, in the bytes that it was given in.

Owns the panels' memory and the calls of the compiled product; knows nothing of ranks or files.
Linear layers hold one, `compiled_decoder.py` reads its table of panels. Rows that come as quantised
blocks stay quantised, all others are float32; parts of one weight may differ.

T tokens, K input features, N output features, P panels, G groups of 32 input features, L lanes.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cearx.kernels.panel_product import ADD, GATE, STORE, panel_product
from cearx.kernels.panel_rows import pack_rows, read_rows
from cearx.kernels.panels import BYTES, FLOATS, GROUP, GROUP_BYTES, NIBBLES, PANEL_WIDTH
from cearx.worker.block_quantised import BlockQuantised
from cearx.worker.thread_team import thread_team


class PanelWeight:
    """`x @ weight.T + bias`; every part that is stored begins a panel of its own."""

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.num_groups = -(-in_features // GROUP)
        self.bias_N = torch.zeros(out_features)
        self._parts: dict[int, tuple[int, int, Tensor]] = {}
        """By first row: rows, kind, bytes [P, G, bytes of a group]."""
        self._panels_P4: Tensor | None = None

    def store_rows(self, first_row: int, rows_NK: Tensor) -> None:
        """Writes rows [first_row, first_row + N) of the weight as checkpoints hold it, [N, K]."""
        num_rows, in_features = rows_NK.shape
        missing = (0, self.num_groups * GROUP - in_features, 0, -num_rows % PANEL_WIDTH)
        padded = pad(rows_NK.float(), missing) if any(missing) else rows_NK.float()
        panels_PGKL = padded.view(-1, PANEL_WIDTH, self.num_groups, GROUP).permute(0, 2, 3, 1)
        raw = (
            panels_PGKL.contiguous()
            .view(torch.uint8)
            .view(-1, self.num_groups, GROUP_BYTES[FLOATS])
        )
        self._keep(first_row, num_rows, FLOATS, raw)

    def store_quantised(self, first_row: int, rows: BlockQuantised) -> None:
        """As `store_rows`, but the codes are kept."""
        num_rows = rows.shape[0]
        kind = BYTES if rows.offsets_NG is None else NIBBLES
        offsets_NG = rows.scales_NG if rows.offsets_NG is None else rows.offsets_NG
        num_panels = -(-num_rows // PANEL_WIDTH)
        raw = torch.zeros(num_panels, self.num_groups, GROUP_BYTES[kind], dtype=torch.uint8)
        floats = raw.view(torch.float32).numpy()
        padding = self.num_groups * GROUP - rows.shape[1]
        codes_NK = rows.codes_NK.view(np.uint8)
        if padding:
            codes_NK = np.pad(codes_NK, ((0, 0), (0, padding)))
        pack_rows(codes_NK, rows.scales_NG, offsets_NG, kind, raw.numpy(), floats)
        self._keep(first_row, num_rows, kind, raw)

    def _keep(self, first_row: int, num_rows: int, kind: int, raw_PGB: Tensor) -> None:
        self._parts[first_row] = (num_rows, kind, raw_PGB)
        self._panels_P4 = None

    def store_bias(self, first_row: int, bias_N: Tensor) -> None:
        self.bias_N[first_row : first_row + bias_N.shape[0]].copy_(bias_N)

    def panels(self) -> Tensor:
        """[P, 4] int64: address, kind, first feature, features; in the order of the features."""
        if self._panels_P4 is None:
            rows: list[tuple[int, int, int, int]] = []
            end_row = 0
            for first_row, (num_rows, kind, panels) in sorted(self._parts.items()):
                assert first_row == end_row, f"rows {end_row} to {first_row} were never stored"
                end_row += num_rows
                for panel in range(panels.shape[0]):
                    first = first_row + panel * PANEL_WIDTH
                    address = panels.data_ptr() + panel * panels.stride(0)
                    rows.append((address, kind, first, min(PANEL_WIDTH, end_row - first)))
            assert end_row == self.out_features, f"rows from {end_row} on were never stored"
            self._panels_P4 = torch.tensor(rows)
        return self._panels_P4

    def columns(self, index_T: Tensor) -> Tensor:
        """Rows `index_T` of the weight as checkpoints hold it, [T, K]: an embedding look-up."""
        panels_P4 = self.panels()
        panel_T = torch.searchsorted(panels_P4[:, 2].contiguous(), index_T, right=True) - 1
        lane_T = index_T - panels_P4[panel_T, 2]
        out_TK = torch.empty(index_T.shape[0], self.in_features)
        read_rows(panels_P4.numpy(), panel_T.numpy(), lane_T.numpy(), out_TK.numpy())
        return out_TK

    def product(self, x_TK: Tensor) -> Tensor:
        """[T, N], contiguous."""
        out_TN = torch.empty(x_TK.shape[0], self.out_features)
        self._run(x_TK, out_TN, STORE)
        return out_TN

    def add_product(self, x_TK: Tensor, out_TN: Tensor) -> None:
        """`out += product(x)` in place; `out_TN` is contiguous."""
        self._run(x_TK, out_TN, ADD)

    def gated_product(self, x_TK: Tensor) -> Tensor:
        """`silu(first half of product(x)) * second half`; each half is a part."""
        out_TN = torch.empty(x_TK.shape[0], self.out_features // 2)
        self._run(x_TK, out_TN, GATE)
        return out_TN

    def _run(self, x_TK: Tensor, out_TN: Tensor, then: int) -> None:
        padding = self.num_groups * GROUP - self.in_features
        x = pad(x_TK, (0, padding)) if padding else x_TK.contiguous()
        arrays = (self.panels().numpy(), x.numpy(), self.bias_N.numpy(), out_TN.numpy())

        def job(_: int, __: int, counters: int, scratch: NDArray[np.float32]) -> None:
            panel_product(*arrays, then, counters, scratch)

        thread_team().run(job)
