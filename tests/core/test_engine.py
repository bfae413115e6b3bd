"""The shell around the scheduler: keys, stop checks, sealed blocks, what reaches whom."""

from collections.abc import Sequence

import msgspec
import pytest

from cearx.core.block_hash import prompt_hashes, root_hash
from cearx.core.config import SchedulerConfig
from cearx.core.engine import Engine
from cearx.core.events import (
    CancelReason,
    Decision,
    Event,
    FinishReason,
    PrefillChunk,
    PrefixCacheEmptied,
    PrefixCacheReset,
    RefusalReason,
    RequestArrived,
    StepFinished,
    StepPlan,
)
from cearx.core.identifiers import RequestId, RequestKey
from cearx.core.live_requests import LiveRequests, MessageRejected
from cearx.core.messages import (
    Cancel,
    Embed,
    ExecuteStep,
    Output,
    RowOutput,
    SamplingParams,
    StepResult,
    Submit,
    pack_tokens,
)
from cearx.core.trace_records import StepNote

SECRET = b"k" * 32
EOS = 2
GREEDY = SamplingParams(temperature=0.0, eos_token_ids=(EOS,))


class RecordingLog:
    """Keeps what was appended, and how much of it was flushed."""

    def __init__(self) -> None:
        self.records: list[Event | Decision | StepNote] = []
        self.num_flushed = 0

    def append(self, record: Event | Decision | StepNote) -> None:
        self.records.append(record)

    def flush(self) -> None:
        self.num_flushed = len(self.records)


def config(**changes: int) -> SchedulerConfig:
    values = {
        "block_size": 4,
        "num_blocks": 16,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        **changes,
    }
    return SchedulerConfig(enable_prefix_caching=True, **values)


class Driver:
    """An engine whose worker samples what the test says."""

    def __init__(self, **changes: int) -> None:
        self.config = config(**changes)
        self.log = RecordingLog()
        self.engine = Engine(self.config, SECRET, self.log)
        self.now_us = 0

    def submit(
        self,
        key: int,
        prompt: Sequence[int],
        max_tokens: int = 8,
        sampling: SamplingParams = GREEDY,
        frontend: int = 0,
    ) -> object:
        return self.engine.submit(
            frontend, self.message(key, prompt, max_tokens, sampling), self.now_us
        )

    def message(
        self, key: int, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams
    ) -> Submit:
        packed = pack_tokens(list(prompt))
        root = root_hash(SECRET, None)
        return Submit(
            request_key=RequestKey(key),
            token_ids=packed,
            block_hashes=prompt_hashes(SECRET, root, packed, self.config.block_size),
            cache_root=root,
            max_tokens=max_tokens,
            sampling=sampling,
        )

    def plan(self) -> ExecuteStep:
        self.now_us += 1000
        assert self.engine.tick(self.now_us) == {}
        step = self.engine.next_step()
        assert step is not None
        return step

    def result(self, step: ExecuteStep, token_id: int | None = 9) -> StepResult:
        ids = [*step.plan.decodes, *(c.request_id for c in step.plan.chunks if c.samples)]
        rows = tuple(
            RowOutput(
                request_id=request_id,
                token_id=token_id,
                logprobs=None,
                error="non-finite logits" if token_id is None else None,
            )
            for request_id in ids
        )
        return StepResult(step_id=step.plan.step_id, rows=rows, execute_us=1)

    def step(self, token_id: int | None = 9) -> dict[int, list[Output]]:
        return self.engine.finish_step(self.result(self.plan(), token_id))


def test_exactly_max_tokens_come_out() -> None:
    """LENGTH keeps the last sampled token."""
    driver = Driver()
    driver.submit(1, range(5), max_tokens=3)
    outputs = [driver.step()[0][0] for _ in range(3)]
    assert [o.token_ids for o in outputs] == [(9,), (9,), (9,)]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert driver.engine.num_requests == 0
    assert not driver.engine.wants_step


def test_chunks_emit_nothing_until_the_last() -> None:
    """A part of a prompt never brings a token."""
    driver = Driver(max_num_batched_tokens=4)
    driver.submit(1, range(10))
    assert driver.step() == {}
    assert driver.step() == {}
    assert driver.step()[0][0].token_ids == (9,)


@pytest.mark.parametrize(
    ("sampling", "stop_token_id", "ends"),
    [
        (GREEDY, None, True),
        (SamplingParams(stop_token_ids=(EOS,)), EOS, True),
        (SamplingParams(), None, False),
        (SamplingParams(eos_token_ids=(EOS,), min_tokens=2), None, False),
    ],
)
def test_stop_tokens(sampling: SamplingParams, stop_token_id: int | None, ends: bool) -> None:
    """End-of-sequence and stop ids end a request, the latter by name, neither before min_tokens."""
    driver = Driver()
    driver.submit(1, range(5), sampling=sampling)
    (output,) = driver.step(EOS)[0]
    assert output.token_ids == (EOS,)
    assert output.finish_reason is (FinishReason.STOP if ends else None)
    assert output.stop_token_id == stop_token_id


