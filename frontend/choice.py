"""One choice of an answer: the engine's tokens in, text and log-probabilities out.

Owns detokenising, stop strings and the reason for the end. Streams and whole bodies are both made
of the `ChoiceDelta`s that come from here, which is why they cannot differ. Called by `respond.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cearx.core.events import FinishReason
from cearx.core.messages import Output
from cearx.frontend.content_records import ContentRecords
from cearx.frontend.detokenizer import IncrementalDetokenizer
from cearx.frontend.errors import grammar_too_expensive, server_error, timed_out
from cearx.frontend.output_parser import OutputParser
from cearx.frontend.parsed_text import ParsedText, join_parsed
from cearx.frontend.prompt_part import PromptPart, TokenRecord
from cearx.frontend.stop_strings import StopStringMatcher


class ChoiceDelta(msgspec.Struct, kw_only=True):
    """What some tokens added to a choice."""

    index: int
    text: str = ""
    num_tokens: int = 0
    records: list[TokenRecord] = []
    """Empty unless log-probabilities were asked for."""
    content_records: list[TokenRecord] = []
    """Those of tokens that the content is made of, when the text that they add to is told."""
    token_ids: list[int] = []
    """Empty unless they were asked for."""
    prompt_token_ids: Sequence[int] | None = None
    """In the first delta of a choice, if asked for."""
    prompt_records: list[TokenRecord] | None = None
    """In the first delta of a choice, if asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    parsed: ParsedText | None = None
    """What the text is made of, where that is asked for."""
    num_reasoning_tokens: int = 0

    @property
    def is_silent(self) -> bool:
        """Whether a client would learn nothing from it."""
        return not (
            (self.text if self.parsed is None else not self.parsed.is_empty)
            or self.records
            or self.token_ids
            or self.prompt_token_ids is not None
            or self.finish_reason is not None
        )


class Extent(NamedTuple):
    """How far an answer has come."""

    content: int
    """Characters of it."""
    others: int
    """Of thoughts and calls."""
    is_thinking: bool


NOWHERE = Extent(0, 0, False)


def extent_of(delta: ChoiceDelta, parser: OutputParser | None) -> Extent:
    parsed = delta.parsed
    if parsed is None or parser is None:
        return Extent(len(delta.text), 0, False)
    calls = sum(1 + len(tool.arguments) for tool in parsed.tools)
    return Extent(len(parsed.content), len(parsed.reasoning) + calls, parser.is_thinking)


