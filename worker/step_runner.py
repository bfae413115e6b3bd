"""One step: from the core's message to the tokens it asked for.

Owns the order of a step's work: states, inputs, forward pass, sampling, states. Never touches a
socket or a clock other than the step's own stopwatch. Called by the process's loop and by warm-up.
"""

import time
from collections import deque
from collections.abc import Sequence

import torch

from cearx.core.events import StepPlan
from cearx.core.messages import ExecuteStep, PromptLogprobs, RowOutput, StepResult
from cearx.worker.batch_inputs import BatchInputs, BatchInputsBuilder
from cearx.worker.grammar_table import GrammarTable
from cearx.worker.kv_cache import KVCache
from cearx.worker.models.interface import LanguageModel
from cearx.worker.pooling import Pooler
from cearx.worker.prompt_logprobs import prompt_logprobs, wants_prompt_logprobs
from cearx.worker.request_states import RequestState, RequestStates
from cearx.worker.sampler import Sampler


class StepRunner:
    """A model, its KV cache, and the requests whose steps it runs."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        states: RequestStates,
        inputs: BatchInputsBuilder,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._states = states
        self._inputs = inputs
        self._sampler = sampler
        self._pooler = Pooler(lambda token_ids: model.head_rows(token_ids))
        self._results: deque[StepResult] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._results)

    def launch(self, step: ExecuteStep) -> None:
        """Runs a step to its end; `collect` answers its result."""
        self._results.append(self.execute(step))

    def collect(self) -> StepResult | None:
        """The result of the oldest step that was launched and not collected."""
        return self._results.popleft() if self._results else None

    @property
    def grammars(self) -> GrammarTable:
        """What the requests' grammars are compiled in."""
        return self._states.grammars

    @torch.inference_mode()
    def execute(self, step: ExecuteStep) -> StepResult:
        """Runs a step to its end. An exception means that no further step can be trusted."""
        start_ns = time.monotonic_ns()
        self._states.begin_step(step)
        rows: tuple[RowOutput, ...] = ()
        told: tuple[PromptLogprobs, ...] = ()
        launched_ns = computed_ns = start_ns
        if step.plan.decodes or step.plan.chunks:
            batch = self._inputs.build(step.plan)
            launched_ns = time.monotonic_ns()
            x_RE, told = self._forward(step.plan, batch)
            rows = self._rows(x_RE, batch.sampled)
            computed_ns = time.monotonic_ns()
            self._states.finish_step(rows)
        return StepResult(
            step_id=step.plan.step_id,
            rows=rows,
            execute_us=(time.monotonic_ns() - start_ns) // 1000,
            prompt_logprobs=told,
            launch_us=(launched_ns - start_ns) // 1000,
            device_us=(computed_ns - launched_ns) // 1000,
        )

    def _forward(
        self, plan: StepPlan, batch: BatchInputs
    ) -> tuple[torch.Tensor, tuple[PromptLogprobs, ...]]:
        """The hidden states of the rows with an output, and what the step tells of prompts."""
        x_TE = self._model.hidden_states(
            batch.input_ids_T, batch.positions_T, self._kv_cache, batch.metadata
        )
        told: tuple[PromptLogprobs, ...] = ()
        if any(wants_prompt_logprobs(self._states[c.request_id]) for c in plan.chunks):
            max_rows = self._states.seats.num_seats
            told = prompt_logprobs(plan, self._states, x_TE, self._model.logits, max_rows)
        return x_TE[batch.logits_indices_R], told

    def _rows(self, x_RE: torch.Tensor, requests: Sequence[RequestState]) -> tuple[RowOutput, ...]:
        """A token of each row, or a vector where the request asks for one."""
        pooled = [i for i, request in enumerate(requests) if request.pooling is not None]
        if not requests:
            return ()
        if not pooled:
            return self._sampler.sample(self._model.logits(x_RE), requests)
        sampled = [i for i, request in enumerate(requests) if request.pooling is None]
        vectors = self._pooler.pool(
            self._model.final_norm(x_RE[pooled]), [requests[i] for i in pooled]
        )
        rows = dict(zip(pooled, vectors, strict=True))
        if sampled:
            logits_RV = self._model.logits(x_RE[sampled])
            tokens = self._sampler.sample(logits_RV, [requests[i] for i in sampled])
            rows |= zip(sampled, tokens, strict=True)
        return tuple(rows[i] for i in range(len(requests)))
