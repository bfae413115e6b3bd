"""POST /v1/score and /v1/rerank, under vLLM's further paths too: from texts to scored pairs."""

import time

from cearx.frontend.errors import invalid
from cearx.frontend.generation_route import check_model
from cearx.frontend.pair_scores import Side, pair_work
from cearx.frontend.pooling_route import PoolingPlan, Vectors, answer_id
from cearx.frontend.pooling_types import (
    Document,
    PairScore,
    PoolingUsage,
    RankedDocument,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)
from cearx.frontend.server_state import ServerState


async def plan_score(state: ServerState, body: bytes) -> PoolingPlan:
    """Raises ApiError."""
    request = await state.parse(body, ScoreRequest)
    check_model(state, request.model)
    first, second = _sides(request)
    work = await pair_work(state, request, first, second, len(body))

    def answer(vectors: Vectors, usage: PoolingUsage) -> ScoreAnswer:
        scores = enumerate(work.scores(vectors))
        return ScoreAnswer(
            id=answer_id("score", request.request_id),
            created=int(time.time()),
            model=state.model_name,
            data=[PairScore(index=index, score=score) for index, score in scores],
            usage=usage,
        )

    return PoolingPlan(
        requests=work.requests, num_prompt_tokens=work.num_prompt_tokens, make_answer=answer
    )


def _sides(request: ScoreRequest) -> tuple[Side, Side]:
    """Raises ApiError unless there are two sides of fitting lengths."""
    texts = (request.text_1, request.text_2)
    named = (request.queries, request.documents)
    has_texts, has_named = texts != (None, None), named != (None, None)
    if has_texts and has_named:
        message = "text_1 and text_2, or queries and documents are needed, and not both"
        raise invalid("queries", message)
    names = ("queries", "documents") if has_named else ("text_1", "text_2")
    sides = []
    for name, value in zip(names, named if has_named else texts, strict=True):
        if value is None:
            raise invalid(name, f"{name} is required", "missing_required_parameter")
        is_one = isinstance(value, str)
        given = [value] if isinstance(value, str) else value
        params = [name] if is_one else [f"{name}[{index}]" for index in range(len(given))]
        sides.append(Side(texts=given, params=params))
    first, second = sides
    lengths = (len(first.texts), len(second.texts))
    if 1 not in lengths and lengths[0] != lengths[1]:
        raise invalid(
            names[1],
            f"{names[0]} and {names[1]} must have equally many texts, or one of them one,"
            f" got {lengths[0]} and {lengths[1]}",
        )
    return first, second


async def plan_rerank(state: ServerState, body: bytes) -> PoolingPlan:
    """Raises ApiError."""
    request = await state.parse(body, RerankRequest)
    check_model(state, request.model)
    texts = [d.text if isinstance(d, Document) else d for d in request.documents]
    params = [f"documents[{index}]" for index in range(len(texts))]
    query = Side(texts=[request.query], params=["query"])
    documents = Side(texts=texts, params=params)
    work = await pair_work(state, request, query, documents, len(body))

    def answer(vectors: Vectors, usage: PoolingUsage) -> RerankAnswer:
        scores = work.scores(vectors)
        best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
        shows = request.return_documents is not False
        return RerankAnswer(
            id=answer_id("rerank", request.request_id),
            model=state.model_name,
            usage=usage,
            results=[
                RankedDocument(
                    index=index,
                    document=Document(text=texts[index]) if shows else None,
                    relevance_score=scores[index],
                )
                for index in best[: request.top_n or None]
            ],
        )

    return PoolingPlan(
        requests=work.requests, num_prompt_tokens=work.num_prompt_tokens, make_answer=answer
    )
