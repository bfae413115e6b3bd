"""Whole servers of an embedding model and of a reranker, against transformers by the model cards.

The step's budget is far below a prompt's length, so that prompts are computed in chunks.
"""

import re
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from pooling_models import EmbeddingModel, Reranker
from server_process import Server, replay, serving

FLAGS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--block-size", "16")
WITHIN = 1e-4
"""Ten times better than what must be shown."""
TEXTS = [
    "Instruct: Given a web search query, retrieve relevant passages\nQuery:What is the capital?",
    "The capital of China is Beijing.",
    "Gravity is a force that attracts two bodies towards each other. " * 6,
    "größe 😀 日本語",
    "x",
    "",
]
QUERIES = ["What is the capital of China?", "Explain gravity"]
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts bodies. " * 12, "no", "größe"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, EmbeddingModel]]:
    folder = tmp_path_factory.mktemp("embeddings")
    model = EmbeddingModel(folder)
    trace = tmp_path_factory.mktemp("trace")
    with serving(str(folder), *FLAGS, "--enable-prompt-tokens-details", trace=trace) as server:
        yield server, model
        assert server.stop() == 0
    done = replay(server.trace_log)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Reranker]]:
    folder = tmp_path_factory.mktemp("tiny") / "Tiny-Reranker"
    folder.mkdir()
    model = Reranker(folder)
    trace = tmp_path_factory.mktemp("trace")
    with serving(str(folder), *FLAGS, "--enable-prompt-tokens-details", trace=trace) as server:
        yield server, model
        assert server.stop() == 0
    done = replay(server.trace_log)
    assert done.returncode == 0, done.stdout + done.stderr


def embeddings(server: Server, given: object, **fields: object) -> "np.ndarray[tuple[int, int]]":
    answer = server.post("/v1/embeddings", input=given, **fields)
    assert answer.status_code == 200, answer.text
    return np.array([data["embedding"] for data in answer.json()["data"]])


def test_embeddings_are_those_of_the_model_card(embedder: tuple[Server, EmbeddingModel]) -> None:
    """All at once, alone, and again where the cache holds them; cut; and by token ids."""
    server, model = embedder
    wanted = model.embed(TEXTS).numpy()
    together = embeddings(server, TEXTS)
    assert np.abs(together - wanted).max() < WITHIN
    alone = np.concatenate([embeddings(server, text) for text in TEXTS])
    assert np.abs(alone - wanted).max() < WITHIN
    again = server.post("/v1/embeddings", input=TEXTS).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert np.abs(np.array([d["embedding"] for d in again["data"]]) - wanted).max() < WITHIN
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    assert again["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert np.abs(embeddings(server, ids) - wanted).max() < WITHIN
    for dimensions in (1, 17, model.size):
        cut = model.cut(model.embed(TEXTS), dimensions).numpy()
        assert np.abs(embeddings(server, TEXTS, dimensions=dimensions) - cut).max() < WITHIN
    shorter = model.embed(TEXTS, max_length=20).numpy()
    assert np.abs(embeddings(server, TEXTS, truncate_prompt_tokens=20) - shorter).max() < WITHIN


def test_a_prompt_may_fill_the_context(embedder: tuple[Server, EmbeddingModel]) -> None:
    """All 1,024 positions of the model, and not one token more."""
    server, model = embedder
    text = "".join(chr(97 + n * n % 11) for n in range(1_023))  # and the token behind it
    wanted = model.embed([text], max_length=2_000).numpy()
    assert np.abs(embeddings(server, text) - wanted).max() < WITHIN
    answer = server.post("/v1/embeddings", input=text + "a")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "1025" in error["message"] and "1024" in error["message"]


def test_the_official_client(embedder: tuple[Server, EmbeddingModel]) -> None:
    """Floats, and base64 as the client asks for by itself, are the same numbers."""
    server, model = embedder
    wanted = model.embed(TEXTS[:3]).numpy()
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model=server.name, input=TEXTS[:3])
        plain = client.embeddings.create(
            model=server.name, input=TEXTS[:3], encoding_format="float"
        )
    for one, other, right in zip(packed.data, plain.data, wanted, strict=True):
        assert one.embedding == other.embedding
        assert np.abs(np.array(one.embedding) - right).max() < WITHIN


