"""/openapi.json describes the routes that there are, and what they really answer."""

from collections.abc import Iterator
from typing import Any

import pytest
from frontend_server import MODEL, FrontendServer, frontend_server
from starlette.routing import Route

from cearx.frontend.app import _routes
from cearx.frontend.task_routes import PATHS

HELLO = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module", params=["generate", "embed", "score"])
def server(request: pytest.FixtureRequest) -> Iterator[FrontendServer]:
    with frontend_server(task=request.param) as started:
        yield started


@pytest.fixture(scope="module")
def document(server: FrontendServer) -> Any:
    return server.http.get("/openapi.json").raise_for_status().json()


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_route_is_described(server: FrontendServer, document: Any) -> None:
    """Neither a path too few nor one too many, each with its method; none that is refused."""
    routes = [route for route in _routes(server.state).routes if isinstance(route, Route)]
    there = {
        route.path.replace("{name:path}", "{name}"): route
        for route in routes
        if server.state.task in PATHS.get(route.path, (server.state.task,))
    }
    assert document["paths"].keys() == there.keys()
    for path, methods in document["paths"].items():
        (method,) = methods
        assert method.upper() in (there[path].methods or {"POST"})


def test_every_reference_leads_somewhere(document: Any) -> None:
    """Within the document."""
    schemas = document["components"]["schemas"]
    found = set(references(document))
    assert len(found) > 10
    assert {reference.removeprefix("#/components/schemas/") for reference in found} <= set(schemas)


@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        ("generate", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("generate", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("generate", "/tokenize", {"prompt": "a"}),
        ("generate", "/detokenize", {"tokens": [97]}),
        ("generate", "/abort_requests", {"request_ids": ["x"]}),
        ("embed", "/v1/embeddings", {"input": "a"}),
        ("score", "/v1/score", {"text_1": "a", "text_2": "b"}),
        ("score", "/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("generate", "/reset_prefix_cache", {}),
    ],
    indirect=["server"],
)
def test_bodies_have_the_fields_that_are_described(
    server: FrontendServer, document: Any, path: str, body: dict[str, Any]
) -> None:
    """What is required is there, and nothing is there that is not described."""
    described = document["paths"][path]["post"]["responses"]["200"]["content"]
    name = described["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema = document["components"]["schemas"][name]
    answer = server.post(path, model=MODEL, **body).raise_for_status().json()
    assert set(schema["required"]) <= answer.keys() <= schema["properties"].keys()


def test_errors_have_the_form_that_is_described(server: FrontendServer, document: Any) -> None:
    """On every route with a body, which is not even JSON here."""
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        if server.state.task != "generate" and path not in PATHS:  # the same on all servers
            continue
        error = methods["post"]["responses"]["default"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][error["$ref"].rsplit("/", 1)[1]]
        told = server.http.post(path, content=b"{").json()
        assert set(schema["required"]) <= told.keys() <= schema["properties"].keys(), path
        inner = document["components"]["schemas"][
            schema["properties"]["error"]["$ref"].rsplit("/", 1)[1]
        ]
        assert told["error"].keys() == inner["properties"].keys(), path


@pytest.mark.parametrize(
    ("server", "path", "asked"),
    [
        ("generate", "/v1/chat/completions", {"messages": HELLO}),
        ("generate", "/v1/completions", {"prompt": "a"}),
    ],
    indirect=["server"],
)
def test_no_null_where_a_text_is_due(
    server: FrontendServer, path: str, asked: dict[str, Any]
) -> None:
    """OpenAI's schema lets the fingerprint be absent, and a strict client refuses a null."""
    answer = server.post(path, model=MODEL, max_tokens=1, **asked).raise_for_status().json()
    assert "system_fingerprint" not in answer


def test_keys_are_described() -> None:
    """A server with keys says how to send them, to those who have one."""
    with frontend_server(api_keys=("sk-a",)) as server:
        headers = {"authorization": "Bearer sk-a"}
        document = server.http.get("/openapi.json", headers=headers).json()
        assert document["security"] == [{"key": []}]
