"""POST /v1/embeddings: from texts to a plan of their embeddings."""

import time
from base64 import b64encode

from cearx.core.messages import Embed, EngineReady
from cearx.frontend.errors import invalid
from cearx.frontend.generation_route import check_model
from cearx.frontend.pooling_prompts import InputPacker, input_rules
from cearx.frontend.pooling_route import (
    PoolingPlan,
    Vectors,
    answer_id,
    engine_requests,
    unpack_floats,
)
from cearx.frontend.pooling_types import (
    Embedding,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    PoolingUsage,
)
from cearx.frontend.prompts import Prompt
from cearx.frontend.server_state import ServerState


async def plan_embeddings(state: ServerState, body: bytes) -> PoolingPlan:
    """Raises ApiError."""
    request = await state.parse(body, EmbeddingsRequest)
    check_model(state, request.model)
    engine = state.client.require_ready()
    _check_dimensions(request, engine)
    packer = state.prompt_packer(engine)
    rules = input_rules(
        request,
        packer.context_length,
        add_special_tokens=request.add_special_tokens is not False,
    )
    texts = InputPacker(packer=packer, rules=rules)

    def make_prompts() -> list[Prompt]:
        return texts.inputs(request.input)

    prompts = await state.prompt_work.run(len(body), make_prompts)
    pooling = Embed(dimensions=request.dimensions, normalize=request.normalize is not False)

    def answer(vectors: Vectors, usage: PoolingUsage) -> EmbeddingsAnswer:
        is_base64 = request.encoding_format == "base64"
        return EmbeddingsAnswer(
            id=answer_id("embd", request.request_id),
            created=int(time.time()),
            model=state.model_name,
            data=[
                Embedding(
                    index=index,
                    embedding=b64encode(vector).decode() if is_base64 else unpack_floats(vector),
                )
                for index, vector in enumerate(vectors)
            ],
            usage=usage,
        )

    return PoolingPlan(
        requests=engine_requests(state, request, prompts, pooling),
        num_prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
        make_answer=answer,
    )


def _check_dimensions(request: EmbeddingsRequest, engine: EngineReady) -> None:
    limit = engine.embedding_size
    assert limit is not None, "the route exists on servers of embeddings only"
    if request.dimensions is not None and request.dimensions > limit:
        raise invalid(
            "dimensions",
            f"dimensions must be in 1..{limit}, the size of the model's embeddings,"
            f" got {request.dimensions}",
        )
