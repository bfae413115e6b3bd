"""Warm-up: a few real steps before the worker says that it is ready.

Owns the shapes that are run: a prefill, a decode beside prefills, and several decodes, greedy and
random. Uses the step runner as the core will, and leaves no request behind. Called once by the
process; what it writes to the KV cache, nobody reads.
"""

from cearx.core.identifiers import RequestId
from cearx.core.messages import Pooling, SamplingParams
from cearx.worker.step_runner import StepRunner
from cearx.worker.warm_up_step import warm_up_step

MAX_REQUESTS = 4
MAX_PROMPT_TOKENS = 32
SAMPLING = (SamplingParams(temperature=0), SamplingParams(temperature=1))
"""Random and greedy rows in turns, so that both ways of sampling have run once."""


def warm_up(
    runner: StepRunner,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    pooling: Pooling | None = None,
) -> None:
    """Runs the steps that fit the sizes; raises what the model raises.

    With `pooling` the prompts bring vectors, and nothing decodes.
    """
    length = max(1, min(MAX_PROMPT_TOKENS, max_model_len - 1, max_num_batched_tokens // 8))
    blocks_each = -(-(length + 1) // block_size)
    if blocks_each > num_blocks:
        return  # a pool of a single one-token block holds no request of two tokens
    count = min(MAX_REQUESTS, max_num_seqs, num_blocks // blocks_each)
    first, others = RequestId(0), [RequestId(i) for i in range(1, count)]
    runner.execute(
        warm_up_step(
            arriving=[first],
            length=length,
            blocks_each=blocks_each,
            sampling=SAMPLING,
            pooling=pooling,
        )
    )
    if pooling is not None:
        runner.execute(warm_up_step(ended=[first]))
        return
    runner.execute(
        warm_up_step(
            decodes=[first],
            arriving=others,
            length=length,
            blocks_each=blocks_each,
            sampling=SAMPLING,
        )
    )
    if others:
        runner.execute(warm_up_step(decodes=others))
    runner.execute(warm_up_step(ended=[first, *others]))
