"""The decodes of a step: who they are, and what is the same as long as they are.

Owns nothing that changes; the runner makes a new one when the core's list changes. Legend: D
decodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cearx.core.identifiers import RequestId
from cearx.worker.request_states import RequestState


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    request_ids: tuple[RequestId, ...]
    states: tuple[RequestState, ...]
    seats_D: NDArray[np.int32]
    is_filtered: bool
    """Whether some row has top_k, top_p or min_p."""
    may_need_logits: bool
    """Whether some row's output may have to be made on the host."""


def decode_group(request_ids: tuple[RequestId, ...], states: Sequence[RequestState]) -> DecodeGroup:
    """The group of these requests, all of which run."""
    return DecodeGroup(
        request_ids=request_ids,
        states=tuple(states),
        seats_D=np.array([state.seat for state in states], np.int32),
        is_filtered=is_filtered(states),
        may_need_logits=may_need_logits(states),
    )


def is_filtered(states: Sequence[RequestState]) -> bool:
    return any(state.rule is not None and state.rule.is_filtered for state in states)


def may_need_logits(states: Sequence[RequestState]) -> bool:
    return any(
        state.pooling is not None or (state.rule is not None and state.rule.may_need_logits)
        for state in states
    )
