"""What the scheduler decides in cases that a person can follow, and in long random runs."""

from random import Random

import pytest
from random_run import SMALL, RandomRun, random_config
from simulated_engine import SimulatedEngine

from cearx.core.config import SchedulerConfig
from cearx.core.events import (
    CancelReason,
    CancelRequested,
    ClockAdvanced,
    FinishReason,
    RefusalReason,
    RequestRefused,
    StepFinished,
    WaitReason,
)
from cearx.core.identifiers import RequestId, StepId
from cearx.core.scheduler import Scheduler


def engine(**changes: int) -> SimulatedEngine:
    """Blocks of 4 tokens, 16 blocks, 4 seats, 16 tokens a step, unless changed."""
    sizes = {
        "block_size": 4,
        "num_blocks": 16,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "enable_prefix_caching": True,
    }
    return SimulatedEngine(SchedulerConfig(**(sizes | changes)))


def steps(simulated: SimulatedEngine, count: int) -> None:
    for _ in range(count):
        simulated.plan()
        simulated.finish()


def test_max_tokens_is_exact() -> None:
    """A request of n tokens has n sampling rows and ends with LENGTH."""
    for max_tokens in (1, 2, 7):
        simulated = engine()
        request_id = simulated.arrive([1] * 5, max_tokens)
        request = simulated.requests[request_id]
        steps(simulated, max_tokens)
        assert simulated.ended == {request_id: FinishReason.LENGTH}
        assert len(request.token_ids) == 5 + max_tokens


def test_a_long_prompt_is_chunked_beside_decodes() -> None:
    """Decodes come first and the prompt takes what is left of each step's budget."""
    simulated = engine()
    short, long = simulated.arrive([1], 9), simulated.arrive([2] * 40, 2)
    plans = []
    for _ in range(4):
        plans.append(simulated.plan())
        simulated.finish()
    assert [(c.request_id, c.start, c.num_tokens, c.samples) for c in plans[0].chunks] == [
        (short, 0, 1, True),
        (long, 0, 15, False),
    ]
    assert [plan.decodes for plan in plans[1:]] == [(short,), (short,), (short, long)]
    assert [(c.start, c.num_tokens, c.samples) for p in plans[1:3] for c in p.chunks] == [
        (15, 15, False),
        (30, 10, True),
    ]
    simulated.drain()


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    """Whole blocks are taken from the cache; the last token is always computed."""
    simulated = engine()
    simulated.arrive([1, 2, 3, 4] * 2 + [1], 1)
    simulated.drain()
    for prompt, cached in [([1, 2, 3, 4] * 2 + [9], 8), ([1, 2, 3, 4] * 2, 4), ([1, 2, 3, 9], 0)]:
        simulated.arrive(prompt, 1)
        assert simulated.plan().admitted[0].num_cached_tokens == cached
        simulated.drain()


def test_nothing_is_shared_before_it_is_written() -> None:
    """Two equal prompts in one step both compute; a third one later does not."""
    simulated = engine()
    for _ in range(2):
        simulated.arrive([1] * 6, 1)
    assert [a.num_cached_tokens for a in simulated.plan().admitted] == [0, 0]
    simulated.arrive([1] * 6, 1)
    simulated.finish()
    assert [a.num_cached_tokens for a in simulated.plan().admitted] == [4]
    simulated.drain()


def test_a_conversation_hits_its_outputs() -> None:
    """The blocks of generated tokens are found by a prompt that repeats them."""
    simulated = engine()
    request = simulated.requests[simulated.arrive([1] * 6, 8)]
    simulated.drain()
    simulated.arrive([*request.token_ids, 3], 1)
    assert simulated.plan().admitted[0].num_cached_tokens == 12
    simulated.drain()


def test_preempted_work_resumes() -> None:
    """When blocks run out the last arrived loses them, waits at the head and ends all the same."""
    simulated = engine(num_blocks=6, max_num_seqs=3)
    simulated.arrive([1] * 4, 20)
    second = simulated.arrive([2] * 4, 20)
    third = simulated.arrive([3] * 4, 2)
    preempted = []
    while len(simulated.ended) < 3:
        plan = simulated.plan()
        preempted += plan.preempted
        simulated.finish()
    assert preempted and set(preempted) <= {second, third}
    assert list(simulated.ended.values()) == [FinishReason.LENGTH] * 3
    simulated.drain()


