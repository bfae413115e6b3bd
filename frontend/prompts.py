"""From what a client sends as a prompt to what the engine takes: checked ids, packed and hashed.

Everything here is pure and may take long for a long prompt, so the routes call it in a thread.
Raises `ApiError`; what leaves here leaves room for at least one token of output.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from cearx.core.block_hash import prompt_hashes, root_hash
from cearx.core.identifiers import BlockHash
from cearx.core.messages import EngineReady, pack_tokens, unpack_tokens
from cearx.frontend.errors import invalid, prompt_too_long, shown
from cearx.frontend.openai_types import MAX_PROMPTS, GenerationRequest
from cearx.frontend.tokenizer import Tokenizer

TAIL_TOKENS = 8
"""Last ids of a prompt that the detokenizer gets: more than the bytes of any one character."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    num_tokens: int
    token_ids: bytes
    """`pack_tokens`."""
    tail: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    cache_root: BlockHash
    text: str | None
    """What the client wrote, where that is what the tokens stand for."""

    def ids(self) -> Sequence[int]:
        """The token ids, unpacked."""
        return unpack_tokens(self.token_ids)


class PromptRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about its prompts."""

    add_special_tokens: bool
    cache_salt: str | None
    max_prompt_tokens: int | None = None
    """Longer prompts are cut to it."""
    keeps_end: bool = True
    """Whether the beginning is cut off, or else the end."""


class PromptPacker(msgspec.Struct, frozen=True, kw_only=True):
    """Tokenises, packs and hashes for one engine."""

    tokenizer: Tokenizer
    engine: EngineReady
    context_length: int
    """What can never fit is not even tokenised: that takes seconds for a few MiB."""
    hash_secret: bytes
    tenant: str | None = None
    """Part of the cache salt: what one tenant computed is never found by another."""

    def encode(self, param: str, text: str, rules: PromptRules) -> Prompt:
        """Raises ApiError for an empty text and for one that exceeds the context for sure."""
        at_least = self.tokenizer.min_num_tokens(text)
        if at_least >= self.context_length and rules.max_prompt_tokens is None:
            raise prompt_too_long(param, at_least, self.context_length, is_bound=True)
        token_ids = self.tokenizer.encode(text, add_special_tokens=rules.add_special_tokens)
        return self.pack(param, token_ids, rules, text)

    def pack(
        self, param: str, token_ids: Sequence[int], rules: PromptRules, text: str | None = None
    ) -> Prompt:
        """Raises ApiError for a prompt that is empty or fills the context, and for unknown ids."""
        if not token_ids:
            raise invalid(param, f"{param} must have at least one token, got 0")
        limit = rules.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            token_ids = token_ids[-limit:] if rules.keeps_end else token_ids[:limit]
            text = None
        if len(token_ids) >= self.context_length:
            raise prompt_too_long(param, len(token_ids), self.context_length)
        limit = self.engine.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= limit:
            bad = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < limit)
            raise invalid(
                f"{param}[{bad}]",
                f"Token id {shown(token_ids[bad])} at {param}[{bad}] is not in the vocabulary of "
                f"{limit} tokens",
            )
        packed = pack_tokens(tuple(token_ids))
        root = root_hash(self.hash_secret, self._salt(rules.cache_salt))
        hashes: tuple[BlockHash, ...] = ()
        if self.engine.enable_prefix_caching:
            hashes = prompt_hashes(self.hash_secret, root, packed, self.engine.block_size)
        return Prompt(
            num_tokens=len(token_ids),
            token_ids=packed,
            tail=tuple(token_ids[-TAIL_TOKENS:]),
            block_hashes=hashes,
            cache_root=root,
            text=text,
        )

    def _salt(self, cache_salt: str | None) -> str | None:
        # A tenant's name has a fixed length, so no salt of another can look like this one.
        return cache_salt if self.tenant is None else self.tenant + (cache_salt or "")


def encode_completion_prompts(
    prompt: Any, packer: PromptPacker, rules: PromptRules
) -> list[Prompt]:
    """A text, a list of token ids, or a list of at most MAX_PROMPTS texts and lists of ids."""

    def encode(param: str, item: Any) -> Prompt:
        if isinstance(item, str):
            return packer.encode(param, item, rules)
        return packer.pack(param, checked_ids(param, item), rules)

    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise invalid("prompt", f"prompt may hold {MAX_PROMPTS} prompts, got {len(prompt)}")
        return [encode(f"prompt[{index}]", item) for index, item in enumerate(prompt)]
    return [encode("prompt", prompt)]


def checked_ids(param: str, item: Any) -> list[int]:
    """Raises ApiError (400) for what is no list of integers."""
    if not isinstance(item, list):
        raise invalid(
            param,
            f"Invalid value {shown(item)} for {param}: expected a text, a list of token ids, "
            "or a list of either",
            "invalid_type",
        )
    for index, token_id in enumerate(item):
        if type(token_id) is not int:  # bool is a subclass of int and no token id
            at = f"{param}[{index}]"
            raise invalid(
                at, f"Invalid value {shown(token_id)} for {at}: expected a token id", "invalid_type"
            )
    return item


def prompt_rules(
    request: GenerationRequest, *, adds_special_tokens: bool, room: int, max_tokens: int | None
) -> PromptRules:
    """Of a request; `room`: what the context holds. Raises ApiError (400).

    `adds_special_tokens` where the request says nothing.
    """
    limit = request.truncate_prompt_tokens
    if limit == 0:
        message = "truncate_prompt_tokens must be -1 or at least 1, got 0"
        raise invalid("truncate_prompt_tokens", message)
    if limit == -1:
        limit = max(1, room - max(1, max_tokens or 1))
    if request.add_special_tokens is not None:
        adds_special_tokens = request.add_special_tokens
    return PromptRules(
        add_special_tokens=adds_special_tokens,
        cache_salt=request.cache_salt,
        max_prompt_tokens=limit,
        keeps_end=request.truncation_side != "right",
    )
