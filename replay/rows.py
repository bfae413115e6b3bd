"""The rows of a planned step, decodes and chunks alike, and how many tokens they compute.

Owns no state. Called by whatever of this folder reads plans.
"""

from collections.abc import Iterator

import msgspec

from cearx.core.events import StepPlan
from cearx.core.identifiers import RequestId


class Row(msgspec.Struct, frozen=True):
    """What one request gets in a step."""

    request_id: RequestId
    num_tokens: int
    samples: bool


def rows(plan: StepPlan) -> Iterator[Row]:
    """The rows of a step: decodes, then chunks."""
    for request_id in plan.decodes:
        yield Row(request_id, 1, True)
    for chunk in plan.chunks:
        yield Row(chunk.request_id, chunk.num_tokens, chunk.samples)


def num_batched_tokens(plan: StepPlan) -> int:
    """Tokens computed in a step: what counts against the budget."""
    return len(plan.decodes) + sum(chunk.num_tokens for chunk in plan.chunks)


def num_attended(plan: StepPlan) -> int:
    """Pairs of a token of a chunk and one that it attends to: what its attention computes."""
    return sum(
        chunk.num_tokens * chunk.start + chunk.num_tokens * (chunk.num_tokens + 1) // 2
        for chunk in plan.chunks
    )
