"""POST /v1/score and /v1/rerank against a scripted core: prompts, orders, forms, bad input."""

from collections.abc import Iterator
from typing import Any

import pytest
from frontend_server import MODEL, FrontendServer, frontend_server

from cearx.core.messages import Embed, Score, unpack_tokens
from cearx.frontend.pair_template import INSTRUCTION

SCORE, RERANK = "/v1/score", "/v1/rerank"
DOCUMENTS = ["b3", "c9", "d3", "e1"]


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    """A reranker that knows a text's last digit, and whose template is `[` and `]<|end|>`."""
    with frontend_server(task="score") as started:
        yield started


@pytest.fixture(scope="module")
def embedder() -> Iterator[FrontendServer]:
    with frontend_server(task="embed") as started:
        yield started


def post(server: FrontendServer, path: str, **fields: object) -> Any:
    answer = server.post(path, model=MODEL, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts_sent(server: FrontendServer, path: str, **fields: object) -> list[str]:
    """The prompts that reach the engine, without what the template puts around them."""
    before = len(server.core.submits)
    post(server, path, **fields)
    found = []
    for submit in server.core.submits[before:]:
        prompt = list(unpack_tokens(submit.token_ids))
        assert (prompt[0], prompt[-2:]) == (ord("["), [ord("]"), 256])
        assert submit.pooling == Score(negative=ord("n"), positive=ord("y"))
        assert (submit.max_tokens, submit.has_exact_length) == (1, True)
        found.append(bytes(prompt[1:-2]).decode())
    return found


def pair(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"


def test_the_prompt_of_a_pair(server: FrontendServer) -> None:
    """As the model card writes it, with the instruction in its place."""
    assert texts_sent(server, RERANK, query="q", documents=["d", {"text": "e"}]) == [
        pair("q", "d"),
        pair("q", "e"),
    ]
    told = texts_sent(server, SCORE, text_1="q", text_2="d", instruction="Judge.")
    assert told == [pair("q", "d", "Judge.")]


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
def test_ranking(server: FrontendServer, path: str) -> None:
    """Best first, ties in the order of the request, with vLLM's and Jina's fields."""
    body = post(server, path, query="q", documents=DOCUMENTS, request_id="mine")
    results = body.pop("results")
    usage = body.pop("usage")
    assert body == {"id": "rerank-mine", "model": MODEL}
    assert usage["prompt_tokens"] == usage["total_tokens"] == 4 * len(pair("q", "b3")) + 4 * 3
    assert [result["index"] for result in results] == [1, 0, 2, 3]
    assert [result["document"] for result in results] == [
        {"text": DOCUMENTS[result["index"]]} for result in results
    ]
    scores = [result["relevance_score"] for result in results]
    assert scores == pytest.approx([0.9, 0.3, 0.3, 0.1])


def test_parts_of_a_ranking(server: FrontendServer) -> None:
    """top_n best ones, 0 and more than there are: all; without their texts."""
    for top_n, indices in ((2, [1, 0]), (0, [1, 0, 2, 3]), (9, [1, 0, 2, 3])):
        body = post(server, RERANK, query="q", documents=DOCUMENTS, top_n=top_n)
        assert [result["index"] for result in body["results"]] == indices
    body = post(server, RERANK, query="q", documents=DOCUMENTS, return_documents=False)
    assert all(result.keys() == {"index", "relevance_score"} for result in body["results"])


@pytest.mark.parametrize("path", [SCORE, "/score"])
def test_scores(server: FrontendServer, path: str) -> None:
    """The whole body, as vLLM's."""
    body = post(server, path, text_1="q", text_2=["x1", "x2"])
    assert isinstance(body.pop("created"), int)
    assert body.pop("id").startswith("score-")
    usage = body.pop("usage")
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    scores = [data.pop("score") for data in body["data"]]
    assert scores == pytest.approx([0.1, 0.2])
    assert body == {
        "object": "list",
        "model": MODEL,
        "data": [{"index": 0, "object": "score"}, {"index": 1, "object": "score"}],
    }


def test_shapes_of_scores(server: FrontendServer) -> None:
    """One and one, one and many, many and one, as many of both; two names for the sides."""
    cases: list[tuple[Any, Any, list[tuple[str, str]]]] = [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "b"], "c", [("a", "c"), ("b", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ]
    for first, second, pairs in cases:
        wanted = [pair(*texts) for texts in pairs]
        assert texts_sent(server, SCORE, text_1=first, text_2=second) == wanted
        assert texts_sent(server, SCORE, queries=first, documents=second) == wanted


def test_a_cut_keeps_the_template(server: FrontendServer) -> None:
    """The middle is cut behind, as the recipe does, or in front."""
    whole = pair("q", "d" * 20)
    fields = {"query": "q", "documents": ["d" * 20], "truncate_prompt_tokens": len(whole) - 5}
    assert texts_sent(server, RERANK, **fields) == [whole[:-8]]
    assert texts_sent(server, RERANK, **fields, truncation_side="left") == [whole[8:]]
    error = server.post(RERANK, query="q", documents=["a", "d" * 300]).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "documents[1]")
    assert "256" in error["message"]
    fields["truncate_prompt_tokens"] = 3
    error = server.post(RERANK, **fields).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


def test_cosines_of_an_embedding_model(embedder: FrontendServer) -> None:
    """Each text is computed once, with nothing around it; a pair's score is the dot product."""
    before = len(embedder.core.submits)
    body = post(embedder, SCORE, text_1="ab", text_2=["abc", "b"])
    submits = embedder.core.submits[before:]
    assert [bytes(unpack_tokens(s.token_ids).tolist()) for s in submits] == [b"ab", b"abc", b"b"]
    assert {s.pooling for s in submits} == {Embed()}
    rest = sum(n * n for n in range(5))
    wanted = [(2 * 3 + 97 * 97 + 98 * 99 + rest) / 64, (2 * 1 + 97 * 98 + 98 * 98 + rest) / 64]
    assert [data["score"] for data in body["data"]] == pytest.approx(wanted)
    ranking = post(embedder, RERANK, query="ab", documents=["b", "abc"], top_n=1)
    assert [result["index"] for result in ranking["results"]] == [1 if wanted[0] > wanted[1] else 0]
    error = embedder.post(RERANK, query="a", documents=["b"], instruction="x").json()["error"]
    assert (error["param"], error["code"]) == ("instruction", "unsupported_parameter")


BAD: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (RERANK, {"documents": ["a"]}, "query", ["required"]),
    (RERANK, {"query": "q"}, "documents", ["required"]),
    (RERANK, {"query": ["q"], "documents": ["a"]}, "query", ['["q"]', "str"]),
    (RERANK, {"query": "q", "documents": []}, "documents", ["[]", ">= 1"]),
    (RERANK, {"query": "q", "documents": "a"}, "documents", ['"a"', "array"]),
    (RERANK, {"query": "q", "documents": ["a"] * 1025}, "documents", ["<= 1024"]),
    (RERANK, {"query": "q", "documents": ["a", 5]}, "documents[1]", ["5"]),
    (RERANK, {"query": "q", "documents": [{"image": "x"}]}, "documents[0].text", ["required"]),
    (RERANK, {"query": "q", "documents": [{"text": 5}]}, "documents[0].text", ["5", "str"]),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": -1}, "top_n", ["-1", ">= 0"]),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": "x"}, "top_n", ['"x"', "int"]),
    (RERANK, {"query": "q", "documents": ["a"], "return_documents": 2}, "return_documents",
     ["2", "bool"]),
    (RERANK, {"query": "q", "documents": ["a"], "instruction": ""}, "instruction", ['""', ">= 1"]),
    (RERANK, {"query": "q", "documents": ["a"], "priority": 2}, "priority", ["2", "0"]),
    (RERANK, {"query": "q", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc",
     ["not supported", "9"]),
    (SCORE, {"text_2": "b"}, "text_1", ["required"]),
    (SCORE, {"text_1": "b"}, "text_2", ["required"]),
    (SCORE, {"queries": "b"}, "documents", ["required"]),
    (SCORE, {"text_1": "a", "text_2": "b", "queries": "c"}, "queries", ["not both"]),
    (SCORE, {"text_1": [], "text_2": "b"}, "text_1", ["[]", ">= 1"]),
    (SCORE, {"text_1": "a", "text_2": ["b", 5]}, "text_2[1]", ["5", "str"]),
    (SCORE, {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, "text_2", ["2 and 3"]),
    (SCORE, {"text_1": "a", "text_2": ["b"] * 1025}, "text_2", ["<= 1024"]),
    (SCORE, {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 300},
     "truncate_prompt_tokens", ["300", "1..256"]),
    (SCORE, {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation", ["false"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "needles"), BAD, ids=lambda v: str(v)[:24])
def test_bad_input(
    server: FrontendServer, path: str, fields: dict[str, Any], param: str, needles: list[str]
) -> None:
    """400 that names the field, the value and the limit; nothing reaches the engine."""
    before = len(server.core.submits)
    answer = server.post(path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert error["param"] == param, error
    assert all(needle in error["message"] for needle in needles), error["message"]
    assert len(server.core.submits) == before
