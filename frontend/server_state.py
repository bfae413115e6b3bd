"""What the routes of one frontend share; built once by `process.py`, changed by nobody."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from cearx.core.config import FrontendConfig, Task
from cearx.core.messages import EngineReady
from cearx.frontend.caller import Caller
from cearx.frontend.chat_template import ChatTemplate
from cearx.frontend.engine_client import EngineClient
from cearx.frontend.generation_defaults import GenerationDefaults
from cearx.frontend.grammar_checker import GrammarChecker
from cearx.frontend.pair_template import PairTemplate
from cearx.frontend.prompt_work import PromptWork
from cearx.frontend.prompts import PromptPacker
from cearx.frontend.request_fields import RequestParser
from cearx.frontend.tokenizer import Tokenizer
from cearx.frontend.tool_parsers import ToolParser

REQUEST = TypeVar("REQUEST", bound=msgspec.Struct)


class ServerState(msgspec.Struct, kw_only=True):
    config: FrontendConfig
    model_name: str
    """Name of the model in the API."""
    model_root: str
    """What the person called it."""
    created: int
    """Unix time of the start, for the model list."""
    client: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None when the model has none: chat is refused then."""
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    """Every id that ends a generation, of the tokenizer and of the model's publisher."""
    hash_secret: bytes
    parser: RequestParser
    grammars: GrammarChecker
    prompt_work: PromptWork
    make_tool_parser: Callable[[], ToolParser] | None = None
    """For the way in which the model writes tool calls; None when nobody knows it."""
    task: Task = "generate"
    """What the model is served for."""
    pair_template: PairTemplate | None = None
    """For scores, on servers of task 'score'."""
    splits_reasoning: bool = False
    """Whether the model thinks between tags, which the API tells apart from the answer."""
    api_key_digests: tuple[bytes, ...] = ()
    tenant: str | None = None
    """Whose prefix cache a request uses, when there are several API keys."""

    def for_caller(self, caller: Caller) -> "ServerState":
        """As one request sees it."""
        if caller.tenant is None:
            return self
        return msgspec.structs.replace(self, tenant=caller.tenant)

    async def parse(self, body: bytes, request_type: type[REQUEST]) -> REQUEST:
        """A body as the struct that its route takes; raises ApiError (400)."""
        read = partial(self.parser.parse, request_type=request_type)
        return await self.prompt_work.read(body, read)

    def context_length(self, engine: EngineReady) -> int:
        """Tokens of prompt and output that one request may have: the model's, or the pool's."""
        return min(engine.max_model_len, engine.num_blocks * engine.block_size)

    def prompt_packer(self, engine: EngineReady) -> PromptPacker:
        return PromptPacker(
            tokenizer=self.tokenizer,
            engine=engine,
            context_length=self.context_length(engine),
            hash_secret=self.hash_secret,
            tenant=self.tenant,
        )
