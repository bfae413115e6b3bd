"""From texts or token ids to prompts that bring a vector: such a prompt may fill the whole context.

Owns how they are cut: the tokens that the tokenizer puts around a text stay, since an embedding is
the state of the last of them. Pure, and long for long texts, so the routes call it in a thread.
Raises `ApiError`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from cearx.frontend.errors import ApiError, invalid
from cearx.frontend.pooling_types import MAX_INPUTS, PoolingRequest
from cearx.frontend.prompts import Prompt, PromptPacker, PromptRules, checked_ids


class InputRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about its texts."""

    add_special_tokens: bool
    cache_salt: str | None
    max_tokens: int | None
    """Longer ones are cut to it; None: they are refused."""
    keeps_end: bool


def input_rules(
    request: PoolingRequest, context_length: int, *, add_special_tokens: bool = True
) -> InputRules:
    """Raises ApiError (400)."""
    limit = request.truncate_prompt_tokens
    if limit is not None and not (limit == -1 or 1 <= limit <= context_length):
        raise invalid(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1 or in 1..{context_length}, got {limit}",
        )
    return InputRules(
        add_special_tokens=add_special_tokens,
        cache_salt=request.cache_salt,
        max_tokens=context_length if limit == -1 else limit,
        keeps_end=request.truncation_side == "left",
    )


class InputPacker(msgspec.Struct, frozen=True, kw_only=True):
    """Tokenises, cuts, packs and hashes for one request."""

    packer: PromptPacker
    rules: InputRules

    def inputs(self, given: Any) -> list[Prompt]:
        """Of a text, a list of token ids, or a list of at most MAX_INPUTS of either."""
        if isinstance(given, list) and any(isinstance(item, str | list) for item in given):
            if len(given) > MAX_INPUTS:
                raise invalid("input", f"input may hold {MAX_INPUTS} texts, got {len(given)}")
            return [self._input(f"input[{i}]", item) for i, item in enumerate(given)]
        return [self._input("input", given)]

    def _input(self, param: str, item: Any) -> Prompt:
        if isinstance(item, str):
            return self.text(param, item)
        return self.pack(param, self._cut(param, checked_ids(param, item), 0, 0))

    def text(self, param: str, text: str) -> Prompt:
        """A text as the tokenizer writes it."""
        self.require_room(param, text, self.packer.context_length)
        encode = self.packer.tokenizer.encode
        token_ids: Sequence[int] = encode(text, add_special_tokens=self.rules.add_special_tokens)
        limit = self.rules.max_tokens
        if limit is not None and len(token_ids) > limit:
            num_added = _num_around(token_ids, encode(text, add_special_tokens=False))
            token_ids = self._cut(param, token_ids, *num_added)
        return self.pack(param, token_ids)

    def framed(self, param: str, prefix: Sequence[int], text: str, suffix: Sequence[int]) -> Prompt:
        """A text between tokens that always stay."""
        self.require_room(param, text, self.packer.context_length - len(prefix) - len(suffix))
        body = self.packer.tokenizer.encode(text, add_special_tokens=True)
        token_ids = self._cut(param, [*prefix, *body, *suffix], len(prefix), len(suffix))
        return self.pack(param, token_ids)

    def require_room(self, param: str, text: str, room: int) -> None:
        """Raises ApiError for what can never fit, before it is tokenised."""
        at_least = self.packer.tokenizer.min_num_tokens(text)
        if at_least > room and self.rules.max_tokens is None:
            raise self._too_long(param, f"at least {at_least}")

    def _cut(
        self, param: str, token_ids: Sequence[int], num_before: int, num_behind: int
    ) -> Sequence[int]:
        """At most max_tokens of them, the first `num_before` and last `num_behind` among them."""
        limit = self.rules.max_tokens
        if limit is None or len(token_ids) <= limit:
            return token_ids
        room = limit - num_before - num_behind
        if room < 1:
            raise invalid(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens must leave a token of {param} beside the"
                f" {num_before + num_behind} around it, got {limit}",
            )
        end = len(token_ids) - num_behind
        body = token_ids[num_before:end]
        kept = body[-room:] if self.rules.keeps_end else body[:room]
        return [*token_ids[:num_before], *kept, *token_ids[end:]]

    def pack(self, param: str, token_ids: Sequence[int]) -> Prompt:
        """Raises ApiError for no tokens, too many, and unknown ones."""
        if len(token_ids) > self.packer.context_length:
            raise self._too_long(param, str(len(token_ids)))
        plain = PromptRules(add_special_tokens=False, cache_salt=self.rules.cache_salt)
        packer = msgspec.structs.replace(self.packer, context_length=self.packer.context_length + 1)
        return packer.pack(param, token_ids, plain)

    def _too_long(self, param: str, size: str) -> ApiError:
        limit = self.packer.context_length
        return invalid(
            param,
            f"{param} has {size} tokens with all that stands around it, but the model's context"
            f" holds {limit}: shorten it, or see truncate_prompt_tokens",
            "context_length_exceeded",
        )


def _num_around(token_ids: Sequence[int], body: Sequence[int]) -> tuple[int, int]:
    """How many tokens stand before and behind those of the text itself."""
    num_added = len(token_ids) - len(body)
    for num_before in range(num_added + 1):
        if list(token_ids[num_before : num_before + len(body)]) == list(body):
            return num_before, num_added - num_before
    return 0, 0
