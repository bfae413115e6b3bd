"""What every request goes through: keys, origins, ids, header limits, and the end of the server."""

import re
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from fake_core import Reply
from frontend_server import MODEL, FrontendServer, frontend_server
from starlette.routing import Route

from cearx.core.api_keys import api_key_digests
from cearx.core.config import FrontendConfig, ServerConfig
from cearx.frontend.app import _routes

KEYS = ("sk-first", "sk-second")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 1}


def ask(server: FrontendServer, **headers: str) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json=CHAT, headers=headers)


def test_every_route_is_closed_without_a_key() -> None:
    """All paths that exist and those that do not are 401; only the probes answer."""
    with frontend_server(api_keys=KEYS) as server:
        routes = [route for route in _routes(server.state).routes if isinstance(route, Route)]
        paths = [route.path.replace("{name:path}", "x") for route in routes]
        assert len(paths) > 5
        for path in [*paths, "/nothing", "//health", "/health/", "/Health"]:
            for method in ("GET", "POST"):
                status = server.http.request(method, server.url + path).status_code
                is_open = path in ("/health", "/live")
                assert (status != 401) if is_open else (status == 401), (method, path)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer sk-first"}, 200),
        ({"authorization": "bearer sk-second"}, 200),
        ({"x-api-key": "sk-second"}, 200),
        ({"authorization": "Bearer sk-firs"}, 401),
        ({"authorization": "Bearer sk-first2"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic sk-first"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
def test_a_key_opens_the_server(headers: dict[str, str], status: int) -> None:
    """OpenAI's header and Anthropic's, exactly one of the keys."""
    with frontend_server(api_keys=KEYS) as server:
        answer = ask(server, **headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not server.core.submits


def test_keys_have_separate_prefix_caches() -> None:
    """The same prompt has other hashes under another key, the same ones under the same key."""
    with frontend_server(api_keys=KEYS) as server:
        for key in ("sk-first", "sk-first", "sk-second"):
            ask(server, authorization=f"Bearer {key}")
        first, again, other = server.core.submits
        assert first.block_hashes == again.block_hashes
        assert not set(first.block_hashes) & set(other.block_hashes)
        assert first.cache_root != other.cache_root


def test_a_single_key_changes_no_hash() -> None:
    """With one key there is one tenant, as without any."""
    roots = set()
    for keys in ((), KEYS[:1]):
        with frontend_server(api_keys=keys) as server:
            ask(server, authorization="Bearer sk-first")
            roots.add(server.core.submits[0].cache_root)
    assert len(roots) == 1


def test_where_keys_come_from(tmp_path: Path) -> None:
    """Flags, environment and file add up; what cannot be a key stops the start, unshown."""
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-c\n\n  sk-a  \n")
    config = ServerConfig(api_key=["sk-a"], api_key_file=file)
    assert len(api_key_digests(config, {"CEARX_API_KEY": "sk-b"})) == 3
    assert api_key_digests(ServerConfig(), {}) == ()
    for bad in ("", "two words", "schl\u00fcssel"):
        with pytest.raises(ValueError) as caught:
            api_key_digests(ServerConfig(api_key=[bad]), {})
        assert not bad or bad not in str(caught.value)
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="holds no key"):
        api_key_digests(ServerConfig(api_key_file=file), {})
    with pytest.raises(ValueError, match="cannot be read"):
        api_key_digests(ServerConfig(api_key_file=tmp_path / "none"), {})


def test_cross_origin_requests() -> None:
    """A browser gets leave for the listed origin without a key, and for no other."""
    preflight = {"access-control-request-method": "POST", "origin": "https://a.example"}
    flags = {"allowed_origins": ["https://a.example"]}
    with frontend_server(api_keys=KEYS, **flags) as server:
        answer = server.http.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        preflight["origin"] = "https://b.example"
        answer = server.http.options("/v1/chat/completions", headers=preflight)
        assert "access-control-allow-origin" not in answer.headers
        answer = ask(server, origin="https://a.example", authorization="Bearer sk-first")
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
    with frontend_server() as server:
        answer = ask(server, origin="https://a.example")
        assert "access-control-allow-origin" not in answer.headers


def test_request_ids() -> None:
    """The client's id comes back, on errors and streams too; an odd one is replaced."""
    with frontend_server() as server:
        assert ask(server, **{"x-request-id": "job-7/a"}).headers["x-request-id"] == "job-7/a"
        for bad in ("a b", "x" * 129, 'q"'):
            found = ask(server, **{"x-request-id": bad}).headers["x-request-id"]
            assert re.fullmatch(r"[0-9a-f]{32}", found)
        answer = server.http.get("/nothing", headers={"x-request-id": "lost"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (404, "lost")
        with server.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as s:
            assert len(s.headers.get_list("x-request-id")) == 1
            s.read()
        with server.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as s:
            assert len(s.headers.get_list("x-request-id")) == 1


def test_header_limits() -> None:
    """Too many headers and too large a head are 431."""
    with frontend_server(max_header_bytes=2048) as server:
        many = {f"x-{index}": "1" for index in range(101)}
        answer = server.http.get("/health", headers=many)
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "too_many_headers")
        assert server.http.get("/health", headers={"x": "y" * 70_000}).status_code == 431
        assert server.http.get("/health").status_code == 200


def test_silent_streams_get_comments() -> None:
    """Comments while nothing comes, before the first token too; the events are as without."""
    with frontend_server(sse_keep_alive_interval=1) as server:
        server.core.is_paused = True
        url = "/v1/chat/completions"
        with server.http.stream("POST", url, json={**CHAT, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            server.core.is_paused = False
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in rest)
        assert msgspec.json.decode(rest[0].removeprefix("data: "))["choices"][0]["delta"]


def test_draining() -> None:
    """Ready no more and no new requests, but alive; a running stream comes to its end."""
    with frontend_server() as server:
        server.core.reply = lambda submit: Reply(token_ids=[97] * 50)
        server.core.step_s = 0.01
        url = "/v1/chat/completions"
        body = {**CHAT, "stream": True, "max_tokens": 50}
        with server.http.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.loop.call_soon_threadsafe(server.state.client.status.drain)
            while server.http.get("/health").status_code == 200:
                time.sleep(0.01)
            assert server.http.get("/live").status_code == 200
            assert server.http.get("/metrics").status_code == 200
            refused = ask(server)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"shutdown_timeout": -1}, ("-1", "0..86400")),
        ({"sse_keep_alive_interval": -2}, ("-2", "at least 0")),
        ({"max_header_bytes": 10}, ("10", "1024")),
        ({"ssl_keyfile": Path("k")}, ("--ssl-certfile", "only --ssl-keyfile")),
    ],
)
def test_flags_out_of_range(flags: dict[str, object], words: tuple[str, ...]) -> None:
    """The message names value and limit."""
    with pytest.raises(ValueError) as caught:
        FrontendConfig(**flags)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
