"""Who is preempted, that everybody gets on, and the stalls that other schedulers had."""

from collections import Counter
from random import Random

import msgspec
import pytest
from random_run import DEEP, PIPELINED, SMALL, URGENT, RandomRun, random_config
from simulated_engine import SimulatedEngine

from cearx.core.block_pool import BlockPool
from cearx.core.config import SchedulerConfig
from cearx.core.events import FinishReason, RefusalReason, RequestRefused, StepPlan, WaitReason
from cearx.core.identifiers import RequestId
from cearx.core.preemption import choose_victim
from cearx.core.request import Request, RequestState
from cearx.core.scheduler import Scheduler


def engine(**changes: object) -> SimulatedEngine:
    """Blocks of 4 tokens, 16 blocks, 4 seats, 16 tokens a step, two in flight, unless changed."""
    config = SchedulerConfig(
        block_size=4,
        num_blocks=16,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
        pipeline_depth=2,
        admission="greedy",
    )
    return SimulatedEngine(msgspec.structs.replace(config, **changes))


def run_to_the_end(simulated: SimulatedEngine) -> list[StepPlan]:
    """All plans until everyone has ended."""
    simulated.drain()
    assert isinstance(simulated.log, list)
    return [record for record in simulated.log if isinstance(record, StepPlan)]


def request(request_id: int, blocks: list[int], priority: int = 0) -> Request:
    return Request(
        request_id=RequestId(request_id),
        priority=priority,
        num_prompt_tokens=8,
        max_tokens=50,
        has_exact_length=True,
        deadline_us=0,
        block_hashes=[],
        num_tokens=8,
        num_scheduled=len(blocks) * 4,
        block_ids=blocks,  # type: ignore[arg-type]
        state=RequestState.JOINING,
    )


def test_the_cheapest_of_the_later_ones_is_the_victim() -> None:
    """Few tokens to compute again, blocks that others keep not counted; progress first."""
    pool = BlockPool(32)
    blocks = pool.take(20)
    first, long, short, sharing = (
        request(0, blocks[:2]),
        request(1, blocks[2:8]),
        request(2, blocks[8:12]),
        request(3, [*blocks[12:17], blocks[17]]),
    )
    pool.share(blocks[12:17])
    running = [(r, r.num_scheduled) for r in (first, long, short, sharing)]
    assert choose_victim(running, first.order, pool, 4) is sharing
    assert choose_victim(running[:3], first.order, pool, 4) is short
    short.num_admitted_tokens = 99  # it has not got on since it came back
    assert choose_victim(running[:3], first.order, pool, 4) is long
    assert choose_victim(running, sharing.order, pool, 4) is None
    long.state = RequestState.FINISHING
    assert choose_victim(running[:2], first.order, pool, 4) is None


def test_two_that_do_not_fit_together_do_not_take_turns() -> None:
    """Each wants the whole pool: the later one yields, and the first is never preempted."""
    simulated = engine(num_blocks=10)
    first, second = (simulated.arrive([text] * 8, 32) for text in range(2))
    plans = run_to_the_end(simulated)
    preempted = Counter(i for plan in plans for i in plan.preempted)
    assert set(preempted) == {second}
    assert list(simulated.ended) == [first, second]
    assert len(plans) < 2 * 2 * 32


def test_thrashing_is_bounded() -> None:
    """Six long requests in a pool for two: each preemption is paid for by progress."""
    for admission in ("greedy", "forecast"):
        simulated = engine(num_blocks=20, max_num_seqs=6, admission=admission)
        for text in range(6):
            simulated.arrive([text % 5] * 9, 30)
        run_to_the_end(simulated)
        totals = simulated.scheduler.books.totals
        assert totals.num_preemptions <= 30
        assert totals.num_recomputed_tokens <= 6 * 30 * 4
        assert len(simulated.ended) == 6


