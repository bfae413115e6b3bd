"""From logits to tokens: one row a request, each row by its own rule.

Owns the choice: argmax for greedy rows, a race between the tokens for random ones. Never keeps
state between steps, so a row's token depends on its logits and its request alone. A row that cannot
be sampled fails alone. Called by the step runner. Legend: R rows, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from cearx.core.messages import RowOutput
from cearx.worker.logprobs import token_logprobs
from cearx.worker.request_states import RequestState
from cearx.worker.sampling_rule import SamplingRule
from cearx.worker.token_constraint import ConstraintError
from cearx.worker.token_filter import Ids, Weights, keep_min_p, keep_top_p, top_k_ids
from cearx.worker.uniform import TokenUniforms

log = structlog.get_logger()

MAX_SCALE = 1e300
"""Largest 1 / temperature that logits are multiplied with."""


class RowFailed(Exception):
    """This row has no token; the message is for the person who sent the request."""


class Sampler:
    """Samples one token a row, in scratch memory that is allocated once."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._weights_V = torch.empty(vocab_size, dtype=torch.float64)
        self._uniforms = TokenUniforms(vocab_size)

    def sample(
        self, logits_RV: torch.Tensor, requests: Sequence[RequestState]
    ) -> tuple[RowOutput, ...]:
        """One output a row; `logits_RV` [num_rows, vocab_size] float32 is not changed."""
        assert logits_RV.shape == (len(requests), self.vocab_size), (
            f"logits of shape {tuple(logits_RV.shape)} for {len(requests)} rows"
        )
        if not requests:
            return ()
        raw_RV: NDArray[np.float32] = logits_RV.numpy()
        with _one_thread():
            return tuple(self._sample_row(raw_RV[i], r) for i, r in enumerate(requests))

    def _sample_row(self, raw_V: NDArray[np.float32], request: RequestState) -> RowOutput:
        try:
            # numpy's argmax takes the first of equal values, and the first NaN before all else.
            best = int(raw_V.argmax())
            peak = float(raw_V[best])
            _check_peak(peak, "the model's logits")
            rule = request.rule
            if rule is None:
                raise RowFailed(request.error)
            if rule.is_argmax:
                return _row_output(request, best)
            token_id = self._choose(rule, raw_V, best, request.num_outputs)
            num_logprobs = rule.params.num_logprobs
            if num_logprobs is None:
                return _row_output(request, token_id)
            # The weights' scratch memory is free again once a token is chosen.
            log_sum = peak + math.log(self._weights(raw_V, peak, 1.0).sum())
            return RowOutput(
                request_id=request.request_id,
                token_id=token_id,
                logprobs=token_logprobs(raw_V, log_sum, token_id, num_logprobs),
                error=None,
            )
        except RowFailed as error:
            return _row_failure(request, str(error))
        except ConstraintError as error:
            return _row_failure(request, str(error), is_grammar_fault=True)
        except Exception as error:  # whatever a request brings, the other rows go on
            log.exception("sampling failed", request_id=request.request_id)
            return _row_failure(request, f"sampling failed: {type(error).__name__}")

    def _choose(
        self, rule: SamplingRule, raw_V: NDArray[np.float32], best: int, num_outputs: int
    ) -> int:
        logits_V = rule.process(raw_V, num_outputs)
        if logits_V is not raw_V:
            best = int(logits_V.argmax())
            peak = float(logits_V[best])
            is_at_end = peak == -math.inf and rule.constraint is None
            if is_at_end and rule.last_resort is not None:
                return rule.last_resort
            _check_peak(peak, "the logits after penalties and bias")
        if rule.is_greedy:
            return best
        return self._draw(rule, logits_V, float(logits_V[best]), num_outputs)

    def _draw(
        self, rule: SamplingRule, logits_V: NDArray[np.float32], peak: float, num_outputs: int
    ) -> int:
        """Filters, then lets the kept tokens race."""
        params = rule.params
        # Of the few tokens that a grammar allows, it need not be found out that they are few.
        ids = None if rule.constraint is None else rule.constraint.allowed().ids
        logits = logits_V if ids is None else logits_V[ids]
        if 0 < params.top_k < len(logits):
            kept = top_k_ids(logits, params.top_k)
            ids, logits = (kept if ids is None else ids[kept]), logits[kept]
        weights = self._weights(logits, peak, params.temperature)
        if params.min_p > 0:
            ids, weights = _narrow(ids, weights, keep_min_p(weights, params.min_p))
        if params.top_p < 1:
            ids, weights = _narrow(ids, weights, keep_top_p(weights, params.top_p))
        winner = first_arrival(weights, self._uniforms.draw(params.seed, num_outputs, ids))
        return winner if ids is None else int(ids[winner])

    def _weights(self, logits_V: NDArray[np.float32], peak: float, temperature: float) -> Weights:
        """exp((logit - peak) / temperature) in scratch memory, valid until the next row."""
        # Two float32 logits differ by 1e-45 at least, so MAX_SCALE separates any two as well as
        # infinity does, and leaves the zero at the peak a zero.
        scale = min(1.0 / temperature, MAX_SCALE)
        weights_V = self._weights_V[: len(logits_V)]
        weights_V.copy_(torch.from_numpy(logits_V)).sub_(peak)
        if scale != 1:
            weights_V.mul_(scale)
        return weights_V.exp_().numpy()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch in the calling thread: a row takes some 50 us, which is less than a barrier with
    other threads takes when other processes want the cores too (milliseconds were measured)."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _narrow(ids: Ids | None, weights: Weights, kept: Ids) -> tuple[Ids, Weights]:
    return (kept if ids is None else ids[kept]), weights[kept]


def first_arrival(weights: Weights, uniforms: NDArray[np.float64]) -> int:
    """The index that wins the exponential race; of equal ones the lowest. Overwrites `uniforms`.

    Index i arrives at time -log(u_i) / w_i, exponential with rate w_i, so it is the first with
    probability w_i over the sum of all (the Gumbel-max trick, without its second logarithm). The
    inverse of the time, negated, is what is compared: with u in [2**-53, 1 - 2**-53] and the
    largest weight 1 it stays finite, is below zero for that weight and zero for a weight of zero.
    """
    np.log(uniforms, out=uniforms)
    return int(np.divide(weights, uniforms, out=uniforms).argmin())


def _check_peak(peak: float, what: str) -> None:
    """The largest logit shows what is wrong with a row: NaN and +inf come first, -inf last."""
    if not np.isfinite(peak):
        raise RowFailed(f"{what} are not finite ({peak})")


def _row_output(request: RequestState, token_id: int) -> RowOutput:
    return RowOutput(request_id=request.request_id, token_id=token_id, logprobs=None, error=None)


def _row_failure(
    request: RequestState, reason: str, *, is_grammar_fault: bool = False
) -> RowOutput:
    return RowOutput(
        request_id=request.request_id,
        token_id=None,
        logprobs=None,
        error=reason,
        is_grammar_fault=is_grammar_fault,
    )
