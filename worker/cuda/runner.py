"""Steps on the device: launched without waiting, answered in order when their tokens are there.

Owns the steps in flight. The token of one step feeds the next on the device; the host learns it one
step late, which is enough, because it needs tokens only for rows that the device cannot sample and
for requests that are computed again. Driven by the process's loop: `launch` for each message,
`collect` whenever there may be a result.
Legend: R sampling rows, S seats, D decodes, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from cearx.core.events import PrefillChunk, StepPlan
from cearx.core.identifiers import StepId
from cearx.core.messages import ExecuteStep, RowOutput, StepResult
from cearx.worker.cuda.decode_group import DecodeGroup, decode_group, is_filtered, may_need_logits
from cearx.worker.cuda.device_model import DeviceModel
from cearx.worker.cuda.graph_runner import Mode, StepGraphs, padded_size
from cearx.worker.cuda.padded_steps import PaddedSteps
from cearx.worker.cuda.staging import InputStaging, TokenRing, TokenTicket
from cearx.worker.cuda.step_builder import ChunkWork, build_step
from cearx.worker.grammar_table import GrammarTable
from cearx.worker.pooling import Pooler
from cearx.worker.request_states import RequestState, RequestStates
from cearx.worker.sampler import Sampler

NO_PROMPT_LOGPROBS = "prompt_logprobs is not available on a CUDA device yet"
NOT_FINITE = "the model's logits are not finite"

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Part:
    """Rows that were sampled together: a whole step, but for one that had to be divided."""

    states: tuple[RequestState, ...]
    ticket: TokenTicket | None
    """None when `rows` are known."""
    rows: tuple[RowOutput, ...] = ()
    device_us: int = 0
    transfer_us: int = 0


@dataclass(slots=True, eq=False)
class _StepInFlight:
    step_id: StepId
    launched_ns: int
    launch_us: int
    parts: list[_Part]


class CudaRunner:
    """A model on the device and the requests whose steps it runs."""

    def __init__(
        self,
        model: DeviceModel,
        states: RequestStates,
        staging: InputStaging,
        ring: TokenRing,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._batch = model.batch
        self._states = states
        self._staging = staging
        self._ring = ring
        self._sampler = sampler
        self._pooler = Pooler(model.decoder.head_rows)
        self.graphs: StepGraphs | None = None
        """None: every kernel is launched by itself."""
        self.padded: PaddedSteps | None = None
        """None: no step with chunks is padded."""
        self._in_flight: deque[_StepInFlight] = deque()
        self._decodes = decode_group((), ())
        # What each seat will know when all that was launched is done.
        self._num_tokens_S = np.zeros(len(states.seats.num_tokens_S), np.int64)
        self._last_done_ns = 0

    def padded_steps(self, sizes: tuple[int, ...]) -> PaddedSteps:
        """Small steps with chunks of these sizes, for `padded`."""
        return PaddedSteps(sizes, self._model, self._staging, self._states.seats)

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._in_flight)

    @property
    def grammars(self) -> GrammarTable:
        """What the requests' grammars are compiled in."""
        return self._states.grammars

    @torch.inference_mode()
    def launch(self, step: ExecuteStep) -> None:
        """Enqueues a step. An exception means that no further step can be trusted."""
        launched_ns = time.monotonic_ns()
        if len(self._in_flight) >= self._ring.num_slots:
            self._settle(self._in_flight[-self._ring.num_slots])
        self._begin(step)
        plan = step.plan
        parts: list[_Part] = []
        if plan.decodes or plan.chunks:
            chunks = [self._chunk_work(chunk) for chunk in plan.chunks]
            try:
                parts.append(self._run(self._decodes, chunks))
            except torch.cuda.OutOfMemoryError:
                log.warning("out of memory: the step is tried again", num_chunks=len(chunks))
                parts = self._run_divided(self._decodes, chunks)
            if plan.chunks:
                for part in parts:
                    self._num_tokens_S[_seats(part.states)] += 1
            else:
                self._num_tokens_S[self._decodes.seats_D] += 1
        else:
            self._send_changes()
        launch_us = (time.monotonic_ns() - launched_ns) // 1000
        self._in_flight.append(_StepInFlight(plan.step_id, launched_ns, launch_us, parts))

    def collect(self) -> StepResult | None:
        """The result of the oldest step, once it is done; never waits."""
        if not self._in_flight:
            return None
        oldest = self._in_flight[0]
        if not all(part.ticket is None or part.ticket.is_done() for part in oldest.parts):
            return None
        self._settle(oldest)
        self._in_flight.popleft()
        now_ns = time.monotonic_ns()
        # The device begins with a step when the one before it is done.
        began_ns = max(oldest.launched_ns, self._last_done_ns)
        self._last_done_ns = now_ns
        return StepResult(
            step_id=oldest.step_id,
            rows=tuple(row for part in oldest.parts for row in part.rows),
            execute_us=(now_ns - began_ns) // 1000,
            launch_us=oldest.launch_us,
            device_us=sum(part.device_us for part in oldest.parts),
            transfer_us=sum(part.transfer_us for part in oldest.parts),
        )

    def execute(self, step: ExecuteStep) -> StepResult:
        """Launches a step and waits for its result; nothing else may be in flight."""
        assert not self._in_flight, "steps are in flight"
        self.launch(step)
        self._settle(self._in_flight[0])
        result = self.collect()
        assert result is not None
        return result

    # --- the host's side of a step --------------------------------------------------------------

    def _begin(self, step: ExecuteStep) -> None:
        """Applies what the step says before its work, here and (with the next copy) there."""
        plan, seats = step.plan, self._states.seats
        self._states.begin_step(step)
        for new in step.new_requests:
            if new.sampling.num_prompt_logprobs is not None:
                state = self._states[new.request_id]
                state.rule, state.error = None, NO_PROMPT_LOGPROBS
        for admission in plan.admitted:
            state = self._states[admission.request_id]
            assert state.seat is not None
            self._batch.seat(state.seat, state)
            self._num_tokens_S[state.seat] = state.num_tokens
        new_blocks: dict[int, int] = {}
        for grant in plan.granted:
            seat = self._states[grant.request_id].seat
            assert seat is not None
            new_blocks[seat] = new_blocks.get(seat, 0) + len(grant.block_ids)
        for seat, count in new_blocks.items():
            end = int(seats.num_blocks_S[seat])
            self._batch.set_blocks(seat, end - count, seats.block_table_SB[seat, end - count : end])
        if plan.decodes != self._decodes.request_ids:
            self._decodes = self._group(plan)
            self._batch.set_decode_seats(self._decodes.seats_D)
        decode_seats_D = self._decodes.seats_D
        num_blocks_D = -(-self._num_tokens_S[decode_seats_D] // seats.block_size)
        assert (num_blocks_D <= seats.num_blocks_S[decode_seats_D]).all(), (
            f"step {plan.step_id}: a request has fewer blocks than its tokens need"
        )

    def _group(self, plan: StepPlan) -> DecodeGroup:
        states = [self._states[request_id] for request_id in plan.decodes]
        for state in states:
            assert state.seat is not None, f"request {state.request_id} decodes and does not run"
        return decode_group(plan.decodes, states)

    def _chunk_work(self, chunk: PrefillChunk) -> ChunkWork:
        state, seats = self._states[chunk.request_id], self._states.seats
        end = chunk.start + chunk.num_tokens
        assert state.seat is not None, f"request {chunk.request_id} does not run"
        assert chunk.samples == (end == state.num_tokens), (
            f"request {chunk.request_id}: a chunk to token {end} of {state.num_tokens} "
            f"says samples={chunk.samples}"
        )
        assert end <= seats.num_blocks_S[state.seat] * seats.block_size, (
            f"request {chunk.request_id} has fewer blocks than {end} tokens need"
        )
        return ChunkWork(state, chunk.start, end, chunk.samples)

    # --- the device's side ----------------------------------------------------------------------

    def _run(self, decodes: DecodeGroup, chunks: Sequence[ChunkWork]) -> _Part:
        """Enqueues forward pass and sampling; waits only where the host has to sample."""
        states = (*decodes.states, *(chunk.state for chunk in chunks if chunk.samples))
        host_rows = self._host_rows(states) if _may_need_logits(decodes, chunks) else []
        filters = decodes.is_filtered or is_filtered([chunk.state for chunk in chunks])
        mode: Mode = "filtered" if filters else "plain"
        padded = self.padded if chunks else None
        size = padded.size_of(decodes, chunks, self._num_tokens_S) if padded is not None else None
        if padded is not None and size is not None:
            padded.send(size, decodes, chunks)
            self._ring.begin()
            padded.replay(size, "logits" if host_rows else mode)
            if not host_rows:
                return _Part(states, self._ring.fetch(self._model.tokens_R[: len(states)]))
            logits_RV = self._model.logits(len(states))
        elif chunks or self.graphs is None:
            built = build_step(decodes, chunks, self._batch, self._states.seats, self._staging)
            self._ring.begin()
            if not states:
                self._model.forward(built.tensors)
                return _Part((), self._ring.fetch(self._model.tokens_R[:0]))
            logits_RV = self._model.forward(built.tensors)
            if not host_rows:
                tokens_R = self._model.sample(logits_RV, built.sampled_seats_R, mode)
                return _Part(states, self._ring.fetch(tokens_R))
        else:
            self._send_changes()
            size = padded_size(self.graphs.sizes, len(states))
            self._ring.begin()
            self.graphs.replay(size, "logits" if host_rows else mode)
            if not host_rows:
                return _Part(states, self._ring.fetch(self._model.tokens_R[: len(states)]))
            logits_RV = self._model.logits(len(states))
        return self._sample_with_host(logits_RV, states, host_rows, mode)

    def _send_changes(self) -> None:
        if self._batch.has_changes:
            self._staging.begin()
            changes = self._batch.pack(self._staging)
            self._staging.send()
            self._batch.apply(changes)

    def _run_divided(self, decodes: DecodeGroup, chunks: Sequence[ChunkWork]) -> list[_Part]:
        """After a lack of memory: the same work in parts of at most half a chunk.

        Decodes, which allocate little, are only tried again. A second lack ends the server.
        """
        torch.cuda.empty_cache()
        no_decodes = decode_group((), ())
        parts = [self._run(decodes, ())] if decodes.states else []
        for chunk in chunks:
            for half in chunk.halves() if chunk.num_tokens > 1 else (chunk,):
                part = self._run(no_decodes, (half,))
                self._settle_part(part)
                parts.append(part)
        return parts

    def _host_rows(self, states: Sequence[RequestState]) -> list[int]:
        """Rows that need more than the device's sampler has, or bring no token."""
        rows = []
        for row, state in enumerate(states):
            num_outputs = int(self._num_tokens_S[state.seat]) - state.num_prompt_tokens
            if state.pooling is not None:
                rows.append(row)
            elif state.rule is not None and state.rule.needs_logits(num_outputs):
                rows.append(row)
        return rows

    def _sample_with_host(
        self,
        logits_RV: torch.Tensor,
        states: tuple[RequestState, ...],
        host_rows: list[int],
        mode: Mode,
    ) -> _Part:
        """Samples `host_rows` here, by all rules of the CPU's sampler, and the others there."""
        for earlier in self._in_flight:
            self._settle(earlier)  # penalties count every token before this one
        seats_R = _seats(states)
        seats_R[host_rows] = self._batch.spare_seat
        self._staging.begin()
        device_seats_R = self._staging.put(seats_R)
        device_rows = self._staging.put(np.array(host_rows, np.int64))
        self._staging.send()
        host_states = [states[row] for row in host_rows]
        sampled = self._make_outputs(logits_RV, device_rows, host_states)
        part = _Part(states, self._ring.fetch(self._model.sample(logits_RV, device_seats_R, mode)))
        self._settle_part(part, dict(zip(host_rows, sampled, strict=True)))
        for row, state in zip(sampled, host_states, strict=True):
            if row.token_id is not None:
                assert state.seat is not None
                self._batch.set_token(state.seat, state)
        self._send_changes()  # now: the next step may give the seat to somebody else
        return part

    def _make_outputs(
        self, logits_RV: torch.Tensor, rows: torch.Tensor, states: Sequence[RequestState]
    ) -> tuple[RowOutput, ...]:
        """The tokens or vectors of these rows of a step that was just enqueued."""
        pooled = [i for i, state in enumerate(states) if state.pooling is not None]
        sampled = [i for i, state in enumerate(states) if state.pooling is None]
        found: dict[int, RowOutput] = {}
        if pooled:
            states_RE = self._model.final_states(len(logits_RV)).index_select(0, rows).cpu()
            outputs = self._pooler.pool(states_RE[pooled], [states[i] for i in pooled])
            found |= zip(pooled, outputs, strict=True)
        if sampled:
            wanted_RV = logits_RV.index_select(0, rows).float().cpu()
            outputs = self._sampler.sample(wanted_RV[sampled], [states[i] for i in sampled])
            found |= zip(sampled, outputs, strict=True)
        return tuple(found[i] for i in range(len(states)))

    # --- results --------------------------------------------------------------------------------

    def _settle(self, step: _StepInFlight) -> None:
        """Takes in a step's tokens, waiting for them if need be."""
        for part in step.parts:
            self._settle_part(part)

    def _settle_part(self, part: _Part, known: dict[int, RowOutput] | None = None) -> None:
        """`known` are the outputs of rows that the host sampled."""
        if part.ticket is None:
            return
        rows = []
        for index, (state, token_id) in enumerate(
            zip(part.states, part.ticket.take(), strict=True)
        ):
            row = known.get(index) if known else None
            row = row or _row_output(state, token_id)
            if row.token_id is not None:
                state.add_output(row.token_id)
            rows.append(row)
        part.rows = tuple(rows)
        part.device_us, part.transfer_us = part.ticket.elapsed_us()
        part.ticket = None


def _seats(states: Sequence[RequestState]) -> NDArray[np.int32]:
    return np.array([state.seat for state in states], np.int32)


def _may_need_logits(decodes: DecodeGroup, chunks: Sequence[ChunkWork]) -> bool:
    return decodes.may_need_logits or may_need_logits([chunk.state for chunk in chunks])


def _row_output(state: RequestState, token_id: int) -> RowOutput:
    error = None
    if state.rule is None:
        error = state.error
    elif token_id < 0:
        error = NOT_FINITE
    return RowOutput(
        request_id=state.request_id,
        token_id=None if error is not None else token_id,
        logprobs=None,
        error=error,
    )
