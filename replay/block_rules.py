"""Which blocks a plan may grant: those that exist (I1) and that nobody holds (I2), and of a cached
head those that hold what their hash says (I3).

Pure functions of the ledger and the plan. Called by `invariants.py` before the plan is in the
books.
"""

from collections.abc import Iterator

from cearx.core.events import BlocksGranted, StepPlan
from cearx.core.identifiers import BlockId, RequestId
from cearx.replay.ledger import Ledger
from cearx.replay.violation import Finding


def judge_grants(ledger: Ledger, plan: StepPlan) -> Iterator[Finding]:
    """Every block that a plan grants, before the plan is in the books."""
    size = ledger.config.block_size
    hits = {a.request_id: a.num_cached_tokens // size for a in plan.admitted}
    for request_id in plan.preempted:
        hits.setdefault(request_id, 0)
    freed = _freed_by(ledger, plan)
    taken: dict[BlockId, RequestId] = {}
    for grant in plan.granted:
        num_hits = hits.get(grant.request_id, 0)
        if grant.request_id not in ledger.live:
            text = f"request {grant.request_id} has ended and gets blocks"
            yield "I8", text, (grant.request_id,)
        yield from _judge_shared(ledger, grant, num_hits, taken)
        for block in grant.block_ids[num_hits:]:
            if not 0 <= block < ledger.config.num_blocks:
                text = f"block {block} of {ledger.config.num_blocks} is granted"
                yield "I1", text, (grant.request_id,)
                continue
            holders = ledger.blocks.num_holders(block) - freed.get(block, 0)
            if holders > 0 or block in taken:
                text = f"block {block} is held and granted to {grant.request_id}"
                yield "I2", text, (grant.request_id,)
            taken[block] = grant.request_id


def _freed_by(ledger: Ledger, plan: StepPlan) -> dict[BlockId, int]:
    """Holders that the plan's preemptions take away, if no step in flight touches them."""
    freed: dict[BlockId, int] = {}
    for request_id in plan.preempted:
        request = ledger.live.get(request_id)
        if request is not None and request.last_step not in ledger.in_flight:
            for block in request.block_ids:
                freed[block] = freed.get(block, 0) + 1
    return freed


def _judge_shared(
    ledger: Ledger, grant: BlocksGranted, num_hits: int, taken: dict[BlockId, RequestId]
) -> Iterator[Finding]:
    """The cached head of an admission: each block is findable under the right hash."""
    request = ledger.live.get(grant.request_id)
    hashes = [] if request is None else request.block_hashes
    if num_hits > min(len(hashes), len(grant.block_ids)):
        text = f"request {grant.request_id} hits {num_hits} blocks and has {len(hashes)} hashes"
        yield "I3", text, (grant.request_id,)
        return
    for index, block in enumerate(grant.block_ids[:num_hits]):
        known = 0 <= block < ledger.config.num_blocks and block not in taken
        if not known or ledger.blocks.content(block) != hashes[index]:
            text = f"block {block} does not hold block {index} of request {grant.request_id}"
            yield "I3", text, (grant.request_id,)
