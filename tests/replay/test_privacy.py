"""A trace holds no text, no token id, no salt and no secret, whatever goes through the engine."""

import itertools
import random
from collections.abc import Iterator

import msgspec
import pytest
from random_run import SMALL
from trace_samples import BOOT_ID, never

from cearx.core.block_hash import prompt_hashes, root_hash
from cearx.core.engine import Engine
from cearx.core.events import CancelReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import Cancel, RowOutput, SamplingParams, StepResult, Submit, pack_tokens
from cearx.core.trace_records import StepNote
from cearx.core.trace_writer import TraceWriter
from cearx.replay.trace import Trace

NUM_CANARIES = 1000
SECRET = random.Random(9).randbytes(32)


def canary(index: int) -> str:
    return f"canary-{random.Random(index).getrandbits(64):016x}"


def canary_tokens(index: int) -> list[int]:
    """Ids that occur nowhere by chance: four bytes each, none of them small."""
    draw = random.Random(index)
    return [draw.randrange(2**28, 2**31) for _ in range(12)]


@pytest.fixture(scope="module")
def trace_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The trace of 1,000 requests with canaries in prompt, salt, outputs, stop ids and bias."""
    folder = tmp_path_factory.mktemp("privacy")
    writer = TraceWriter.open(folder, SMALL, BOOT_ID, never)
    engine = Engine(SMALL, SECRET, writer)
    now_us = 0
    for index in range(NUM_CANARIES):
        packed = pack_tokens(canary_tokens(index))
        root = root_hash(SECRET, canary(index))
        refused = engine.submit(
            0,
            Submit(
                request_key=RequestKey(index),
                token_ids=packed,
                block_hashes=prompt_hashes(SECRET, root, packed, SMALL.block_size),
                cache_root=root,
                max_tokens=5,
                sampling=SamplingParams(
                    stop_token_ids=tuple(canary_tokens(index)[:2]),
                    logit_bias=((canary_tokens(index)[2], 1.0),),
                    seed=int.from_bytes(canary(index)[:8].encode(), "little"),
                ),
            ),
            now_us,
        )
        assert refused is None
        if index % 7 == 3:
            reason = CancelReason.STOP_STRING
            engine.cancel(0, Cancel(request_key=RequestKey(index), reason=reason))
        while engine.num_requests > (5 if index + 1 < NUM_CANARIES else 0):
            now_us += 8000
            assert engine.tick(now_us) == {}
            step = engine.next_step()
            assert step is not None
            plan = step.plan
            rows = [*plan.decodes, *(chunk.request_id for chunk in plan.chunks if chunk.samples)]
            failed = "bad logits near " + canary(index)
            outputs = [
                RowOutput(
                    request_id=row,
                    token_id=None if row % 50 == 49 else canary_tokens(row)[3],
                    logprobs=None,
                    error=failed if row % 50 == 49 else None,
                )
                for row in rows
            ]
            result = StepResult(step_id=plan.step_id, rows=tuple(outputs), execute_us=8000)
            engine.finish_step(result)
            engine.log.append(StepNote(execute_us=8000, schedule_us=100))
            engine.log.flush()
    writer.close()
    return writer.path.read_bytes()


def test_the_run_is_in_the_trace(trace_bytes: bytes) -> None:
    """So that the searches below search something."""
    trace = Trace(trace_bytes)
    names = [type(record.value).__name__ for record in trace.records()]
    assert names.count("RequestArrived") == names.count("RequestEnded") == NUM_CANARIES
    assert trace.ended


def test_no_canary_is_in_the_trace(trace_bytes: bytes) -> None:
    """Neither as text, also read as an integer, nor two token ids in a row in any byte order."""
    folded = trace_bytes.lower()
    for index in range(NUM_CANARIES):
        text = canary(index)
        for found in (text[:8], text[:8][::-1], text[7:15], text[15:]):
            assert found.encode() not in folded
        assert bytes.fromhex(text.removeprefix("canary-")) not in trace_bytes
        for pair in itertools.pairwise(canary_tokens(index)):
            for order in ("little", "big"):
                assert b"".join(i.to_bytes(4, order) for i in pair) not in trace_bytes


def integers(value: object) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from integers(element)


def test_no_integer_is_a_token_id(trace_bytes: bytes) -> None:
    """Every integer of every record is a small count, time or id of ours."""
    tokens = {token_id for index in range(NUM_CANARIES) for token_id in canary_tokens(index)}
    for record in Trace(trace_bytes).records():
        found = set(integers(msgspec.to_builtins(record.value)))
        assert not found & tokens, record
        assert max(found) < 2**28, record


def test_no_secret_is_in_the_trace(trace_bytes: bytes) -> None:
    """Without the key of the hashes a guessed prompt cannot be looked for."""
    for start in range(len(SECRET) - 7):
        assert SECRET[start : start + 8] not in trace_bytes
    assert SECRET.hex().encode() not in trace_bytes
    packed = pack_tokens(canary_tokens(0))
    guessed = prompt_hashes(bytes(32), root_hash(bytes(32), canary(0)), packed, SMALL.block_size)
    known = prompt_hashes(SECRET, root_hash(SECRET, canary(0)), packed, SMALL.block_size)
    assert guessed[0] not in trace_bytes
    assert known[0] in trace_bytes
