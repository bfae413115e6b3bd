"""A request that arrives in two pieces, cut at every byte, is the same request."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fake_core import Reply
from frontend_server import ENGINE, EOS_ID, MODEL, FrontendServer, frontend_server

from cearx.core.events import FinishReason

SCHEMA = {"type": "object", "properties": {"é": {"enum": ["ü", 1]}}, "required": ["é"]}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "\U0001f600 é"}]}
VALUE = b'{"\xc3\xa9":"\xc3\xbc"}'
REQUESTS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "schema": ("/v1/completions", {"model": MODEL, "prompt": "é", "guided_json": SCHEMA}, VALUE),
    "forced call": (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "required", "stream": True},
        b'[{"name":"find","parameters":' + VALUE + b"}]",
    ),
    "tokenize": ("/tokenize", {"prompt": "a\U0001f600"}, b""),
}
VARYING = re.compile(rb'"(id|created|created_at|call_id)":("[^"]*"|\d+)')


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendServer]:
    roomy = msgspec.structs.replace(ENGINE, max_model_len=2048, num_blocks=256)
    with frontend_server(roomy) as started:
        yield started


def answer_to(client: socket.socket, pieces: list[bytes]) -> tuple[int, bytes]:
    """Status and body without what differs from request to request; the connection stays."""
    for piece in pieces:
        client.sendall(piece)  # without Nagle's delay each goes out at once
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, VARYING.sub(b"", response.read())


@pytest.mark.parametrize("name", REQUESTS)
def test_every_cut(server: FrontendServer, name: str) -> None:
    """Status and bytes of the answer are those of the request in one piece, wherever it is cut."""
    path, fields, output = REQUESTS[name]
    server.core.reply = lambda submit: Reply(
        token_ids=[*output, EOS_ID], finish_reason=FinishReason.STOP, stop_token_id=EOS_ID
    )
    body = json.dumps(fields, ensure_ascii=False).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    data = head + body
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        expected = answer_to(client, [data])
        assert expected[0] == 200, expected
        for cut in range(1, len(data)):
            assert answer_to(client, [data[:cut], data[cut:]]) == expected, cut
        assert answer_to(client, [bytes([byte]) for byte in data]) == expected
