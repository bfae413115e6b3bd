"""What breaking a rule looks like.

Owns the two structs and the type between them; judges nothing. Made by the rules and by
`invariants.py`.
"""

import msgspec

from cearx.core.identifiers import RequestId, StepId

Finding = tuple[str, str, tuple[RequestId, ...]]
"""Rule, what is wrong, who is concerned."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that a record breaks."""

    invariant: str
    seq: int
    offset: int
    step_id: StepId | None
    """The step planned last."""
    text: str
    request_ids: tuple[RequestId, ...]
