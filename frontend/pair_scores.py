"""How well pairs of texts go together: the work for the engine and the score of each pair.

Owns the two ways: a reranker reads both texts in one prompt and answers a probability; of an
embedding model the score is the cosine of the two texts' embeddings, each text computed once.
Called by the routes of scores and rankings.
"""

from collections.abc import Callable, Sequence

import msgspec

from cearx.core.messages import Embed
from cearx.frontend.errors import not_supported
from cearx.frontend.pair_template import PairTemplate
from cearx.frontend.pooling_prompts import InputPacker, input_rules
from cearx.frontend.pooling_route import Vectors, engine_requests, unpack_floats
from cearx.frontend.pooling_types import PairRequest
from cearx.frontend.prompts import Prompt
from cearx.frontend.request_window import EngineRequest
from cearx.frontend.server_state import ServerState


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Texts and the fields of the request that they stand in, for errors."""

    texts: Sequence[str]
    params: Sequence[str]

    def of(self, index: int) -> tuple[str, str]:
        """Parameter and text of pair `index`; a single text belongs to every pair."""
        index = index if len(self.texts) > 1 else 0
        return self.params[index], self.texts[index]


class PairWork(msgspec.Struct, kw_only=True):
    requests: list[EngineRequest]
    num_prompt_tokens: int
    scores: Callable[[Vectors], list[float]]
    """Of the pairs, in order, from the vectors of the requests."""


async def pair_work(
    state: ServerState, request: PairRequest, first: Side, second: Side, num_bytes: int
) -> PairWork:
    """Pair i is text i of both sides, or the only text of one; raises ApiError.

    `num_bytes`: of the request's body.
    """
    packer = state.prompt_packer(state.client.require_ready())
    inputs = InputPacker(packer=packer, rules=input_rules(request, packer.context_length))
    template, num_pairs = state.pair_template, max(len(first.texts), len(second.texts))
    if template is None and request.instruction is not None:
        message = "instruction is for rerankers: write it into the texts of an embedding model"
        raise not_supported("instruction", message)
    if template is None:
        make_prompts = _of_texts(inputs, first, second)
    else:
        make_prompts = _of_pairs(inputs, template, request.instruction, first, second, num_pairs)
    prompts = await state.prompt_work.run(num_bytes, make_prompts)
    pooling = Embed() if template is None else template.score

    def scores(vectors: Vectors) -> list[float]:
        values = [unpack_floats(vector) for vector in vectors]
        if template is not None:
            return [value[0] for value in values]
        left, right = values[: len(first.texts)], values[len(first.texts) :]
        return [
            _dot(left[i if len(left) > 1 else 0], right[i if len(right) > 1 else 0])
            for i in range(num_pairs)
        ]

    return PairWork(
        requests=engine_requests(state, request, prompts, pooling),
        num_prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
        scores=scores,
    )


def _of_texts(inputs: InputPacker, first: Side, second: Side) -> Callable[[], list[Prompt]]:
    def make() -> list[Prompt]:
        sides = (first, second)
        given = [pair for side in sides for pair in zip(side.params, side.texts, strict=True)]
        return [inputs.text(param, text) for param, text in given]

    return make


def _of_pairs(
    inputs: InputPacker,
    template: PairTemplate,
    instruction: str | None,
    first: Side,
    second: Side,
    num_pairs: int,
) -> Callable[[], list[Prompt]]:
    def make() -> list[Prompt]:
        prompts = []
        for index in range(num_pairs):
            _, query = first.of(index)
            param, document = second.of(index)
            body = template.body(instruction, query, document)
            prompts.append(inputs.framed(param, template.prefix, body, template.suffix))
        return prompts

    return make


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Of vectors of length 1: the cosine."""
    return sum(a * b for a, b in zip(left, right, strict=True))
