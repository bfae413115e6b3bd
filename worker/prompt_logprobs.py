"""Log-probabilities of a prompt's own tokens, told chunk by chunk as the prompt is computed.

Owns which rows of a step tell of which tokens, and that only a few rows of logits exist at a time.
Never samples. Called by the step runner for steps with a request that asks for them.
Legend: T tokens of the step, E hidden size, R rows with logits, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from cearx.core.events import PrefillChunk, StepPlan
from cearx.core.messages import PromptLogprobs, TokenLogprobs
from cearx.worker.logprobs import token_logprobs
from cearx.worker.request_states import RequestState, RequestStates

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [R, E] to logits [R, V] in float32."""


def wants_prompt_logprobs(state: RequestState) -> bool:
    return state.rule is not None and state.rule.params.num_prompt_logprobs is not None


def prompt_logprobs(
    plan: StepPlan, states: RequestStates, x_TE: torch.Tensor, logits: Logits, max_rows: int
) -> tuple[PromptLogprobs, ...]:
    """What the chunks of a step tell; at most `max_rows` rows of logits exist at a time.

    A request whose logits are not finite is marked as failed, so that its sampling fails.
    """
    told: list[PromptLogprobs] = []
    begin = len(plan.decodes)
    for chunk in plan.chunks:
        state = states[chunk.request_id]
        num_told = _num_told(chunk, state)
        if num_told > 0 and wants_prompt_logprobs(state):
            rows_RE = x_TE[begin : begin + num_told]
            found = _chunk_logprobs(chunk, state, rows_RE, logits, max_rows)
            if found is not None:
                told.append(
                    PromptLogprobs(
                        request_id=chunk.request_id, start=chunk.start + 1, logprobs=found
                    )
                )
        begin += chunk.num_tokens
    return tuple(told)


def _num_told(chunk: PrefillChunk, state: RequestState) -> int:
    """The token at position p tells of the prompt's token p + 1; the last one tells of none."""
    return min(chunk.start + chunk.num_tokens, state.num_prompt_tokens - 1) - chunk.start


def _chunk_logprobs(
    chunk: PrefillChunk, state: RequestState, x_RE: torch.Tensor, logits: Logits, max_rows: int
) -> tuple[TokenLogprobs, ...] | None:
    assert state.rule is not None and state.rule.params.num_prompt_logprobs is not None
    num_top = state.rule.params.num_prompt_logprobs
    first = chunk.start + 1
    found: list[TokenLogprobs] = []
    for offset in range(0, len(x_RE), max_rows):
        logits_RV = logits(x_RE[offset : offset + max_rows])
        log_sums_R = torch.logsumexp(logits_RV.double(), dim=-1)
        if not bool(log_sums_R.isfinite().all()):
            state.fail("the model's logits of the prompt are not finite")
            return None
        raw_RV: NDArray[np.float32] = logits_RV.numpy()
        start = first + offset
        targets = state.tokens(start, start + len(raw_RV)).tolist()
        for raw_V, log_sum, token_id in zip(raw_RV, log_sums_R.tolist(), targets, strict=True):
            found.append(token_logprobs(raw_V, log_sum, token_id, num_top))
    return tuple(found)
