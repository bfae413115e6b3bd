"""The server under test: where it is, what it serves, how a request to it looks.

Owns URLs, the model's name, request bodies and the count of a prompt's tokens by the server's own
usage. Speaks only what every OpenAI server understands; extensions (`ignore_eos`, `top_k`) are sent
when they are asked for. Called by `matrix.py` and `serve.py` before the load starts.
"""

import socket
from typing import Any, Literal

import httpx
import msgspec

from cearx.frontend.bench.bench_error import BenchError
from cearx.frontend.bench.event_parser import error_text
from cearx.frontend.bench.wire import Target
from cearx.frontend.chat_connection import ChatError, first_model

EndpointKind = Literal["chat", "completions"]
PATHS: dict[EndpointKind, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_encode = msgspec.json.Encoder().encode


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of the request's body; what is None is left to the server."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None


class Endpoint:
    """One route of one server, and the model behind it."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        kind: EndpointKind,
        model: str,
        sampling: Sampling,
        target: Target,
    ) -> None:
        self._http = http
        self.kind: EndpointKind = kind
        self.model = model
        self.target = target
        self._fields = msgspec.to_builtins(sampling)

    def body(self, prompt: str | list[int], output_len: int) -> bytes:
        """A streamed request with a final chunk of usage."""
        options = {"stream": True, "stream_options": {"include_usage": True}, **self._fields}
        return _encode(self._request(prompt, output_len) | options)

    async def count_tokens(self, text: str) -> int:
        """The prompt's tokens by the server's usage; raises BenchError."""
        try:
            reply = await self._http.post(PATHS[self.kind], json=self._request(text, 1))
            content = msgspec.json.decode(reply.content)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise BenchError(f"{PATHS[self.kind]} does not answer: {error}") from error
        if not reply.is_success:
            reason = content.get("error", content) if isinstance(content, dict) else content
            raise BenchError(f"HTTP status {reply.status_code}: {error_text(reason)}")
        try:
            return int(content["usage"]["prompt_tokens"])
        except (KeyError, TypeError) as error:
            raise BenchError(
                "the answer has no usage.prompt_tokens, so prompt lengths cannot be known"
            ) from error

    def _request(self, prompt: str | list[int], output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": output_len}
        if self.kind == "chat":
            return body | {"messages": [{"role": "user", "content": prompt}]}
        return body | {"prompt": prompt}


def find_endpoint(
    http: httpx.AsyncClient,
    kind: EndpointKind,
    model: str | None,
    sampling: Sampling,
    request_timeout_s: float,
) -> Endpoint:
    """The endpoint at the client's base URL; raises BenchError when nothing is served there."""
    url, headers = http.base_url, dict(http.headers)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=http.timeout) as plain:
            name = model or first_model(plain)
    except ChatError as error:
        raise BenchError(f"{error} (name it with --model)") from error
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        address = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise BenchError(f"no address for {url.host}: {error}") from error
    target = Target(
        host=url.host,
        address=str(address),
        port=port,
        is_tls=url.scheme == "https",
        path=url.path.rstrip("/") + PATHS[kind],
        headers={"Authorization": key} if (key := headers.get("authorization")) else {},
        request_timeout_s=request_timeout_s,
    )
    return Endpoint(http, kind, name, sampling, target)