def test_a_failed_row_ends_alone() -> None:
    """One request's fault is reported to it, and the other goes on."""
    driver = Driver()
    driver.submit(1, range(5))
    driver.submit(2, range(5, 10))
    step = driver.plan()
    result = driver.result(step)
    bad, good = result.rows
    failed = RowOutput(request_id=bad.request_id, token_id=None, logprobs=None, error="nan")
    outputs = driver.engine.finish_step(
        StepResult(step_id=result.step_id, rows=(failed, good), execute_us=1)
    )
    assert [(o.request_key, o.token_ids, o.finish_reason) for o in outputs[0]] == [
        (1, (), FinishReason.FAILED),
        (2, (9,), None),
    ]


def test_cached_tokens_are_told_once_and_generated_blocks_hit() -> None:
    """The first output carries the hit; a follow-up that contains the answer hits that too."""
    driver = Driver()
    driver.submit(1, range(10), max_tokens=6)
    assert driver.step()[0][0].num_cached_tokens == 0
    assert driver.step()[0][0].num_cached_tokens is None
    for _ in range(4):
        driver.step()
    # 10 prompt tokens and 5 computed outputs are 15 tokens: three full blocks are cached.
    driver.submit(2, [*range(10), *[9] * 6, 7])
    assert driver.step()[0][0].num_cached_tokens == 12


def test_a_reset_tells_what_became_of_the_blocks() -> None:
    """Those of an ended request are freed, those of a running one stay its own; none is found."""
    driver = Driver()
    driver.submit(1, range(8), max_tokens=1)
    driver.step()
    driver.submit(2, range(20, 28), max_tokens=8)
    driver.step()
    outcome = driver.engine.reset_prefix_cache()
    assert outcome == PrefixCacheEmptied(num_freed=2, num_in_use=2)
    assert driver.log.records[-2:] == [PrefixCacheReset(), outcome]
    for key, prompt in ((3, range(8)), (4, range(20, 28))):
        driver.submit(key, prompt)
    assert [a.num_cached_tokens for a in driver.plan().plan.admitted] == [0, 0]


def test_the_worker_gets_a_request_once_and_hears_of_its_end() -> None:
    """Prompt and sampling travel with the first step only; an ended request is named once."""
    driver = Driver()
    driver.submit(1, range(5), max_tokens=2)
    first = driver.plan()
    assert [n.token_ids for n in first.new_requests] == [pack_tokens(list(range(5)))]
    driver.engine.finish_step(driver.result(first))
    second = driver.plan()
    assert (second.new_requests, second.ended) == ((), ())
    driver.engine.finish_step(driver.result(second))
    driver.submit(2, range(5))
    third = driver.plan()
    assert third.ended == (first.new_requests[0].request_id,)


def test_a_request_that_never_reached_the_worker_is_not_named_to_it() -> None:
    """Cancelled while it waited: the worker never hears of it."""
    driver = Driver(max_num_seqs=1)
    driver.submit(1, range(5))
    driver.submit(2, range(5))
    driver.step()
    driver.engine.cancel(0, Cancel(request_key=RequestKey(2), reason=CancelReason.DISCONNECT))
    assert driver.plan().ended == ()


def test_cancel_while_the_step_runs() -> None:
    """The late token goes nowhere and the key can be used again."""
    driver = Driver()
    driver.submit(1, range(5))
    step = driver.plan()
    driver.engine.cancel(0, Cancel(request_key=RequestKey(1), reason=CancelReason.DISCONNECT))
    assert driver.engine.finish_step(driver.result(step)) == {}
    assert driver.engine.num_requests == 0
    assert driver.submit(1, range(5)) is None


def test_a_lost_frontend_takes_only_its_own_along() -> None:
    """Equal keys of two frontends are two requests."""
    driver = Driver()
    driver.submit(1, range(5), frontend=0)
    driver.submit(1, range(5), frontend=1)
    driver.engine.cancel_frontend(0)
    assert list(driver.step()) == [1]


def test_refusals_name_both_sizes() -> None:
    """What can never fit is refused at the door."""
    driver = Driver()
    refused = driver.submit(1, range(60), max_tokens=5)
    assert refused is not None
    assert (refused.reason, refused.num_tokens, refused.limit_tokens) == (  # type: ignore[attr-defined]
        RefusalReason.PROMPT_TOO_LONG,
        65,
        64,
    )
    assert driver.engine.num_requests == 0


