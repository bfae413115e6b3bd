"""The decoder with everything that it computes in: KV pool, workspace, a step's static tensors.

Owns the memory whose addresses captured graphs hold. Never knows requests. Called by the runner,
and at start by the measurements and the capture.
Legend: R rows, B blocks, K key-value heads, P block size, D head dim.
"""

import torch
from torch import Tensor

from cearx.kernels.sampling import sample
from cearx.kernels.sampling_state import SamplingScratch
from cearx.worker.cuda.decoder import DeviceDecoder, StepTensors, Workspace
from cearx.worker.cuda.device_batch import DeviceBatch
from cearx.worker.cuda.graph_runner import Mode
from cearx.worker.cuda.step_builder import prepare_decodes


class DeviceModel:
    """One decoder with room for the largest step."""

    def __init__(
        self,
        decoder: DeviceDecoder,
        batch: DeviceBatch,
        workspace: Workspace,
        block_size: int,
        kv_dtype: torch.dtype,
    ) -> None:
        self.decoder = decoder
        self.batch = batch
        self.block_size = block_size
        self._kv_dtype = kv_dtype
        self.kv_layers_B2KPD: list[Tensor] = []
        self.spare_slot = 0
        """Where padded tokens are written: in the spare block."""
        self._workspace = workspace
        max_num_rows = batch.spare_seat
        device = decoder.device
        self.tokens_R = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self._sampling_scratch = SamplingScratch.allocate(
            max_num_rows, decoder.config.vocab_size, device
        )
        self._decode_words = torch.zeros(3, max_num_rows, dtype=torch.int64, device=device)
        self._seq_lens_R = torch.zeros(max_num_rows, dtype=torch.int32, device=device)

    def allocate_kv(self, num_blocks: int) -> None:
        """A pool for each layer with one spare block behind the others, all zero.

        Zeros, because attention multiplies what lies behind a request's last token by zero, and
        memory that was never written may hold what is not a number. Replaces a pool that there is.
        """
        config, decoder = self.decoder.config, self.decoder
        self.kv_layers_B2KPD.clear()
        shape = (num_blocks + 1, 2, config.num_kv_heads, self.block_size, config.head_dim)
        for _ in range(config.num_layers):
            pool = torch.zeros(shape, dtype=self._kv_dtype, device=decoder.device)
            self.kv_layers_B2KPD.append(pool)
        self.batch.set_spare_block(num_blocks)
        self.spare_slot = num_blocks * self.block_size

    def decode(self, size: int, mode: Mode) -> None:
        """A whole decode step of the batch's first `size` rows, padded ones included.

        Reads nothing but the device's memory, so it can be captured. Tokens go to `tokens_R`, in
        mode 'logits' the logits stay in the workspace (`logits`).
        """
        input_ids_R, positions_R, slots_R = self._decode_words[:, :size].unbind()
        tensors = StepTensors(
            input_ids_T=input_ids_R,
            positions_T=positions_R,
            slots_T=slots_R,
            block_tables_SM=self.batch.block_tables_SM,
            seats_D=self.batch.decode_seats_R[:size],
            seq_lens_D=self._seq_lens_R[:size],
        )
        prepare_decodes(tensors, self.batch, self.block_size)
        logits_RV = self.forward(tensors)
        if mode != "logits":
            self.sample(logits_RV, tensors.seats_D, mode)

    def forward(self, tensors: StepTensors) -> Tensor:
        """Logits [R, V]; they hold until the next step."""
        return self.decoder.forward(tensors, self.kv_layers_B2KPD, self._workspace)

    def run_products(self, num_tokens: int) -> None:
        """Those of one layer and of the head, for their side effect; see the decoder."""
        self.decoder.run_products(num_tokens, self._workspace)

    def logits(self, num_rows: int) -> Tensor:
        """Those that the last `decode` left."""
        return self._workspace.logits_RV[:num_rows]

    def final_states(self, num_rows: int) -> Tensor:
        """[R, E]: what the last step's first rows of logits were made of, behind the final norm."""
        return self._workspace.normed_TE[:num_rows]

    def sample(self, logits_RV: Tensor, seats_R: Tensor, mode: Mode) -> Tensor:
        """Tokens of the rows, in `tokens_R` and in their seats; -1 for a row without one."""
        assert mode != "logits", "nothing to sample"
        tokens_R = self.tokens_R[: len(logits_RV)]
        sample(
            logits_RV,
            seats_R,
            self.batch.sampling,
            tokens_R,
            self._sampling_scratch,
            mode=mode,
        )
        return tokens_R
