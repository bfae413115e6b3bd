"""Reasoning between <think> and </think> apart from the answer behind it.

White space around both is dropped. A template may have opened the thought in the prompt already:
that is seen in the prompt, not in a flag. Any cut of the text into pieces gives the same result.
Used by `output_parser.py`.
"""

from enum import Enum, auto

from cearx.frontend.parsed_text import decided

OPEN = "<think>"
CLOSE = "</think>"


class _State(Enum):
    START = auto()
    """The text may still open a thought."""
    THINKING = auto()
    AFTER = auto()
    """White space before the answer."""
    ANSWERING = auto()


class ThinkSplitter:
    """`push` pieces, `finish` once; both answer (reasoning, answer)."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt has opened the thought."""
        self._state = _State.THINKING if is_open else _State.START
        self._held = ""
        self._has_thought = False

    @property
    def is_thinking(self) -> bool:
        return self._state is _State.THINKING

    def push(self, text: str) -> tuple[str, str]:
        if self._state is _State.ANSWERING:
            return "", text
        self._held += text
        reasoning = ""
        if self._state is _State.START:
            self._begin()
        if self._state is _State.THINKING:
            reasoning = self._think()
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWERING
        if self._state is not _State.ANSWERING:
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """What was held back because more might have come."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return self._stripped(held.rstrip()), ""
        return "", held if self._state is _State.START else ""

    def _begin(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(OPEN):
            self._state = _State.THINKING
            self._held = bare[len(OPEN) :]
        elif not OPEN.startswith(bare):
            self._state = _State.ANSWERING

    def _think(self) -> str:
        end = self._held.find(CLOSE)
        if end >= 0:
            thought = self._held[:end].rstrip()
            self._held = self._held[end + len(CLOSE) :]
            self._state = _State.AFTER
        else:
            length = decided(self._held, CLOSE)
            thought, self._held = self._held[:length], self._held[length:]
        return self._stripped(thought)

    def _stripped(self, thought: str) -> str:
        """Without the white space that the thought begins with."""
        if not self._has_thought:
            thought = thought.lstrip()
            self._has_thought = bool(thought)
        return thought
