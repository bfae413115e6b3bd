"""A step as the core would send it, for warm-up: decodes, whole prompts, ends.

Owns the message's shape and nothing else; which steps are run is for each device to know. Called by
the warm-ups of the CPU and of CUDA.
"""

from collections.abc import Sequence

from cearx.core.config import Task
from cearx.core.events import Admission, BlocksGranted, PrefillChunk, StepPlan
from cearx.core.identifiers import BlockId, RequestId, StepId
from cearx.core.messages import (
    Embed,
    ExecuteStep,
    NewRequest,
    Pooling,
    SamplingParams,
    Score,
    pack_tokens,
)

PROBES: dict[Task, Pooling] = {"embed": Embed(), "score": Score(negative=0, positive=0)}
"""What the prompts of a warm-up ask for where they bring no tokens."""


def warm_up_step(
    *,
    decodes: Sequence[RequestId] = (),
    arriving: Sequence[RequestId] = (),
    ended: Sequence[RequestId] = (),
    length: int = 0,
    blocks_each: int = 0,
    sampling: Sequence[SamplingParams] = (),
    pooling: Pooling | None = None,
) -> ExecuteStep:
    """Decodes of running requests beside whole prompts of `length` tokens of arriving ones.

    Request r has blocks r * blocks_each and those behind it, and the rule r of `sampling`, which
    goes round.
    """
    plan = StepPlan(
        step_id=StepId(0),
        decodes=tuple(decodes),
        chunks=tuple(
            PrefillChunk(request_id=r, start=0, num_tokens=length, samples=True) for r in arriving
        ),
        granted=tuple(
            BlocksGranted(
                request_id=r,
                block_ids=tuple(BlockId(r * blocks_each + i) for i in range(blocks_each)),
            )
            for r in arriving
        ),
        admitted=tuple(Admission(request_id=r, num_cached_tokens=0) for r in arriving),
        preempted=(),
        waits=(),
    )
    arrivals = tuple(
        NewRequest(
            request_id=r,
            token_ids=pack_tokens([0] * length),
            sampling=sampling[r % len(sampling)],
            pooling=pooling,
        )
        for r in arriving
    )
    return ExecuteStep(plan=plan, new_requests=arrivals, ended=tuple(ended))
