"""The step under construction: what is decided so far, and what is left of its budget.

Plain state that the planning functions fill in turn: `decode_planning.py`, `chunk_planning.py`,
`admitting.py`, `making_way.py`. Decides nothing. Made anew for every step by `planner.py`.
"""

from cearx.core.events import (
    Admission,
    BlocksGranted,
    PrefillChunk,
    RequestWaits,
    WaitReason,
)
from cearx.core.identifiers import BlockId, RequestId
from cearx.core.request import Request


class StepDraft:
    """See the module docstring."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that may still be computed."""
        self.decodes: tuple[RequestId, ...] = ()
        self.chunks: list[PrefillChunk] = []
        self.granted: list[BlocksGranted] = []
        self.admitted: list[Admission] = []
        self.preempted: list[RequestId] = []
        self.waits: list[RequestWaits] = []
        self.finishing: list[Request] = []
        """Members of the batch whose last row this is."""
        self.is_short_of_blocks = False
        self.blocked: tuple[RequestId, int] | None = None
        """The head of the queue, if only a change of the books can help it."""
        self.num_partial = 0
        """Prompts that stay computed in part behind this step."""

    def grant(self, request: Request, block_ids: list[BlockId]) -> None:
        self.granted.append(
            BlocksGranted(request_id=request.request_id, block_ids=tuple(block_ids))
        )

    def wait(self, request: Request, reason: WaitReason) -> None:
        self.waits.append(RequestWaits(request_id=request.request_id, reason=reason))
