"""Bodies as a fuzzer sends them: every known field with values that are right, edgy or wrong."""

import random
from typing import Any

import msgspec

from cearx.frontend.openai_types import ChatCompletionRequest, CompletionRequest
from cearx.frontend.pooling_types import EmbeddingsRequest, RerankRequest, ScoreRequest
from cearx.frontend.request_fields import UNBUILT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
Route = tuple[str, type[msgspec.Struct]]
GENERATING: list[Route] = [(CHAT, ChatCompletionRequest), (TEXT, CompletionRequest)]
POOLING: list[Route] = [
    (EMBED, EmbeddingsRequest),
    (SCORE, ScoreRequest),
    (RERANK, RerankRequest),
]
REQUIRED = {
    CHAT: ("messages",),
    TEXT: ("prompt",),
    EMBED: ("input",),
    SCORE: ("text_1", "text_2"),
    RERANK: ("query", "documents"),
}
WRONG: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 1e30, 2**31, 2**63, 2**64, 10**40, "", "a", "é😀",
    "\x00", "\ud7ff", "x" * 300, [], [0], [1, 2], [-1], ["a"], [""], [None], [[]], [{}], {},
    {"a": 1}, {"type": "text"}, {"1": 5}, {"type": None}, [[1], ["a"]], "null", "5",
]  # fmt: skip
MESSAGES: list[Any] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"},
     {"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}],
    [{"role": "assistant", "content": None}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
]  # fmt: skip
SCHEMAS: list[Any] = [
    {"type": "object"}, {"enum": [1, "a"]}, {"const": None}, True, False, {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}}, {"type": "string", "pattern": "["},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"allOf": [{"type": "string"}, {"type": "null"}]},
    {"type": "integer", "minimum": 3, "maximum": 1}, {"enum": []}, {"anyOf": []}, {"not": {}},
]  # fmt: skip
RIGHT: dict[str, list[Any]] = {
    "messages": MESSAGES,
    "prompt": ["a", "é", [1, 2], ["a", "b"], [[3], [4]], "x" * 200],
    "max_tokens": [0, 1, 5, 300],
    "min_tokens": [0, 1, 4],
    "stop": ["a", ["b", "é"]],
    "logprobs": [True, False, 0, 3],
    "top_logprobs": [0, 3, 20],
    "prompt_logprobs": [0, 2],
    "n": [1, 2, 5],
    "stream": [True, False],
    "echo": [True],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "bad_words": [["a"], ["hi", "é"]],
    "allowed_token_ids": [[1, 2, 3], list(range(200))],
    "truncate_prompt_tokens": [1, 5, -1],
    "guided_json": SCHEMAS,
    "guided_regex": ["a+", "(a|b)*c", "\\d{3}", "[", "a{1,9999}", "^a$", "(?=a)", "\\w+"],
    "guided_choice": [["a", "b"], ["\x00", "é"]],
    "guided_grammar": ['start: "a"', 'root ::= "a" root | "b"', "start: start", "start: /a/", "x"],
    "structured_outputs": [{"json": s} for s in SCHEMAS] + [{"regex": "a|b"}, {"choice": ["x"]}],
    "response_format": [{"type": "json_object"}]
    + [{"type": "json_schema", "json_schema": {"name": "x", "schema": s}} for s in SCHEMAS],
    "chat_template_kwargs": [{"enable_thinking": True}],
    "temperature": [0, 0.5, 1, 2],
    "logit_bias": [{"5": 100}, {"5": -100}],
    "continue_final_message": [True],
    "input": ["a", "é", "", [1, 2], ["a", "b"], [[3], [4]], ["a", [5]], "x" * 300],
    "encoding_format": ["float", "base64"],
    "dimensions": [1, 3, 8, 9],
    "normalize": [True, False],
    "text_1": ["a", ["a"], ["a", "b"]],
    "text_2": ["b", ["b"], ["b", "c"], ["b"] * 3, "x" * 300],
    "query": ["q", "", "é"],
    "documents": [["a"], ["a", {"text": "b"}], [{"text": "c"}], ["x" * 300], ["a"] * 20],
    "top_n": [0, 1, 5],
    "return_documents": [True, False],
    "instruction": ["Judge."],
    "truncation_side": ["left", "right"],
    "add_special_tokens": [True, False],
}


def random_body(
    chance: random.Random, routes: list[Route] = GENERATING
) -> tuple[str, dict[str, Any]]:
    """A route and a body: mostly right values in half of the bodies, anything in the other half."""
    path, request_type = chance.choice(routes)
    names = [*request_type.__struct_fields__, *chance.sample(sorted(UNBUILT), 3), "unknown"]
    names.remove("model")
    share_wrong = chance.choice([0.0, 0.05, 0.5])
    body: dict[str, Any] = {}
    for name in chance.sample(names, chance.randint(0, 7)):
        right = RIGHT.get(name)
        if right is None or chance.random() < share_wrong:
            body[name] = chance.choice(WRONG)
        else:
            body[name] = chance.choice(right)
    for required in REQUIRED[path]:
        if chance.random() < 0.95:
            body[required] = chance.choice(RIGHT[required])
    body.setdefault("max_tokens", 4)
    return path, body
