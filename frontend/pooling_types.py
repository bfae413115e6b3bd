"""The bodies of embeddings, scores and rankings, as OpenAI, vLLM, Jina and Cohere define them.

Types and plain ranges only; what needs the model or another field is checked where it is used. Null
means the same as absence. Imported by the routes and by the API's description.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cearx.frontend.openai_types import PositiveInt, PromptTokensDetails

MAX_INPUTS = 2048
"""Most texts of one embeddings request, as in OpenAI's API."""
MAX_TEXTS = 1024
"""Most texts on one side of a score, and documents of one ranking."""

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class PoolingRequest(msgspec.Struct, kw_only=True):
    """What all three take."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keeps at most so many tokens of a prompt; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a text that is too long is cut; right without it."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower goes first; other than 0 only under --scheduling-policy priority."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """A label for the answer's id; it need not be unique."""
    user: str | None = None
    """A hint for OpenAI's own fleet; it changes nothing in an answer."""


class EmbeddingsRequest(PoolingRequest, kw_only=True):
    model: str
    input: Any
    """Text, token ids, or a list of either; `pooling_prompts.py` checks it."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: the numbers as little-endian float32."""
    dimensions: PositiveInt | None = None
    """Only so many first components, at length 1 again."""
    normalize: bool | None = None
    """False: the last token's state as it is; else at length 1."""
    add_special_tokens: bool | None = None


class PairRequest(PoolingRequest, kw_only=True):
    """A question of how well two texts go together."""

    instruction: Annotated[str, Meta(min_length=1)] | None = None
    """What a reranker is told to judge by, in place of its usual instruction."""


class ScoreRequest(PairRequest, kw_only=True):
    """text_1 and text_2, or queries and documents: as many of both, or one and many."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None


class Document(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(PairRequest, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Only so many best ones; 0 and null: all."""
    return_documents: bool | None = None
    """False: the results have no texts."""


class PoolingUsage(msgspec.Struct, kw_only=True, omit_defaults=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class PairScore(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    """In the request."""
    document: Document | None = None
    relevance_score: float


class RerankAnswer(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]
    """Best first; of equal ones the first in the request."""
