"""Fields that constrain an answer: every spelling, every refusal, and what reaches the engine."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from degenerate import DEGENERATE
from frontend_server import (
    ENGINE,
    EOS_ID,
    MODEL,
    FrontendServer,
    byte_tokenizer,
    frontend_server,
)

from cearx.core.events import FinishReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import unpack_tokens
from cearx.core.step_outputs import ended_output
from cearx.frontend.choice import Choice
from cearx.frontend.detokenizer import IncrementalDetokenizer
from cearx.frontend.errors import ApiError

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server() as started:
        yield started


def grammar_of(server: FrontendServer, **fields: Any) -> str | None:
    before = len(server.core.submits)
    answer = server.post(TEXT, prompt="a", max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    [submit] = server.core.submits[before:]
    return submit.grammar


def test_spellings_mean_the_same(server: FrontendServer) -> None:
    """OpenAI's, vLLM's and vLLM's old names lead to one grammar; without one there is none."""
    strict = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    same = {
        grammar_of(server, response_format=strict),
        grammar_of(server, structured_outputs={"json": SCHEMA}),
        grammar_of(server, structured_outputs={"json": json.dumps(SCHEMA), "regex": None}),
        grammar_of(server, guided_json=SCHEMA),
    }
    assert len(same) == 1 and None not in same
    objects = {
        grammar_of(server, response_format={"type": "json_object"}),
        grammar_of(server, structured_outputs={"json_object": True}),
    }
    assert len(objects) == 1 and objects.isdisjoint(same)
    for name, value in (("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'root ::= "a"')):
        assert grammar_of(server, structured_outputs={name: value}) == grammar_of(
            server, **{f"guided_{name}": value}
        )
    assert grammar_of(server, response_format={"type": "text"}) is None
    assert grammar_of(server) is None


def test_objects_are_closed(server: FrontendServer) -> None:
    """Other properties than the listed ones are allowed only where the schema allows them."""
    no_word = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
    assert grammar_of(server, guided_json=no_word) == grammar_of(server, guided_json=SCHEMA)
    is_open = {**SCHEMA, "additionalProperties": True}
    assert grammar_of(server, guided_json=is_open) != grammar_of(server, guided_json=SCHEMA)


def test_the_vocabulary_is_told_once_and_first() -> None:
    """What the worker needs of the tokens comes before the first grammar and never again."""
    with frontend_server() as server:
        assert server.core.vocabularies == []
        for _ in range(3):
            assert grammar_of(server, guided_choice=["a"]) is not None
        [vocabulary] = server.core.vocabularies
        lengths = list(unpack_tokens(vocabulary.token_lengths))
        assert lengths[:256] == [1] * 256
        assert vocabulary.token_bytes[:256] == bytes(range(256))
        assert vocabulary.special_token_ids == (256, 257)
        assert vocabulary.eos_token_ids == (EOS_ID,)


REFUSED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", ['"xml"', "json_schema"]),
    ({"response_format": {}}, "response_format.type", ["null"]),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["null"]),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", ["required"]),
    ({"response_format": "json"}, "response_format", ['"json"', "object"]),
    ({"guided_json": 5}, "guided_json", ["5", "schema"]),
    ({"guided_json": "{"}, "guided_json", ["schema"]),
    ({"guided_json": {"type": "thing"}}, "guided_json", ["thing"]),
    ({"guided_json": {"type": "object", "not": {}}}, "guided_json", ["not"]),
    ({"guided_json": {"$ref": "#/$defs/none"}}, "guided_json", ["none"]),
    ({"guided_json": False}, "guided_json", ["cannot be used"]),
    ({"guided_regex": "("}, "guided_regex", ["cannot be used"]),
    ({"guided_regex": ""}, "guided_regex", ['""']),
    ({"guided_choice": []}, "guided_choice", ["[]"]),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]", ["5"]),
    ({"guided_choice": ["a"] * 4097}, "guided_choice", ["4096", "4097"]),
    ({"guided_grammar": "start: ("}, "guided_grammar", ["cannot be used"]),
    ({"guided_grammar": 'start: "' + "x" * 300_000 + '"'}, "guided_grammar", ["262144", "300"]),
    ({"structured_outputs": {}}, "structured_outputs", ["regex"]),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag",
     ["not supported"]),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice",
     ["one constraint", "regex"]),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
     ["one constraint", "response_format"]),
    ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", ["ignore_eos"]),
    ({"guided_regex": "a", "bad_words": ["b"]}, "guided_regex", ["bad_words"]),
    ({"guided_regex": "a", "allowed_token_ids": [1]}, "guided_regex", ["allowed_token_ids"]),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", ["not supported"]),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "param", "needles"), REFUSED, ids=lambda v: str(v)[:40])
def test_refusals(
    server: FrontendServer, path: str, fields: dict[str, Any], param: str, needles: list[str]
) -> None:
    """A constraint that cannot be kept is a 400 that names it, before the engine hears of it."""
    before = len(server.core.submits)
    prompt = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    answer = server.post(path, **prompt, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].isprintable()
    for needle in needles:
        assert needle in error["message"], error
    assert len(server.core.submits) == before


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_grammars_end_soon(server: FrontendServer, name: str) -> None:
    """They end with an answer, whether 200 or 400, and the next request is served."""
    assert grammar_of(server, guided_choice=["a"])  # a process is ready
    start = time.monotonic()
    answer = server.post(TEXT, prompt="a", max_tokens=1, **DEGENERATE[name](1))
    assert time.monotonic() - start < 3 + 5  # a busy machine gives it less than a core
    assert answer.status_code in (200, 400)
    assert grammar_of(server, guided_choice=["a", "b"]) is not None


def test_others_stream_on_while_a_grammar_is_checked(server: FrontendServer) -> None:
    """The frontend's event loop does not wait for the checking process."""
    slow = {f"k{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}x$"} for i in range(900)}
    fields = {"guided_json": {"type": "object", "properties": slow}}
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1, **fields}).encode()
    checked = threading.Event()

    def check() -> None:
        server.http.post(TEXT, content=body)
        checked.set()

    thread = threading.Thread(target=check)
    thread.start()
    num_answers = 0
    while not checked.is_set():
        assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200
        num_answers += 1
    thread.join()
    assert num_answers > 5


def test_a_model_without_an_end_has_no_structured_output() -> None:
    """Nothing could end the answer."""
    with frontend_server(msgspec.structs.replace(ENGINE, vocab_size=EOS_ID)) as server:
        answer = server.post(TEXT, prompt="a", guided_choice=["a"])
        assert answer.status_code == 400
        assert "end" in answer.json()["error"]["message"]


def test_a_grammar_that_fails_in_the_midst_is_the_clients() -> None:
    """400 with a code of its own, not the engine's fault."""
    tokenizer = byte_tokenizer()
    choice = Choice(0, IncrementalDetokenizer(tokenizer))
    failed = ended_output(RequestKey(1), FinishReason.FAILED)
    with pytest.raises(ApiError) as caught:
        choice.push(msgspec.structs.replace(failed, is_grammar_fault=True))
    assert (caught.value.status, caught.value.error.code) == (400, "grammar_too_expensive")
