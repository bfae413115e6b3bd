"""What has gathered is told before the fault that stands behind it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cearx.core.events import FinishReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import Output
from cearx.frontend.choice import Choice
from cearx.frontend.respond import Answer, AnswerPlan


class LetterDetokenizer:
    """One letter a token."""

    def push(self, token_ids: tuple[int, ...]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


def output(token_ids: tuple[int, ...], reason: FinishReason | None) -> Output:
    return Output(
        request_key=RequestKey(1),
        token_ids=token_ids,
        logprobs=None,
        finish_reason=reason,
        stop_token_id=None,
        num_cached_tokens=None,
    )


@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_tokens_before_a_fault_are_told(num_good: int) -> None:
    """A fault gathered with good tokens, when the client was slow, loses none of them."""
    choice = Choice(0, cast(Any, LetterDetokenizer()))
    plan = SimpleNamespace(
        choices=[choice],
        choices_per_prompt=1,
        stream_interval=16,
        continuous_usage=False,
        format=SimpleNamespace(chunk=lambda delta, is_first, usage: delta.text.encode()),
    )
    answer = Answer(cast(AnswerPlan, plan), cast(Any, None))
    batch = [(0, output((97 + i,), None)) for i in range(num_good)]
    events = answer.events([*batch, (0, output((), FinishReason.FAILED))])
    assert events == b"abc"[:num_good]
    assert answer.failure is not None
    assert b"request_failed" in answer.failure.body()