def test_each_reason_to_wait() -> None:
    """No seat, no budget, no blocks: the head of the queue is told which."""
    simulated = engine(max_num_seqs=1)
    for _ in range(2):
        simulated.arrive([1], 5)
    assert [wait.reason for wait in simulated.plan().waits] == [WaitReason.NO_SEAT]
    simulated = engine()
    for _ in range(3):
        simulated.arrive([1] * 12, 5)
    assert [wait.reason for wait in simulated.plan().waits] == [WaitReason.NO_BUDGET]
    simulated = engine(num_blocks=4, max_num_batched_tokens=64)
    for text in range(2):
        simulated.arrive([text] * 8, 5)
    assert [wait.reason for wait in simulated.plan().waits] == [WaitReason.ADMISSION]
    simulated = engine(num_blocks=3, max_num_batched_tokens=64)
    for text in range(2):
        simulated.arrive([text] * 8, 5)
    assert [wait.reason for wait in simulated.plan().waits] == [WaitReason.NO_BLOCKS]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "reason", "num_tokens", "limit"),
    [
        (0, 5, RefusalReason.EMPTY_PROMPT, 0, 1),
        (5, 0, RefusalReason.NO_OUTPUT, 0, 1),
        (60, 5, RefusalReason.PROMPT_TOO_LONG, 65, 64),
        (50, 12, RefusalReason.POOL_TOO_SMALL, 61, 60),
    ],
)
def test_what_can_never_run_is_refused(
    num_prompt_tokens: int, max_tokens: int, reason: RefusalReason, num_tokens: int, limit: int
) -> None:
    """At the door, with what it needs and what there is."""
    simulated = engine(num_blocks=15)
    request_id = simulated.arrive([1] * num_prompt_tokens, max_tokens)
    assert simulated.log[-1] == RequestRefused(
        request_id=request_id, reason=reason, num_tokens=num_tokens, limit_tokens=limit
    )
    assert not simulated.scheduler.has_work()


def test_the_largest_request_runs() -> None:
    """One token less than refused fills the pool to its last place."""
    simulated = engine(num_blocks=15)
    request_id = simulated.arrive([1] * 50, 11)
    simulated.drain()
    assert simulated.ended == {request_id: FinishReason.LENGTH}


def test_cancel_in_every_state() -> None:
    """Waiting, prefilling, in flight, decoding, ended and unknown: at most one end, no block."""
    simulated = engine(max_num_seqs=1)
    running, waiting = simulated.arrive([1] * 40, 5), simulated.arrive([2], 5)
    simulated.cancel(waiting)
    simulated.plan()
    simulated.cancel(running)
    assert simulated.scheduler.books.pool.num_free < 16, (
        "the step in flight still writes these blocks"
    )
    simulated.finish()
    assert simulated.scheduler.books.pool.num_free == 16
    decoding = simulated.arrive([3], 5)
    steps(simulated, 2)
    simulated.cancel(decoding)
    assert simulated.scheduler.books.pool.num_free == 16
    for request_id in (running, waiting, decoding, RequestId(99)):
        simulated.cancel(request_id)
    assert simulated.ended == dict.fromkeys((waiting, running, decoding), FinishReason.CANCELLED)


def test_a_stop_and_a_failure_end_one_request() -> None:
    """The others of the step go on, and a failed row's blocks are not shared."""
    simulated = engine()
    a, b, c = (simulated.arrive([text] * 4, 9) for text in range(3))
    simulated.plan()
    simulated.finish(stopped=[a], failed=[b])
    assert simulated.ended == {a: FinishReason.STOP, b: FinishReason.FAILED}
    simulated.arrive([1] * 5, 1)
    assert simulated.plan().admitted[0].num_cached_tokens == 0
    simulated.finish()
    simulated.drain()
    assert simulated.ended[c] is FinishReason.LENGTH


def test_misuse_is_an_assertion() -> None:
    """A shell that breaks the protocol dies at once and not some steps later."""
    scheduler = Scheduler(SMALL)
    scheduler.apply(ClockAdvanced(now_us=5))
    with pytest.raises(AssertionError, match="clock went from 5 to 4"):
        scheduler.apply(ClockAdvanced(now_us=4))
    with pytest.raises(AssertionError, match="step 0 finished"):
        scheduler.apply(StepFinished(step_id=StepId(0), stopped=(), sealed=(), execute_us=1))
    with pytest.raises(AssertionError, match="nothing can run"):
        scheduler.plan()
    event = CancelRequested(request_id=RequestId(0), reason=CancelReason.DISCONNECT)
    assert scheduler.apply(event) == ()


@pytest.mark.parametrize("seed", range(30))
def test_random_runs(seed: int) -> None:
    """Any configuration under any load keeps every rule and comes to rest."""
    RandomRun(random_config(Random(seed)), seed).run(80)


def test_500_aborts_leave_an_idle_pool() -> None:
    """Cancels in all states: no block, no queue entry and no fence is left."""
    run = RandomRun(SMALL, 11)
    cancelled = 0
    while cancelled < 500:
        run.step()
        live = list(run.engine.requests)
        for request_id in run.random.sample(live, len(live) // 3):
            run.engine.cancel(request_id)
        cancelled = list(run.engine.ended.values()).count(FinishReason.CANCELLED)
    run.engine.drain()
    assert run.engine.scheduler.books.pool.num_free == SMALL.num_blocks
    books = run.engine.scheduler.books
    assert not len(books.running) and not len(books.waiting)


def test_the_same_seed_gives_the_same_run() -> None:
    """Decisions and final state repeat, also when another scheduler runs in between."""
    alone = RandomRun(SMALL, 5).run(100)
    one, other = RandomRun(SMALL, 5), RandomRun(SMALL, 6)
    for _ in range(100):
        one.step()
        other.step()
    one.engine.drain()
    assert one.engine.log == alone.log
    assert one.engine.scheduler.snapshot() == alone.scheduler.snapshot()
