"""POST /v1/embeddings against a scripted core: forms, cuts, usage, and what may not be sent."""

import base64
import socket
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from fake_core import Reply, vector_of
from frontend_server import EMBEDDING_SIZE, MODEL, FrontendServer, frontend_server
from tokenizers import processors

from cearx.core.events import CancelReason, FinishReason, RefusalReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import Embed, Refused, unpack_tokens
from cearx.frontend.request_fields import UNBUILT

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    with frontend_server(task="embed", enable_prompt_tokens_details=True) as started:
        yield started


def embed(server: FrontendServer, given: object, **fields: object) -> Any:
    answer = server.post(PATH, model=MODEL, input=given, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sent(server: FrontendServer, given: object, **fields: object) -> list[list[int]]:
    """The prompts that reach the engine."""
    before = len(server.core.submits)
    embed(server, given, **fields)
    return [list(unpack_tokens(submit.token_ids)) for submit in server.core.submits[before:]]


def test_one_text(server: FrontendServer) -> None:
    """The whole body, as OpenAI's with vLLM's id and time."""
    body = embed(server, "héj", request_id="mine")
    [data] = body.pop("data")
    assert isinstance(body.pop("created"), int)
    usage = body.pop("usage")
    assert body == {"id": "embd-mine", "object": "list", "model": MODEL}
    assert usage["prompt_tokens"] == usage["total_tokens"] == 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    numbers = array("f", vector_of(Embed(), list("héj".encode()))).tolist()
    assert data == {"index": 0, "object": "embedding", "embedding": numbers}
    submit = server.core.submits[-1]
    assert (submit.max_tokens, submit.has_exact_length, submit.pooling) == (1, True, Embed())


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["a", [5]], [[97], [5]]),
    ],
)
def test_forms_of_input(server: FrontendServer, given: object, prompts: list[list[int]]) -> None:
    """Texts and token ids, one or many; vectors and indices in the order of the request."""
    assert sent(server, given) == prompts
    body = embed(server, given, encoding_format="float")
    assert [data["index"] for data in body["data"]] == list(range(len(prompts)))
    for data, prompt in zip(body["data"], prompts, strict=True):
        assert data["embedding"] == array("f", vector_of(Embed(), prompt)).tolist()
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_base64_holds_the_same_numbers(server: FrontendServer) -> None:
    """Little-endian float32, bit for bit; also for an answer that is written in a thread."""
    texts = ["a" * (1 + n % 9) for n in range(2048)]
    floats = embed(server, texts)["data"]
    packed = embed(server, texts, encoding_format="base64")["data"]
    assert len(floats) == len(packed) == 2048
    for plain, coded in zip(floats, packed, strict=True):
        numbers = array("f", base64.b64decode(coded["embedding"], validate=True))
        assert numbers.tolist() == plain["embedding"]


def test_what_the_engine_is_told(server: FrontendServer) -> None:
    """Dimensions and normalisation are the worker's; salts keep prompts apart."""
    assert len(embed(server, "a" * 40, dimensions=3)["data"][0]["embedding"]) == 3
    assert server.core.submits[-1].pooling == Embed(dimensions=3)
    hashes = server.core.submits[-1].block_hashes
    embed(server, "a" * 40, normalize=False, dimensions=EMBEDDING_SIZE, cache_salt="x")
    assert server.core.submits[-1].pooling == Embed(dimensions=EMBEDDING_SIZE, normalize=False)
    assert len(server.core.submits[-1].block_hashes) == len(hashes) == 2
    assert set(server.core.submits[-1].block_hashes).isdisjoint(hashes)


def test_a_prompt_may_fill_the_context(server: FrontendServer) -> None:
    """All 256 tokens; one more is an error with both numbers, or is cut."""
    assert sent(server, "a" * 256) == [[97] * 256]
    error = server.post(PATH, input=["b", "a" * 257]).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "257" in error["message"] and "256" in error["message"]
    assert sent(server, "b" + "a" * 256, truncate_prompt_tokens=-1) == [[98] + [97] * 255]
    assert sent(server, "abcd", truncate_prompt_tokens=2) == [[97, 98]]
    assert sent(server, "abcd", truncate_prompt_tokens=2, truncation_side="left") == [[99, 100]]
    assert sent(server, [1, 2, 3], truncate_prompt_tokens=2) == [[1, 2]]


def test_a_cut_keeps_what_the_tokenizer_adds() -> None:
    """The embedding is the state of the token behind the text, so that one stays."""
    with frontend_server(task="embed") as server:
        template = processors.TemplateProcessing(
            single="<|mark|> $A <|end|>", special_tokens=[("<|mark|>", 257), ("<|end|>", 256)]
        )
        server.state.tokenizer._backend.post_processor = template
        assert sent(server, "abc") == [[257, 97, 98, 99, 256]]
        assert sent(server, "abc", truncate_prompt_tokens=4) == [[257, 97, 98, 256]]
        left = sent(server, "abc", truncate_prompt_tokens=3, truncation_side="left")
        assert left == [[257, 99, 256]]
        assert sent(server, "abc", add_special_tokens=False) == [[97, 98, 99]]
        error = server.post(PATH, input="abc", truncate_prompt_tokens=2).json()["error"]
        assert error["param"] == "truncate_prompt_tokens" and "2" in error["message"]


