"""Limits: queue, deadlines, shares of prefill, time between tokens; and what the state counts."""

import msgspec
from simulated_engine import SimulatedEngine

from cearx.core.config import SchedulerConfig
from cearx.core.events import FinishReason, RefusalReason, RequestRefused, WaitReason


def engine(**changes: object) -> SimulatedEngine:
    """Blocks of 4 tokens, 64 blocks, 4 seats, 64 tokens a step, unless changed."""
    config = SchedulerConfig(
        block_size=4,
        num_blocks=64,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    return SimulatedEngine(msgspec.structs.replace(config, **changes))


def refusals(simulated: SimulatedEngine) -> list[tuple[RefusalReason, int, int]]:
    assert isinstance(simulated.log, list)
    found = [record for record in simulated.log if isinstance(record, RequestRefused)]
    return [(r.reason, r.num_tokens, r.limit_tokens) for r in found]


def test_a_full_queue_refuses() -> None:
    """The third that would wait is refused, with both sizes, and the queue opens again."""
    simulated = engine(max_num_seqs=1, max_num_queued_reqs=2)
    simulated.arrive([1], 3)
    simulated.plan()
    simulated.finish()
    for _ in range(3):
        simulated.arrive([1], 3)
    assert refusals(simulated) == [(RefusalReason.QUEUE_FULL, 3, 2)]
    simulated.drain()
    simulated.arrive([1], 3)
    simulated.drain()
    assert len(refusals(simulated)) == 1


def test_a_burst_that_finds_seats_does_not_queue() -> None:
    """All come before the next plan: as many as there are seats, and then the limit."""
    simulated = engine(max_num_seqs=4, max_num_queued_reqs=2)
    for _ in range(8):
        simulated.arrive([1], 3)
    assert refusals(simulated) == [(RefusalReason.QUEUE_FULL, 3, 2)] * 2
    simulated.drain()


def test_a_queue_is_bounded_in_tokens() -> None:
    """Prompts are counted together; one alone may wait whatever its length."""
    simulated = engine(max_num_queued_tokens=30, max_num_seqs=1)
    simulated.arrive([1] * 3, 3)
    simulated.arrive([1] * 40, 3)
    simulated.arrive([1], 3)
    assert refusals(simulated) == [(RefusalReason.QUEUE_TOKENS, 44, 30)]
    simulated.drain()
    for _ in range(3):
        simulated.arrive([1] * 10, 3)
    simulated.arrive([1], 3)
    assert refusals(simulated)[1:] == [(RefusalReason.QUEUE_TOKENS, 31, 30)]
    simulated.drain()


def test_a_deadline_ends_a_request_in_any_state() -> None:
    """Running and waiting ones run out of time at their own moments, to the microsecond."""
    simulated = engine(max_num_seqs=1, request_timeout_us=50_000)
    first = simulated.arrive([1], 90)
    simulated.plan()
    second = simulated.arrive([2], 90)
    assert simulated.scheduler.next_deadline_us == 50_000
    simulated.advance(41_999)
    assert not simulated.ended
    simulated.advance(1)
    assert simulated.ended == {first: FinishReason.TIMEOUT}
    assert simulated.scheduler.books.pool.num_free < 64, "the step in flight still writes"
    simulated.advance(8_000)
    assert simulated.ended == dict.fromkeys((first, second), FinishReason.TIMEOUT)
    simulated.finish()
    assert simulated.scheduler.next_deadline_us is None
    simulated.drain()


def test_one_prompt_cannot_fill_a_step() -> None:
    """With a threshold a short prompt behind a long one is computed in the same step."""
    simulated = engine(long_prefill_token_threshold=20)
    simulated.arrive([1] * 100, 2)
    short = simulated.arrive([2] * 5, 2)
    plan = simulated.plan()
    assert [(c.num_tokens, c.samples) for c in plan.chunks] == [(20, False), (5, True)]
    assert plan.chunks[1].request_id == short
    simulated.drain()


def test_few_prompts_are_computed_in_part_at_once() -> None:
    """A second long prompt waits; one that fits into the step as a whole does not."""
    simulated = engine(long_prefill_token_threshold=20, max_num_partial_prefills=1)
    simulated.arrive([1] * 100, 2)
    waits = simulated.arrive([2] * 50, 2)
    plan = simulated.plan()
    assert [c.num_tokens for c in plan.chunks] == [20]
    assert [(w.request_id, w.reason) for w in plan.waits] == [(waits, WaitReason.PARTIAL_PREFILLS)]
    simulated.drain()


def test_chunks_leave_decodes_their_pace() -> None:
    """With a target of 10 ms, decodes of 8 ms and 50 us a token, 40 tokens fit in."""
    simulated = engine(target_itl_us=10_000)
    simulated.arrive([1], 90)
    sizes = []
    for step in range(40):
        if step % 8 == 4:
            simulated.arrive([step % 5, *[1] * 59], 1)
        plan = simulated.plan()
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        sizes.append(num_tokens)
        simulated.finish(execute_us=8_000 + 50 * num_tokens)
    assert sizes[4] > 40, "nobody knew yet"
    assert [size for size in sizes[5:] if size] and max(sizes[12:]) == 40
    simulated.drain()


def test_hits_are_counted_and_a_reset_forgets() -> None:
    """The state knows looked-up and found tokens; after a reset nothing old is found."""
    simulated = engine()
    for _ in range(2):
        simulated.arrive([1] * 9, 6)
        simulated.drain()
    totals = simulated.scheduler.books.totals
    assert (totals.num_lookup_tokens, totals.num_hit_tokens) == (18, 8)
    running = simulated.arrive([1] * 9, 20)
    for _ in range(3):
        simulated.plan()
        simulated.finish()
    simulated.reset_cache()
    assert totals.num_cache_resets == 1
    request = simulated.requests[running]
    simulated.drain()
    simulated.arrive(request.token_ids[:20], 1)
    assert simulated.plan().admitted[0].num_cached_tokens == 0
    simulated.drain()


def test_recomputed_tokens_are_counted() -> None:
    """What a preemption costs stands in the admission that pays for it."""
    simulated = engine(num_blocks=6, enable_prefix_caching=False, admission="greedy")
    simulated.arrive([1] * 8, 16)
    simulated.arrive([2] * 8, 16)
    recomputed, preempted_at = 0, 0
    while simulated.requests:
        plan = simulated.plan()
        if plan.preempted:
            preempted_at = simulated.checker.live[plan.preempted[0]].lost
        recomputed += sum(a.num_recomputed_tokens for a in plan.admitted)
        simulated.finish()
    assert preempted_at == recomputed == simulated.scheduler.books.totals.num_recomputed_tokens > 8


def test_an_unchanged_batch_is_the_same_tuple() -> None:
    """Plans of calm decodes share their rows, so that nothing is built for them."""
    simulated = engine(block_size=64, num_blocks=16)
    for text in range(4):
        simulated.arrive([text] * 3, 40)
    plans = []
    for _ in range(20):
        plans.append(simulated.plan())
        simulated.finish()
    assert len({id(plan.decodes) for plan in plans[1:]}) == 1
    assert not any(plan.granted or plan.waits for plan in plans[1:])
    simulated.drain()
