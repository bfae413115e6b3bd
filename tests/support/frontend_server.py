"""The frontend for tests: the real application on a real hypercorn, its core a `FakeCore`."""

import asyncio
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
from fake_core import FakeCore
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cearx.core.api_keys import key_digest
from cearx.core.config import FrontendConfig, Task
from cearx.core.messages import EngineReady, Score
from cearx.frontend.app import build_app
from cearx.frontend.chat_template import ChatTemplate
from cearx.frontend.engine_client import EngineClient
from cearx.frontend.generation_defaults import GenerationDefaults
from cearx.frontend.grammar_checker import GrammarChecker
from cearx.frontend.http_server import serve_http
from cearx.frontend.pair_template import PairTemplate
from cearx.frontend.prompt_work import PromptWork
from cearx.frontend.request_fields import RequestParser
from cearx.frontend.server_state import ServerState
from cearx.frontend.token_bytes import byte_alphabet
from cearx.frontend.tokenizer import Tokenizer

MODEL = "test/byte-model"
BOOT_ID = 7
SECRET = b"s" * 32
EOS_ID = 256
EMBEDDING_SIZE = 8
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}"
    "{% endif %}"
)
ENGINE = EngineReady(
    max_model_len=256, block_size=16, num_blocks=64, vocab_size=258, enable_prefix_caching=True
)


def byte_backend() -> Backend:
    """One token for each byte (id = byte), then <|end|> (256) and <|mark|> (257), special."""
    vocab = {character: byte for character, byte in byte_alphabet().items()}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("<|mark|>", special=True)]
    )
    return backend


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), bos_token_id=None, eos_token_id=EOS_ID, eos_token_ids=())


def pair_template(tokenizer: Tokenizer) -> PairTemplate:
    """Short, for a small context; its answers are single letters, for a vocabulary of bytes."""
    return PairTemplate(
        prefix=tuple(tokenizer.encode("[")),
        suffix=tuple(tokenizer.encode("]<|end|>")),
        score=Score(negative=ord("n"), positive=ord("y")),
    )


def build_state(
    client: EngineClient, config: FrontendConfig, task: Task = "generate"
) -> ServerState:
    tokenizer = byte_tokenizer()
    model_name = config.served_model_name or MODEL
    return ServerState(
        config=config,
        model_name=model_name,
        model_root=MODEL,
        created=1,
        client=client,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE, None, None),
        defaults=GenerationDefaults(),
        eos_token_ids=tokenizer.eos_token_ids,
        hash_secret=SECRET,
        parser=RequestParser(
            config.strict_params, default_model=None if config.require_model else model_name
        ),
        grammars=GrammarChecker(client, tokenizer, tokenizer.eos_token_ids),
        prompt_work=PromptWork(2),
        task=task,
        pair_template=pair_template(tokenizer) if task == "score" else None,
    )


MODEL_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Where a body must name a model."""


class FrontendServer:
    """A running frontend; `core` scripts what the engine says."""

    def __init__(self, core: FakeCore, port: int) -> None:
        self.core = core
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.state: ServerState
        self.loop: asyncio.AbstractEventLoop
        self.shut_down: asyncio.Event

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """Of the model that is served, unless the fields name another."""
        if path in MODEL_PATHS:
            fields = {"model": self.state.model_name, **fields}
        return self.http.post(path, content=msgspec.json.encode(fields))

    def events(self, path: str, **fields: Any) -> list[Any]:
        """The JSON events of a stream, without the closing [DONE] that must be there."""
        text = self.post(path, stream=True, **fields).text
        data = [line[len("data: ") :] for line in text.split("\n\n") if line]
        assert data[-1] == "[DONE]", text
        return [msgspec.json.decode(item) for item in data[:-1]]


@contextmanager
def frontend_server(
    engine: EngineReady = ENGINE,
    *,
    ready: bool = True,
    api_keys: tuple[str, ...] = (),
    task: Task = "generate",
    **config: Any,
) -> Iterator[FrontendServer]:
    """Serves until the block ends; everything is gone afterwards."""
    if task == "embed":
        engine = msgspec.structs.replace(engine, embedding_size=EMBEDDING_SIZE)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    accepting = threading.Event()
    with tempfile.TemporaryDirectory() as folder, FakeCore(Path(folder), BOOT_ID, engine) as core:
        core.answers_hello = ready
        server = FrontendServer(core, listener.getsockname()[1])

        async def main() -> None:
            server.loop = asyncio.get_running_loop()
            server.shut_down = asyncio.Event()
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            client = EngineClient(context, Path(folder), BOOT_ID, 0)
            server.state = build_state(client, FrontendConfig(**config), task)
            server.state.api_key_digests = tuple(key_digest(key.encode()) for key in api_keys)

            async def run_until_end() -> None:
                if ready:
                    await client.status.wait_ready()
                accepting.set()
                await server.shut_down.wait()
                await server.state.grammars.close()
                client.shut_down()

            flags = server.state.config
            await serve_http(build_app(server.state), listener.detach(), flags, run_until_end)
            client.close()
            context.destroy(linger=0)

        thread = threading.Thread(target=lambda: asyncio.run(main()), name="frontend")
        thread.start()
        try:
            assert accepting.wait(10), "the frontend did not come up"
            yield server
        finally:
            server.http.close()
            with suppress(RuntimeError):  # a test has ended the loop itself
                server.loop.call_soon_threadsafe(server.shut_down.set)
            thread.join()
