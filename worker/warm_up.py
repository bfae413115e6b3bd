"""Warm-up: a few real steps before the worker says that it is ready.

Owns the shapes that are run: a prefill, a decode beside prefills, and several decodes, greedy and
random. Uses the step runner as the core will, and leaves no request behind. Called once by the
process; what it writes to the KV cache, nobody reads.
"""

from cearx.core.events import Admission, BlocksGranted, PrefillChunk, StepPlan
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.messages import ExecuteStep, NewRequest, SamplingParams, pack_tokens
from cearx.worker.step_runner import StepRunner

MAX_REQUESTS = 4
MAX_PROMPT_TOKENS = 32


def warm_up(
    runner: StepRunner,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    """Runs the steps that fit the sizes; raises what the model raises."""
    length = max(1, min(MAX_PROMPT_TOKENS, max_model_len - 1, max_num_batched_tokens // 8))
    blocks_each = -(-(length + 1) // block_size)
    if blocks_each > num_blocks:
        return  # a pool of a single one-token block holds no request of two tokens
    count = min(MAX_REQUESTS, max_num_seqs, num_blocks // blocks_each)
    first, others = RequestId(0), [RequestId(i) for i in range(1, count)]
    runner.execute(_step(0, arriving=[first], length=length, blocks_each=blocks_each))
    runner.execute(
        _step(1, decodes=[first], arriving=others, length=length, blocks_each=blocks_each)
    )
    if others:
        runner.execute(_step(2, decodes=others))
    runner.execute(_step(3, ended=[first, *others]))


def _step(
    step_id: int,
    *,
    decodes: list[RequestId] | None = None,
    arriving: list[RequestId] | None = None,
    ended: list[RequestId] | None = None,
    length: int = 0,
    blocks_each: int = 0,
) -> ExecuteStep:
    """Decodes of running requests beside whole prompts of arriving ones."""
    new = arriving or []
    plan = StepPlan(
        step_id=StepId(step_id),
        decodes=tuple(decodes or ()),
        chunks=tuple(
            PrefillChunk(request_id=r, start=0, num_tokens=length, samples=True) for r in new
        ),
        granted=tuple(
            BlocksGranted(
                request_id=r,
                block_ids=tuple(BlockId(r * blocks_each + i) for i in range(blocks_each)),
            )
            for r in new
        ),
        admitted=tuple(Admission(request_id=r, num_cached_tokens=0) for r in new),
        preempted=(),
        waits=(),
    )
    arrivals = tuple(
        NewRequest(
            request_id=r,
            token_ids=pack_tokens([0] * length),
            # Random and greedy rows in turns, so that both ways of sampling have run once.
            sampling=SamplingParams(temperature=r % 2),
        )
        for r in new
    )
    return ExecuteStep(plan=plan, new_requests=arrivals, ended=tuple(ended or ()))