BAD = [
    ({}, "input", ["required"]),
    ({"input": None}, "input", ["null"]),
    ({"input": 5}, "input", ["5"]),
    ({"input": ""}, "input", ["at least one token", "0"]),
    ({"input": []}, "input", ["at least one token", "0"]),
    ({"input": ["a", ""]}, "input[1]", ["at least one token"]),
    ({"input": ["a", 5]}, "input[1]", ["5"]),
    ({"input": ["a"] * 2049}, "input", ["2048", "2049"]),
    ({"input": [1, 258]}, "input[1]", ["258"]),
    ({"input": [[1], [True]]}, "input[1][0]", ["true"]),
    ({"dimensions": 0}, "dimensions", ["0", ">= 1"]),
    ({"dimensions": 9}, "dimensions", ["9", "1..8"]),
    ({"dimensions": 2.5}, "dimensions", ["2.5", "int"]),
    ({"encoding_format": "bytes"}, "encoding_format", ['"bytes"']),
    ({"normalize": 1}, "normalize", ["1", "bool"]),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["0", "1..256"]),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ["-2", ">= -1"]),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", ["257", "1..256"]),
    ({"truncation_side": "middle"}, "truncation_side", ['"middle"']),
    ({"add_special_tokens": "no"}, "add_special_tokens", ['"no"', "bool"]),
    ({"priority": 3}, "priority", ["3", "0"]),
    ({"cache_salt": ""}, "cache_salt", ['""', ">= 1"]),
    ({"request_id": "x" * 129}, "request_id", ["<= 128"]),
    ({"user": 5}, "user", ["5", "str"]),
    ({"model": 5}, "model", ["5", "str"]),
]


@pytest.mark.parametrize(("fields", "param", "needles"), BAD, ids=lambda v: str(v)[:24])
def test_bad_input(
    server: FrontendServer, fields: dict[str, Any], param: str, needles: list[str]
) -> None:
    """400 that names the field, the value and the limit; nothing reaches the engine."""
    before = len(server.core.submits)
    has_input = "input" in fields or not fields
    answer = server.post(PATH, **({} if has_input else {"input": "a"}), **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert error["param"] == param
    assert all(needle in error["message"] for needle in needles), error["message"]
    assert len(server.core.submits) == before


@pytest.mark.parametrize("name", ["embed_dtype", "endianness", "max_tokens_per_doc"])
def test_what_is_not_built_is_refused_by_name(server: FrontendServer, name: str) -> None:
    """Numbers come as float32, whole documents are read."""
    for harmless in UNBUILT[name]:
        embed(server, "a", **{name: harmless})
    error = server.post(PATH, input="a", **{name: "big"}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_another_model_does_not_exist(server: FrontendServer) -> None:
    """404 as on every route."""
    assert server.post(PATH, model="other", input="a").status_code == 404


def test_failures_of_the_engine() -> None:
    """One failed text fails the request, and the others are taken back; 500, 504, 503."""
    with frontend_server(task="embed") as server:
        core = server.core
        for reason, status in ((FinishReason.FAILED, 500), (FinishReason.TIMEOUT, 504)):
            core.reply = lambda submit, reason=reason: Reply(token_ids=[], finish_reason=reason)
            assert server.post(PATH, input=["a", "b"]).status_code == status
        core.reply = lambda submit: Refused(
            request_key=RequestKey(0),
            reason=RefusalReason.QUEUE_FULL,
            num_tokens=3,
            limit_tokens=2,
        )
        answer = server.post(PATH, input=["a", "b"])
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        core.wait_until(lambda core: core.num_running == 0)


def test_a_client_that_leaves_ends_its_work() -> None:
    """All of its texts are taken back, and the next request is served."""
    with frontend_server(task="embed") as server:
        server.core.is_paused = True
        body = msgspec.json.encode({"model": MODEL, "input": ["a", "b", "c"]})
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
            client.sendall(head + body)
            server.core.wait_until(lambda core: core.num_running == 3)
        server.core.wait_until(lambda core: core.num_running == 0)
        assert [reason for _, reason in server.core.cancels] == [CancelReason.DISCONNECT] * 3
        server.core.is_paused = False
        embed(server, "a")


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_official_client(server: FrontendServer, encoding: Any) -> None:
    """openai-python; without a format it asks for base64 by itself, and unpacks that.

    Its own strict validation knows no base64.
    """
    with openai.OpenAI(
        base_url=server.url + "/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=encoding == "float",
    ) as client:
        options = {} if encoding is None else {"encoding_format": encoding}
        made = client.embeddings.create(model=MODEL, input=["ab", "c"], dimensions=4, **options)
    assert made.usage.prompt_tokens == made.usage.total_tokens == 3
    wanted = [array("f", vector_of(Embed(dimensions=4), p)).tolist() for p in ([97, 98], [99])]
    for data, numbers in zip(made.data, wanted, strict=True):
        found: Any = data.embedding
        if encoding == "base64":
            found = array("f", base64.b64decode(found)).tolist()
        assert found == numbers
