"""Fields of a request that name tokens or words: checked against the vocabulary, made into ids.

Owns the rules for token ids of clients and the two ways in which a word can stand in an output.
Called by `sampling.py`.
"""

from collections.abc import Sequence

from cearx.frontend.errors import invalid, shown
from cearx.frontend.openai_types import GenerationRequest
from cearx.frontend.tokenizer import Tokenizer


def check_token_ids(
    param: str, token_ids: Sequence[int] | None, vocab_size: int
) -> tuple[int, ...]:
    """Raises ApiError (400) for an id that the model does not have."""
    for index, token_id in enumerate(token_ids or ()):
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"{param}[{index}]",
                f"Token id {shown(token_id)} in {param} is not in the vocabulary of "
                f"{vocab_size} tokens",
            )
    return tuple(token_ids or ())


def allowed_token_ids(
    request: GenerationRequest, vocab_size: int, ends: Sequence[int]
) -> tuple[int, ...] | None:
    """Raises ApiError (400) also where nothing could be sampled, not even an end."""
    if request.allowed_token_ids is None:
        return None
    allowed = check_token_ids("allowed_token_ids", request.allowed_token_ids, vocab_size)
    if request.bad_words and not ends:
        message = (
            "allowed_token_ids and bad_words together can leave no token: "
            "they need an end, but ignore_eos is true"
        )
        raise invalid("allowed_token_ids", message)
    return tuple(sorted(set(allowed)))


def bad_word_tokens(
    words: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it stands at the beginning of a text and behind a space.

    Raises ApiError (400) for a word whose tokens the model does not have.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip(" ")
        for text in (word, f" {bare}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not bare or not token_ids or max(token_ids) >= vocab_size:
                message = f"Word {shown(word)} of bad_words has no tokens in the model's vocabulary"
                raise invalid(f"bad_words[{index}]", message)
            sequences[token_ids] = None
    return tuple(sequences)
