"""Prompts from a file: JSON lines with a prompt each, or ShareGPT conversations.

Owns the two formats. What a file does not say about the output's length, the caller must. Called by
`serve.py`.
"""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from cearx.frontend.bench.bench_error import BenchError


class DatasetPrompt(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    output_len: int


class _Line(msgspec.Struct):
    prompt: str
    output_len: int | None = None
    output_tokens: int | None = None


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_dataset(
    path: Path, output_len: int | None, count_tokens: Callable[[str], int] | None
) -> list[DatasetPrompt]:
    """All prompts of the file, in its order; raises BenchError.

    The output's length is `output_len` when it is given, else the file's own, else the tokens of
    the conversation's answer by `count_tokens`.
    """
    try:
        content = path.read_bytes()
        if content.lstrip()[:1] == b"[":
            return _from_conversations(content, output_len, count_tokens)
        return _from_lines(content, output_len)
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise BenchError(f"{path} cannot be used: {error}") from error


def _from_lines(content: bytes, output_len: int | None) -> list[DatasetPrompt]:
    prompts = []
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        line = msgspec.json.decode(text, type=_Line)
        length = output_len or line.output_len or line.output_tokens
        if length is None or length < 1:
            raise ValueError(f"line {number} has no output_len; give one for all: --output-len")
        prompts.append(DatasetPrompt(text=line.prompt, output_len=length))
    return _not_empty(prompts)


def _from_conversations(
    content: bytes, output_len: int | None, count_tokens: Callable[[str], int] | None
) -> list[DatasetPrompt]:
    if output_len is None and count_tokens is None:
        raise ValueError("a conversation's output length needs --tokenizer or --output-len")
    prompts = []
    for conversation in msgspec.json.decode(content, type=list[_Conversation]):
        if len(conversation.conversations) < 2:
            continue
        question, answer = (turn.value for turn in conversation.conversations[:2])
        length = output_len
        if length is None:
            assert count_tokens is not None, "checked above"
            length = count_tokens(answer)
        if question and length >= 1:
            prompts.append(DatasetPrompt(text=question, output_len=length))
    return _not_empty(prompts)


def _not_empty(prompts: list[DatasetPrompt]) -> list[DatasetPrompt]:
    if not prompts:
        raise ValueError("it holds no prompt")
    return prompts


def sample(prompts: list[DatasetPrompt], count: int, seed: int) -> list[DatasetPrompt]:
    """`count` of them in random order; all come once before any comes twice."""
    order = random.Random(seed)
    drawn: list[DatasetPrompt] = []
    while len(drawn) < count:
        drawn += order.sample(prompts, min(len(prompts), count - len(drawn)))
    return drawn