def join_deltas(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Successive deltas of one choice as one; there is at least one."""
    if len(deltas) == 1:
        return deltas[0]
    return ChoiceDelta(
        index=deltas[0].index,
        text="".join([delta.text for delta in deltas]),
        num_tokens=sum(delta.num_tokens for delta in deltas),
        records=[record for delta in deltas for record in delta.records],
        content_records=[record for delta in deltas for record in delta.content_records],
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        prompt_token_ids=next(
            (d.prompt_token_ids for d in deltas if d.prompt_token_ids is not None), None
        ),
        prompt_records=next(
            (d.prompt_records for d in deltas if d.prompt_records is not None), None
        ),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        parsed=None
        if deltas[0].parsed is None
        else join_parsed([delta.parsed for delta in deltas if delta.parsed is not None]),
        num_reasoning_tokens=sum(delta.num_reasoning_tokens for delta in deltas),
    )


class Choice:
    """`push` outputs in order until `is_finished`."""

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer,
        *,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt: PromptPart | None = None,
        shows_token_ids: bool = False,
        is_prompt_only: bool = False,
        parser: OutputParser | None = None,
    ) -> None:
        """`is_prompt_only`: the engine's tokens are not told, only that it has ended."""
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_finished = False
        self.met_stop_string = False
        """True when the text ended it and the engine does not know."""
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._prompt = prompt
        self._shows_token_ids = shows_token_ids
        self._is_prompt_only = is_prompt_only
        self._parser = parser
        self._content_records: ContentRecords | None = None
        """From the first log-probabilities on."""
        self._text_length = 0 if prompt is None else len(prompt.echo_text)
        """Characters decoded so far, shown or held back."""

    def push(self, output: Output) -> ChoiceDelta:
        """Raises ApiError: see `raise_failure`."""
        assert not self.is_finished, f"output for choice {self.index} after its end"
        raise_failure(output)
        parser = self._parser
        delta = ChoiceDelta(index=self.index, parsed=None if parser is None else ParsedText())
        if self._prompt is not None and self._prompt.take(output):
            self._tell_prompt(self._prompt, delta)
            self._prompt = None
        if output.logprobs is not None and self._content_records is None:
            self._content_records = ContentRecords()
        token_ids = () if self._is_prompt_only else output.token_ids
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            before = self._extent(delta)
            is_stop = output.finish_reason is FinishReason.STOP and position == last
            if output.logprobs is not None:
                record = TokenRecord(
                    token_id=token_id,
                    logprobs=output.logprobs[position],
                    text_offset=self._text_length,
                )
                delta.records.append(record)
                if self._content_records is not None and (self._include_stop or not is_stop):
                    self._content_records.take(record)
            if self._shows_token_ids:
                delta.token_ids.append(token_id)
            self.num_tokens += 1
            delta.num_tokens += 1
            # The token that ends a generation is counted, but is no part of its text.
            shows = not is_stop or self._include_stop
            text = self._show(self._detokenizer.push((token_id,)) if shows else "")
            delta.text += text
            if parser is not None:
                self._parse(parser, text, delta)
            self._look_at_records(delta, before)
            if self.met_stop_string:
                return self._end_at_stop_string(delta)
        if output.finish_reason is not None:
            self._end(delta, output)
        return delta

    def _parse(self, parser: OutputParser, text: str, delta: ChoiceDelta) -> None:
        """Token by token, so that the count of reasoning tokens depends on no batching."""
        assert delta.parsed is not None, "the choice has a parser"
        self.num_reasoning_tokens += parser.is_thinking
        delta.num_reasoning_tokens += parser.is_thinking
        parser.push(text, delta.parsed)

    def _extent(self, delta: ChoiceDelta) -> Extent:
        """How far the delta has come, where the records of its content are wanted."""
        return NOWHERE if self._content_records is None else extent_of(delta, self._parser)

    def _look_at_records(self, delta: ChoiceDelta, before: Extent) -> None:
        records = self._content_records
        if records is None:
            return
        now = extent_of(delta, self._parser)
        if now.content > before.content:
            told = records.told(now.content - before.content, self._text_length)
            delta.content_records = [*delta.content_records, *told]
        elif now.others > before.others or now.is_thinking or before.is_thinking:
            records.drop()

    @staticmethod
    def _tell_prompt(prompt: PromptPart, delta: ChoiceDelta) -> None:
        delta.text = prompt.echo_text
        if delta.parsed is not None:
            delta.parsed.content = prompt.echo_text
        delta.records = prompt.records()
        delta.prompt_records = prompt.prompt_records()
        if prompt.shows_token_ids:
            delta.prompt_token_ids = prompt.token_ids

    def _show(self, text: str) -> str:
        self._text_length += len(text)
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            return text
        shown = self._matcher.push(text)
        self.met_stop_string = self._matcher.matched is not None
        return shown

    def _end(self, delta: ChoiceDelta, output: Output) -> None:
        before = self._extent(delta)
        text = self._show(self._detokenizer.finish())
        if not self.met_stop_string and self._matcher is not None:
            text += self._matcher.flush()
        delta.text += text
        if self._parser is not None and delta.parsed is not None:
            self._parser.push(text, delta.parsed)
        self._look_at_records(delta, before)
        if self.met_stop_string:
            self._end_at_stop_string(delta)
            return
        self.is_finished = True
        is_stop = output.finish_reason is FinishReason.STOP and not self._is_prompt_only
        delta.stop_reason = output.stop_token_id if is_stop else None
        delta.finish_reason = self._finish_parser(delta, "stop" if is_stop else "length")

    def _end_at_stop_string(self, delta: ChoiceDelta) -> ChoiceDelta:
        assert self._matcher is not None
        self.is_finished = True
        delta.finish_reason = self._finish_parser(delta, "stop")
        delta.stop_reason = self._matcher.matched
        return delta

    def _finish_parser(self, delta: ChoiceDelta, reason: str) -> str:
        """Lets go what the parser held back; calls change the reason for a good end."""
        parser = self._parser
        if parser is None or delta.parsed is None:
            return reason
        before = self._extent(delta)
        parser.finish(delta.parsed)
        self._look_at_records(delta, before)
        return "tool_calls" if reason == "stop" and parser.ends_with_calls else reason


def raise_failure(output: Output) -> None:
    """Raises ApiError as `Choice.push` does for an output that is none."""
    if output.finish_reason is FinishReason.TIMEOUT:
        raise timed_out()
    if output.is_grammar_fault:
        raise grammar_too_expensive()
    if output.finish_reason in (FinishReason.FAILED, FinishReason.CANCELLED):
        raise server_error("The engine failed to compute this request", "request_failed")