def test_waiting_for_a_fence_takes_no_seat_and_no_victim() -> None:
    """Blocks of a request that ended are on their way: nobody is preempted for the same need."""
    simulated = engine(num_blocks=6, max_num_seqs=2)
    simulated.arrive([1] * 4, 16)
    other = simulated.arrive([2] * 12, 9)
    plans = []
    while True:
        plans.append(simulated.plan())
        if len(simulated.in_flight) == 2:
            if simulated.scheduler.books.pool.num_free == 0:
                break
            simulated.finish()
    simulated.cancel(other)
    assert len(simulated.scheduler.books.fences) == 1
    assert not any(plan.preempted for plan in plans)
    assert simulated.num_preemptions == 0
    simulated.drain()
    assert simulated.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_token_is_kept_once(depth: int) -> None:
    """Requests preempted with tokens in flight get exactly max_tokens, in any depth."""
    for num_blocks in range(8, 14):
        simulated = engine(num_blocks=num_blocks, pipeline_depth=depth, max_num_seqs=4)
        requests = [simulated.requests[simulated.arrive([text] * 3, 25)] for text in range(4)]
        simulated.drain()
        assert simulated.num_preemptions > 0
        assert [len(r.token_ids) for r in requests] == [28] * 4
        assert set(simulated.ended.values()) == {FinishReason.LENGTH}


# --- stalls that were reported elsewhere ---------------------------------------------------------


def test_seats_are_for_those_who_run() -> None:
    """Many waiting and preempted requests never use up the seats (vllm#53130)."""
    simulated = engine(num_blocks=12, max_num_seqs=3)
    for text in range(12):
        simulated.arrive([text % 5, *[1] * 6], 12)
    run_to_the_end(simulated)
    assert len(simulated.ended) == 12


def test_an_idle_engine_admits_whatever_the_policy_says() -> None:
    """Nothing runs, blocks are free: the head starts at once (vllm#45414)."""
    for admission in ("forecast", "watermark", "greedy"):
        simulated = engine(num_blocks=9, admission=admission)
        for text in range(3):
            request_id = simulated.arrive([text] * 8, 20)
            simulated.scheduler.books.margin_blocks = 2  # as learned from bad times
            assert simulated.plan().admitted[0].request_id == request_id
            simulated.cancel(request_id)
            simulated.drain()


