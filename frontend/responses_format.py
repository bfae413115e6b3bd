"""The bytes of answers to POST /v1/responses: the response around its items, and its life.

Owns the states of a response and the events that tell them. Never decides what is in a delta
(`respond.py` does). Made by `responses_route.py`, one for an answer with one choice.
"""

import time
from typing import Any

import msgspec

from cearx.frontend.answer_format import AnswerFormat
from cearx.frontend.choice import ChoiceDelta
from cearx.frontend.errors import ApiError
from cearx.frontend.logprobs import chat_logprobs
from cearx.frontend.openai_types import Usage
from cearx.frontend.parsed_text import ParsedText
from cearx.frontend.responses_items import OutputItems
from cearx.frontend.responses_types import Response


class ResponsesFormat(AnswerFormat):
    id_prefix = "resp_"
    chunk_object = "response"
    prompt_is_in_choice = False
    response: Response
    """Set before the first chunk, like `items`: the answer as it stands."""
    items: OutputItems
    _has_begun = False
    _end: str | None = None

    def begin(self, response: Response) -> None:
        self.response = response
        self.items = OutputItems()

    def chunk(self, delta: ChoiceDelta, *, is_first: bool, usage: Usage | None) -> bytes:
        return self._begun() + self._take(delta)

    def _begun(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._state("response.created") + self._state("response.in_progress")

    def _state(self, kind: str) -> bytes:
        return self.items.event(kind, response=self.response)

    def _take(self, delta: ChoiceDelta) -> bytes:
        told = chat_logprobs(delta.content_records, self.names).content
        events = self.items.push(delta.parsed or ParsedText(content=delta.text), told)
        if delta.finish_reason is not None:
            self._end = delta.finish_reason
            events += self.items.finish(is_complete=self._end != "length")
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        self._complete(usage)
        return self._state(f"response.{self.response.status}")

    def _complete(self, usage: Usage) -> None:
        assert self._end is not None, "the choice has not ended"
        response = self.response
        response.output = self.items.done
        response.usage = _usage(usage)
        if self._end == "length":
            response.status = "incomplete"
            response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            response.status = "completed"
            response.completed_at = int(time.time())

    def error_event(self, error: ApiError) -> bytes:
        events = self._begun() + self.items.close("incomplete")
        self.response.status = "failed"
        self.response.output = self.items.done
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response.error = {"code": code, "message": error.error.message}
        return events + self._state("response.failed")

    def end(self) -> bytes:
        return b""

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        [choice] = choices
        self._take(choice)
        self._complete(usage)
        return msgspec.json.encode(self.response)


def _usage(usage: Usage) -> dict[str, Any]:
    """A part of the prompt that was in the cache already is counted, what goes there is not."""
    of_prompt, of_answer = usage.prompt_tokens_details, usage.completion_tokens_details
    assert of_prompt is not None and of_answer is not None, "the route asks for both"
    cached = {"cached_tokens": of_prompt.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": of_answer.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
