"""The books kept from records alone agree with the scheduler's own state after every record."""

from random import Random

import pytest
from random_run import PIPELINED, SMALL, URGENT, RandomRun, random_config
from simulated_engine import RecordList

from cearx.core.config import SchedulerConfig
from cearx.core.events import Decision, Event, Outcome, StepPlan
from cearx.core.scheduler import Scheduler
from cearx.replay.ledger import Ledger

CONFIGS = [SMALL, PIPELINED, URGENT]


def check_same(ledger: Ledger, scheduler: Scheduler) -> None:
    books = scheduler.books
    running = sorted(books.running.values(), key=lambda request: request.request_id)
    waiting = sorted(books.waiting, key=lambda request: request.request_id)
    assert [r.request_id for r in ledger.running()] == [r.request_id for r in running]
    assert [r.request_id for r in ledger.waiting()] == [r.request_id for r in waiting]
    assert (ledger.num_running, ledger.num_waiting) == (len(running), len(waiting))
    for request in (*running, *waiting):
        mine = ledger.live[request.request_id]
        assert mine.num_tokens + mine.num_pending == books.steps.num_promised(request)
        assert mine.num_planned == books.steps.num_scheduled(request)
        if request.admitted_step is not None:
            assert mine.num_written == books.steps.num_settled(request)
        assert mine.block_ids == request.block_ids
        assert mine.block_hashes == request.block_hashes
    pool, blocks = books.pool, ledger.blocks
    assert [blocks.num_holders(b) for b in range(len(pool._ref_counts))] == pool._ref_counts
    assert blocks.num_held == sum(count > 0 for count in pool._ref_counts)
    assert blocks.num_free == pool.num_free
    assert blocks.num_cached == len(pool._cached)
    assert [blocks.content(b) for b in range(len(pool._ref_counts))] == list(pool.index.snapshot())


def run(config: SchedulerConfig, seed: int, num_steps: int) -> list[Event | Decision]:
    log = RecordList()
    RandomRun(config, seed, log=log).run(num_steps)
    return log


@pytest.mark.parametrize("seed", range(30))
def test_the_books_agree_with_the_scheduler(seed: int) -> None:
    """Queues, lengths, tables, reference counts, cached contents: equal after each input."""
    config = CONFIGS[seed] if seed < len(CONFIGS) else random_config(Random(seed))
    ledger, scheduler = Ledger(config), Scheduler(config)
    values = run(config, seed, 60)
    for index, value in enumerate(values):
        ledger.apply(value)
        if isinstance(value, StepPlan):
            assert scheduler.plan() == value
        elif not isinstance(value, Outcome):
            scheduler.apply(value)
        following = values[index + 1] if index + 1 < len(values) else None
        if not isinstance(following, Outcome):
            ledger.settle()
            check_same(ledger, scheduler)
    assert not ledger.live and ledger.blocks.num_held == 0