def test_scores_of_an_embedding_model_are_cosines(
    embedder: tuple[Server, EmbeddingModel],
) -> None:
    """As the model card compares queries and documents."""
    server, model = embedder
    vectors = model.embed([*QUERIES, *DOCUMENTS]).numpy()
    wanted = vectors[:1] @ vectors[2:].T
    answer = server.post("/v1/score", text_1=QUERIES[0], text_2=DOCUMENTS).json()
    scores = [data["score"] for data in answer["data"]]
    assert np.abs(np.array(scores) - wanted[0]).max() < WITHIN


def test_scores_are_those_of_the_model_card(reranker: tuple[Server, Reranker]) -> None:
    """Alone, in batches, after hits, with another instruction, and cut."""
    server, model = reranker
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
    wanted = model.score(pairs)
    assert max(wanted) - min(wanted) > 0.1, "the scores tell nothing apart"
    for _ in range(2):
        answer = server.post(
            "/v1/score", text_1=[q for q, _ in pairs], text_2=[d for _, d in pairs]
        )
        found = [data["score"] for data in answer.json()["data"]]
        assert found == pytest.approx(wanted, abs=WITHIN)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    alone = [
        server.post("/score", text_1=query, text_2=document).json()["data"][0]["score"]
        for query, document in pairs
    ]
    assert alone == pytest.approx(wanted, abs=WITHIN)
    told = model.score(pairs[:2], instruction="Find the capital")
    answer = server.post(
        "/v1/score", queries=QUERIES[0], documents=DOCUMENTS[:2], instruction="Find the capital"
    )
    assert [d["score"] for d in answer.json()["data"]] == pytest.approx(told, abs=WITHIN)
    shorter = model.score(pairs, max_length=420)
    assert shorter != pytest.approx(wanted, abs=WITHIN), "nothing was cut"
    answer = server.post(
        "/v1/score",
        text_1=[q for q, _ in pairs],
        text_2=[d for _, d in pairs],
        truncate_prompt_tokens=420,
    )
    assert [d["score"] for d in answer.json()["data"]] == pytest.approx(shorter, abs=WITHIN)


def test_a_ranking_is_in_the_order_of_scores(reranker: tuple[Server, Reranker]) -> None:
    """Best first, under every path, also as Cohere's clients ask."""
    server, model = reranker
    scores = model.score([(QUERIES[1], document) for document in DOCUMENTS])
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -scores[index])
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = server.post(path, query=QUERIES[1], documents=DOCUMENTS, top_n=3)
        results = answer.json()["results"]
        assert [result["index"] for result in results] == order[:3]
        found = [result["relevance_score"] for result in results]
        assert found == pytest.approx([scores[index] for index in order[:3]], abs=WITHIN)


def test_vectors_are_counted(reranker: tuple[Server, Reranker]) -> None:
    """Requests and prompt tokens, and not one generated token."""
    server, _ = reranker

    def value(name: str) -> float:
        text = httpx.get(server.url + "/metrics").text
        found = re.search(rf"^vllm:{name}[^\n]* ([\d.e+]+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    success = r'request_success_total{[^}]*"stop"[^}]*}'
    before, tokens = value(success), value("prompt_tokens_total")
    answer = server.post("/v1/rerank", query="q", documents=DOCUMENTS)
    assert value(success) == before + len(DOCUMENTS)
    used = answer.json()["usage"]["prompt_tokens"]
    assert value("prompt_tokens_total") == tokens + used
    assert value("generation_tokens_total") == 0
    assert value("e2e_request_latency_seconds_count") == before + len(DOCUMENTS)


def test_what_is_not_served(reranker: tuple[Server, Reranker]) -> None:
    """A reranker writes no texts and makes no embeddings, and says so."""
    server, _ = reranker
    for path in ("/v1/completions", "/v1/embeddings"):
        answer = server.post(path, prompt="a", input="a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_endpoint")
