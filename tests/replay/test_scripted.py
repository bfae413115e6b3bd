"""A log becomes a script whose run under the same scheduler is the log again."""

from random import Random

import msgspec
import pytest
from random_run import PIPELINED, SMALL, URGENT, RandomRun, random_config
from simulated_engine import RecordList

from cearx.core.config import SchedulerConfig
from cearx.core.events import CancelRequested, Decision, Event, RequestEnded, StepFinished
from cearx.core.scheduler import Scheduler
from cearx.replay import scripted
from cearx.replay.scripted import Arrive, Script, run_script, script_of
from cearx.replay.trace import TraceRecord


def logged(seed: int, config: SchedulerConfig) -> RecordList:
    log = RecordList()
    RandomRun(config, seed, log=log).run(80)
    return log


def script(values: list[Event | Decision], config: SchedulerConfig) -> Script:
    records = (TraceRecord(seq, seq, value) for seq, value in enumerate(values))
    return script_of(config, records)


def comparable(values: list[Event | Decision]) -> list[Event | Decision]:
    """Without cancels that came too late: the shell passes over those; stops in order of ids."""
    kept: list[Event | Decision] = []
    for index, value in enumerate(values):
        following = values[index + 1] if index + 1 < len(values) else None
        if isinstance(value, CancelRequested):
            ends = isinstance(following, RequestEnded)
            if not ends or following.request_id != value.request_id:
                continue
        if isinstance(value, StepFinished):
            stopped = tuple(sorted(value.stopped, key=lambda row: row.request_id))
            value = msgspec.structs.replace(value, stopped=stopped)
        kept.append(value)
    return kept


@pytest.mark.parametrize("seed", range(15))
def test_the_script_repeats_the_log(seed: int) -> None:
    """Same arrivals, ends, hashes and decisions, in the same order."""
    config = [SMALL, PIPELINED, URGENT][seed] if seed < 3 else random_config(Random(seed))
    values = logged(seed, config)
    again = scripted.RecordList()
    driver = run_script(Scheduler(config), script(values, config).items, again)
    assert comparable(again) == comparable(values)
    assert not driver.num_outputs


def test_any_part_of_a_script_is_a_script() -> None:
    """With items taken out at random, the rest still runs to the end of everyone."""
    random = Random(3)
    whole = script(logged(1, SMALL), SMALL).items
    for share in (0.9, 0.5, 0.2):
        items = [item for item in whole if random.random() < share]
        log = scripted.RecordList()
        driver = run_script(Scheduler(SMALL), items, log, max_extra_steps=10_000)
        assert driver.num_ended == sum(isinstance(item, Arrive) for item in items)
