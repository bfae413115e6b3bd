"""How a reranker is asked about two texts: Qwen3-Reranker's prompt and the tokens of its answers.

Owns the texts around a pair, as the model card's recipe for transformers writes them (single line
feeds between the parts), and which two tokens mean no and yes. Tokenised in three pieces, as the
recipe does, so that only the middle one is ever cut. Built by `process.py`, used by the routes.
"""

from pathlib import Path

import msgspec

from cearx.core.child import StartupError
from cearx.core.messages import Score
from cearx.core.model_task import label_words
from cearx.frontend.tokenizer import Tokenizer

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairTemplate(msgspec.Struct, frozen=True, kw_only=True):
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    score: Score
    """The tokens whose probabilities are compared behind the suffix."""

    @staticmethod
    def body(instruction: str | None, query: str, document: str) -> str:
        """What stands between prefix and suffix."""
        return f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"


def load_pair_template(path: Path, tokenizer: Tokenizer) -> PairTemplate:
    """Raises StartupError for a tokenizer in which an answer is no single token."""
    labels = []
    for word in label_words(path):
        token_ids = tokenizer.encode(word, add_special_tokens=False)
        if len(token_ids) != 1:
            raise StartupError(
                f"{word!r} is {len(token_ids)} tokens of the model, and a score needs answers of"
                " one: is it a reranker? (classifier_from_token in config.json names others)"
            )
        labels += token_ids
    return PairTemplate(
        prefix=tuple(tokenizer.encode(PREFIX, add_special_tokens=False)),
        suffix=tuple(tokenizer.encode(SUFFIX, add_special_tokens=False)),
        score=Score(negative=labels[0], positive=labels[1]),
    )