def test_messages_that_cannot_be_meant_are_rejected() -> None:
    """The core checks again what it gets, and nothing changes."""
    driver = Driver()
    driver.submit(1, range(5))
    good = driver.message(2, range(8), 4, GREEDY)
    for bad in (
        driver.message(1, range(5), 4, GREEDY),
        Submit(**{f: getattr(good, f) for f in good.__struct_fields__} | {"token_ids": b"abc"}),
        Submit(**{f: getattr(good, f) for f in good.__struct_fields__} | {"block_hashes": ()}),
        Submit(
            **{f: getattr(good, f) for f in good.__struct_fields__} | {"block_hashes": (b"", b"")}
        ),
    ):
        with pytest.raises(MessageRejected):
            driver.engine.submit(0, bad, 0)
    assert driver.engine.num_requests == 1


def test_late_and_doubled_results_are_rejected() -> None:
    """A step's result counts once."""
    driver = Driver()
    driver.submit(1, range(5))
    result = driver.result(driver.plan())
    driver.engine.finish_step(result)
    with pytest.raises(MessageRejected):
        driver.engine.finish_step(result)
    driver.plan()
    with pytest.raises(MessageRejected):
        driver.engine.finish_step(result)


def test_decisions_are_flushed_before_they_leave() -> None:
    """Behind `next_step`, flushing the log makes the plan safe and every input before it."""
    driver = Driver()
    driver.submit(1, range(5))
    step = driver.plan()
    driver.engine.log.flush()
    assert driver.log.records[driver.log.num_flushed - 1] is step.plan
    kinds = [type(r) for r in driver.log.records]
    assert kinds[0] is RequestArrived
    driver.engine.finish_step(driver.result(step))
    driver.plan()
    order = [type(r) for r in driver.log.records]
    assert order.index(StepFinished) < len(order) - 1 - order[::-1].index(StepPlan)


def test_progress_is_what_happens_for_somebody() -> None:
    """Admissions, new parts of prompts, tokens, ends and refusals; waiting is none."""
    driver = Driver(max_num_batched_tokens=4)
    seen = [driver.engine.num_progress]

    def grew() -> int:
        seen.append(driver.engine.num_progress)
        return seen[-1] - seen[-2]

    driver.submit(1, range(10), max_tokens=2)
    assert grew() == 0
    step = driver.plan()
    assert grew() == 1  # admitted
    driver.engine.finish_step(driver.result(step))
    assert grew() == 1  # the first part
    driver.step()
    driver.step()
    assert grew() == 3  # two parts and a token
    driver.step()
    assert grew() == 2  # a token and the end
    driver.submit(2, range(100))
    assert grew() == 1  # refused


def test_a_repeated_part_of_a_prompt_is_no_progress() -> None:
    """Requests that take each other's blocks in turns stand still, however busy they are."""
    driver = Driver()
    requests, request_id = LiveRequests(driver.config), RequestId(5)
    requests.add(request_id, 0, driver.message(1, range(10), 8, GREEDY))

    def goes_on(start: int, num_tokens: int) -> bool:
        return requests.goes_on(
            PrefillChunk(request_id=request_id, start=start, num_tokens=num_tokens, samples=False)
        )

    assert [goes_on(0, 4), goes_on(4, 4)] == [True, True]
    assert [goes_on(0, 4), goes_on(0, 8), goes_on(4, 4)] == [False, False, False]
    assert goes_on(0, 9)


def test_a_vector_is_the_one_output_and_no_token() -> None:
    """It ends the request, reaches the frontend as it is, and adds nothing to a block."""
    driver = Driver(max_num_batched_tokens=4)
    submit = driver.message(1, range(7), 1, SamplingParams())  # a token would complete a block
    submit = msgspec.structs.replace(submit, pooling=Embed(dimensions=3), has_exact_length=True)
    assert driver.engine.submit(0, submit, 0) is None
    step = driver.plan()
    assert [new.pooling for new in step.new_requests] == [Embed(dimensions=3)]
    assert driver.engine.finish_step(driver.result(step)) == {}  # a part of the prompt
    step = driver.plan()
    row = RowOutput(
        request_id=step.plan.chunks[0].request_id,
        token_id=None,
        logprobs=None,
        error=None,
        vector=b"\0" * 12,
    )
    result = StepResult(step_id=step.plan.step_id, rows=(row,), execute_us=1)
    [output] = driver.engine.finish_step(result)[0]
    assert (output.vector, output.token_ids) == (b"\0" * 12, ())
    assert output.finish_reason is FinishReason.LENGTH
    assert output.num_cached_tokens == 0
    finished = [record for record in driver.log.records if isinstance(record, StepFinished)]
    assert [(record.stopped, record.sealed) for record in finished] == [((), ()), ((), ())]
    assert driver.engine.num_requests == 0


def test_a_vector_that_would_be_several_is_refused() -> None:
    """More than one output makes no sense for a pooled prompt: the sender is at fault."""
    driver = Driver()
    submit = msgspec.structs.replace(driver.message(1, [1], 2, GREEDY), pooling=Embed())
    with pytest.raises(MessageRejected, match="max_tokens 2"):
        driver.engine.submit(0, submit, 0)
