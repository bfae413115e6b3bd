"""A model that sees nothing but the KV cache, and the engine and a step runner around it.

The model writes each token's id where the slot mapping says, reads a request's whole history back
through its block table, and answers a hash of it. So a token is right only if every input of every
step before it was.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cearx.core.block_hash import prompt_hashes, root_hash
from cearx.core.config import SchedulerConfig
from cearx.core.engine import Engine
from cearx.core.event_log import NullLog
from cearx.core.events import CancelReason, FinishReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import (
    Cancel,
    ExecuteStep,
    SamplingParams,
    Submit,
    TokenLogprobs,
    pack_tokens,
)
from cearx.worker.attention import AttentionMetadata
from cearx.worker.batch_inputs import BatchInputsBuilder
from cearx.worker.request_states import RequestStates
from cearx.worker.sampler import Sampler
from cearx.worker.seats import SeatTable
from cearx.worker.step_runner import StepRunner

VOCAB_SIZE = 97
MAX_MODEL_LEN = 64
SECRET = bytes(32)


def history_logits(history: Sequence[int]) -> np.ndarray:
    """Logits that any change of a token, of the order or of the length changes."""
    value = 7
    for token_id in history:
        value = (value * 1_000_003 + token_id + 1) % (2**61 - 1)
    return np.random.default_rng(value).normal(0, 2, VOCAB_SIZE).astype(np.float32)


class HistoryModel:
    """Keeps token ids in place of keys and values; an unwritten slot holds -1."""

    def __init__(self, num_blocks: int, block_size: int, max_rows: int = 16) -> None:
        self.block_size = block_size
        self.max_rows = max_rows
        """Most rows of logits that may exist at a time."""
        self.slots = np.full((num_blocks * block_size, 2), -1)
        self.num_steps = 0

    def hidden_states(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Checks the contract of each input; a token's "state" is the history behind it [T, V]."""
        self.num_steps += 1
        starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
        for tensor in (input_ids_T, positions_T, metadata.slot_mapping, metadata.cu_seqlens_q):
            assert tensor.dtype == torch.int64
        slots = metadata.slot_mapping.numpy()
        assert starts[-1] == len(input_ids_T) == len(positions_T) == len(slots)
        assert len(set(slots.tolist())) == len(slots)
        self.slots[slots, 0] = input_ids_T.numpy()
        self.slots[slots, 1] = positions_T.numpy()
        states = []
        for row, length in enumerate(lengths):
            assert row >= metadata.num_decodes or starts[row] == row
            table = metadata.block_tables[row].tolist()
            where = [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(length)
            ]
            assert self.slots[where, 1].tolist() == list(range(length))
            history = self.slots[where, 0].tolist()
            num_new = starts[row + 1] - starts[row]
            states += [history_logits(history[: length - n]) for n in reversed(range(num_new))]
        return torch.from_numpy(np.array(states, np.float32).reshape(-1, VOCAB_SIZE))

    def logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        """The "states" are logits already."""
        assert len(x_RE) <= self.max_rows
        return x_RE.clone()

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
        logits_indices_R: torch.Tensor,
    ) -> torch.Tensor:
        """The logits of the last token of each row that samples."""
        states_TV = self.hidden_states(input_ids_T, positions_T, kv_cache, metadata)
        assert set(logits_indices_R.tolist()) <= {
            end - 1 for end in metadata.cu_seqlens_q[1:].tolist()
        }
        return self.logits(states_TV[logits_indices_R])


class Serving:
    """The core's engine and a step runner, without processes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        caching: bool,
        depth: int = 2,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.config = SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            pipeline_depth=depth,
            admission="greedy",
        )
        self.engine = Engine(self.config, SECRET, NullLog())
        seats = SeatTable(max_num_seqs, max_model_len, block_size)
        self.states = RequestStates(seats, VOCAB_SIZE)
        self.model = HistoryModel(num_blocks, block_size, max_num_seqs)
        self.runner = StepRunner(
            self.model,
            None,  # type: ignore[arg-type]
            self.states,
            BatchInputsBuilder(self.states, max_num_seqs, budget),
            Sampler(VOCAB_SIZE),
        )
        self.tokens: dict[int, list[int]] = {}
        self.told: dict[int, list[TokenLogprobs]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.num_preemptions = 0
        self.num_cached = 0
        self._in_flight: deque[ExecuteStep] = deque()

    def submit(
        self,
        key: int,
        prompt: Sequence[int],
        count: int,
        params: SamplingParams,
        grammar: str | None = None,
    ) -> None:
        """A request as a frontend sends it; one that is refused must not be in a test."""
        packed, root = pack_tokens(list(prompt)), root_hash(SECRET, None)
        if params.num_prompt_logprobs is not None:  # a prompt that nobody shares
            root = root_hash(SECRET, f"request {key}")
        hashes = prompt_hashes(SECRET, root, packed, self.config.block_size)
        self.tokens[key], self.told[key] = [], []
        refused = self.engine.submit(
            0,
            Submit(
                request_key=RequestKey(key),
                token_ids=packed,
                block_hashes=hashes if self.config.enable_prefix_caching else (),
                cache_root=root,
                max_tokens=count,
                sampling=params,
                grammar=grammar,
            ),
            0,
        )
        assert refused is None

    def cancel(self, key: int) -> None:
        """Takes a request back."""
        self.engine.cancel(0, Cancel(request_key=RequestKey(key), reason=CancelReason.DISCONNECT))

    def step(self) -> None:
        """Plans ahead as far as may be, and takes in the oldest step's outputs."""
        while self.engine.wants_step:
            message = self.engine.next_step()
            if message is not None:
                self._in_flight.append(message)
                self.num_preemptions += len(message.plan.preempted)
                self.num_cached += sum(a.num_cached_tokens for a in message.plan.admitted)
        result = self.runner.execute(self._in_flight.popleft())
        for outputs in self.engine.finish_step(result).values():
            for output in outputs:
                self.tokens[output.request_key].extend(output.token_ids)
                self.told[output.request_key].extend(output.prompt_logprobs)
                if output.finish_reason is not None:
                    self.reasons[output.request_key] = output.finish_reason

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.is_busy:
            self.step()

    @property
    def is_busy(self) -> bool:
        return self.engine.wants_step or bool(self._in_flight)
