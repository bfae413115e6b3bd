"""From the last token's hidden state to what a request asks for in place of a token.

Owns embeddings (cut, normalised) and scores. A score is the softmax over the logits of two tokens,
which is the sigmoid of one product: the head is folded into a single row, the difference of the
two tokens' rows, and no logits of the vocabulary are computed. A row that is not finite fails
alone. Called by the step runners.
Legend: R rows, E hidden size.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cearx.core.messages import Pooling, RowOutput, Score
from cearx.worker.request_states import RequestState

HeadRows = Callable[[torch.Tensor], torch.Tensor]
"""Token ids (int64) to their rows of the head's matrix [len(ids), E]."""

NOT_FINITE = "the model's hidden state is not finite"


class Pooler:
    """One for a model; keeps the folded head of the last two tokens that were asked for."""

    def __init__(self, head_rows: HeadRows) -> None:
        self._head_rows = head_rows
        self._labels: tuple[int, int] | None = None
        self._direction_E: NDArray[np.float32] = np.zeros(0, np.float32)

    def pool(
        self, normed_RE: torch.Tensor, requests: Sequence[RequestState]
    ) -> tuple[RowOutput, ...]:
        """One output a row of `normed_RE` [R, E], the hidden states behind the final norm."""
        rows_RE: NDArray[np.float32] = normed_RE.float().cpu().numpy()
        return tuple(
            self._pool_row(row_E, request) for row_E, request in zip(rows_RE, requests, strict=True)
        )

    def _pool_row(self, row_E: NDArray[np.float32], request: RequestState) -> RowOutput:
        error = None if request.rule is not None else request.error
        vector: NDArray[np.float32] | None = None
        if error is None:
            assert request.pooling is not None, f"request {request.request_id} wants a token"
            vector = self._vector(row_E, request.pooling)
            if not np.isfinite(vector).all():
                error = NOT_FINITE
        packed = None
        if vector is not None and error is None:
            packed = vector.astype("<f4", copy=False).tobytes()
        return RowOutput(
            request_id=request.request_id,
            token_id=None,
            logprobs=None,
            error=error,
            vector=packed,
        )

    def _vector(self, row_E: NDArray[np.float32], pooling: Pooling) -> NDArray[np.float32]:
        if isinstance(pooling, Score):
            logit = float(np.dot(row_E.astype(np.float64), self._direction(pooling)))
            with np.errstate(over="ignore"):  # the sigmoid of a number far below zero is 0
                return np.array([1.0 / (1.0 + np.exp(-logit))], np.float32)
        cut_E = row_E[: pooling.dimensions]
        return normalised(cut_E) if pooling.normalize else cut_E

    def _direction(self, score: Score) -> NDArray[np.float32]:
        """The folded head [E]."""
        labels = (score.negative, score.positive)
        if labels != self._labels:
            negative_E, positive_E = self._head_rows(torch.tensor(labels)).float().cpu().numpy()
            self._labels, self._direction_E = labels, positive_E - negative_E
        return self._direction_E


def normalised(vector_E: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vector at length 1; zeros stay zeros."""
    length = float(np.sqrt(np.square(vector_E, dtype=np.float64).sum()))
    return vector_E if length == 0 else (vector_E / length).astype(np.float32)