def test_what_is_larger_than_the_pool_is_refused() -> None:
    """A request that could never run does not wait for ever (vllm#39734), exact to the token."""
    for max_tokens, is_refused in ((17, False), (18, True)):
        simulated = engine(num_blocks=6)
        simulated.arrive([1] * 8, max_tokens)
        assert isinstance(simulated.log, list)
        last = simulated.log[-1]
        assert is_refused == isinstance(last, RequestRefused)
        if isinstance(last, RequestRefused):
            assert (last.reason, last.num_tokens) == (RefusalReason.POOL_TOO_SMALL, 25)
        simulated.drain()


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_admission_rounds_as_the_pool_does(block_size: int) -> None:
    """Prompts one token around a block's end fill the pool to its last block (sglang#28530)."""
    for length in range(2 * block_size - 1, 2 * block_size + 2):
        num_blocks = -(-length // block_size)
        simulated = engine(
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            max_num_batched_tokens=64,
        )
        request_id = simulated.arrive([1] * length, num_blocks * block_size - length + 1)
        run_to_the_end(simulated)
        assert simulated.ended == {request_id: FinishReason.LENGTH}


def test_urgent_requests_do_not_wait_for_seats() -> None:
    """Full seats, a more urgent arrival: the least urgent goes, comes back, ends."""
    simulated = engine(scheduling_policy="priority", max_num_seqs=2)
    slow = [simulated.arrive([text] * 4, 20, priority=5 + text) for text in range(2)]
    for _ in range(3):
        simulated.plan()
        simulated.finish()
    urgent = simulated.arrive([3] * 4, 4, priority=1)
    plan = simulated.plan()
    assert plan.preempted == (slow[1],)
    assert [admission.request_id for admission in plan.admitted] == [urgent]
    run_to_the_end(simulated)
    assert list(simulated.ended) == [urgent, slow[0], slow[1]]
    assert simulated.num_preemptions == 1


def test_urgent_requests_take_blocks_and_nobody_slips_in() -> None:
    """The blocks that were taken for the urgent one are not given to who gave them."""
    simulated = engine(scheduling_policy="priority", num_blocks=8, max_num_batched_tokens=64)
    for text in range(2):
        simulated.arrive([text] * 12, 9, priority=5)
    simulated.plan()
    simulated.finish()
    urgent = simulated.arrive([3] * 20, 4, priority=1)
    admitted = []
    while urgent not in admitted:
        if simulated.can_plan:
            plan = simulated.try_plan()
            admitted += [a.request_id for a in plan.admitted] if plan else []
        else:
            simulated.finish()
    assert admitted == [urgent]
    run_to_the_end(simulated)
    assert len(simulated.ended) == 3


def test_equal_priorities_never_preempt_each_other_for_a_seat() -> None:
    """Arrival decides, and whoever came first keeps its seat."""
    simulated = engine(scheduling_policy="priority", max_num_seqs=1)
    for text in range(3):
        simulated.arrive([text] * 4, 5, priority=2)
    plans = run_to_the_end(simulated)
    assert not any(plan.preempted for plan in plans)
    assert list(simulated.ended) == [0, 1, 2]


def test_a_head_of_line_is_overtaken_a_few_times_only() -> None:
    """Small requests pass a large one that waits for blocks, max_overtakes of them."""
    simulated = engine(num_blocks=12, max_overtakes=2, max_num_seqs=8, max_num_batched_tokens=64)
    simulated.arrive([1] * 24, 8)
    large = simulated.arrive([2] * 28, 8)
    small = [simulated.arrive([3, text], 2) for text in range(6)]
    plan = simulated.plan()
    assert [a.request_id for a in plan.admitted] == [0, *small[:2]]
    assert [(w.request_id, w.reason) for w in plan.waits] == [(large, WaitReason.NO_BLOCKS)]
    run_to_the_end(simulated)
    order = list(simulated.ended)
    assert order.index(large) > order.index(small[1])


def ideal_steps(simulated: SimulatedEngine) -> int:
    """Steps in which everyone could end one after the other, alone."""
    budget = simulated.config.max_num_batched_tokens
    cap = simulated.config.long_prefill_token_threshold or budget
    return sum(
        -(-(request.num_tokens + request.max_tokens) // min(budget, cap)) + request.max_tokens + 1
        for request in simulated.checker.live.values()
    )


def faults_then_quiet(config: SchedulerConfig, seed: int) -> None:
    """Faults of all kinds for a while; then everybody has to end within 10x the ideal steps."""
    run = RandomRun(config, seed)
    for _ in range(40):
        run.step()
    simulated = run.engine
    last_step = simulated.checker.num_steps + 10 * ideal_steps(simulated) + 10
    while simulated.requests or simulated.in_flight:
        assert simulated.checker.num_steps <= last_step, f"seed {seed}: {simulated.checker.live}"
        if simulated.can_plan:
            simulated.try_plan()
        else:
            simulated.finish()
    simulated.checker.check_idle()


@pytest.mark.parametrize("part", range(4))
def test_everybody_ends_once_faults_cease(part: int, request: pytest.FixtureRequest) -> None:
    """Late results, cancels, failures, clock jumps, resets and pressure leave no stall behind."""
    first, end = request.config.getoption("--liveness-seeds")
    for seed in range(first + part, end, 4):
        fixed = (SMALL, PIPELINED, URGENT, DEEP)
        config = random_config(Random(seed)) if seed % 2 else fixed[seed // 2 % len(fixed)]
        faults_then_quiet(config, seed)


def test_the_scheduler_never_looks_at_hashes_of_objects() -> None:
    """Two schedulers that live side by side, one under a garbage collection each step, agree."""
    import gc

    one, other = (RandomRun(DEEP, 3) for _ in range(2))
    for _ in range(60):
        one.step()
        other.step()
        gc.collect(0)
    assert one.engine.log == other.engine.log
    assert isinstance(one.engine.scheduler, Scheduler)
