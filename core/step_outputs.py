"""What a step brings to clients, as messages for their frontends.

Pure functions over what the shell keeps of requests; what was told once is not told again. Called
by `engine.py`.
"""

from cearx.core.events import FinishReason
from cearx.core.identifiers import RequestId, RequestKey
from cearx.core.live_requests import LiveRequests
from cearx.core.messages import Output, PromptLogprobs, StepResult, TokenLogprobs


def outputs_of(
    requests: LiveRequests,
    result: StepResult,
    ended: dict[RequestId, FinishReason],
    stop_tokens: dict[RequestId, int],
) -> dict[int, list[Output]]:
    """What a result brings to each frontend; call before those that `ended` are forgotten."""
    outputs: dict[int, list[Output]] = {}
    told = {p.request_id: _untold(requests, p) for p in result.prompt_logprobs}
    for row in result.rows:
        request = requests.get(row.request_id)
        if request is None:
            continue
        outputs.setdefault(request.frontend_index, []).append(
            Output(
                request_key=request.request_key,
                token_ids=() if row.token_id is None else (row.token_id,),
                logprobs=None if row.logprobs is None else (row.logprobs,),
                finish_reason=ended.get(row.request_id),
                stop_token_id=stop_tokens.get(row.request_id),
                num_cached_tokens=request.num_cached_tokens,
                prompt_logprobs=told.pop(row.request_id, ()),
                is_grammar_fault=row.is_grammar_fault,
                vector=row.vector,
            )
        )
        request.num_cached_tokens = None
    for request_id, logprobs in told.items():  # of chunks that do not sample
        request = requests.get(request_id)
        if request is not None and logprobs:
            outputs.setdefault(request.frontend_index, []).append(
                prompt_output(request.request_key, logprobs)
            )
    return outputs


def _untold(requests: LiveRequests, told: PromptLogprobs) -> tuple[TokenLogprobs, ...]:
    """What the frontend does not know yet: a preemption makes a chunk run twice."""
    request = requests.get(told.request_id)
    if request is None:
        return ()
    assert told.start <= request.num_prompt_told, (
        f"request {told.request_id}: prompt tokens from {told.start} on are told,"
        f" {request.num_prompt_told} are known"
    )
    untold = told.logprobs[request.num_prompt_told - told.start :]
    request.num_prompt_told += len(untold)
    return untold


def prompt_output(request_key: RequestKey, logprobs: tuple[TokenLogprobs, ...]) -> Output:
    """Log-probabilities of a part of the prompt, before the first token."""
    return Output(
        request_key=request_key,
        token_ids=(),
        logprobs=None,
        finish_reason=None,
        stop_token_id=None,
        num_cached_tokens=None,
        prompt_logprobs=logprobs,
    )


def ended_output(request_key: RequestKey, reason: FinishReason) -> Output:
    """The end of a request without a token."""
    return Output(
        request_key=request_key,
        token_ids=(),
        logprobs=None,
        finish_reason=reason,
        stop_token_id=None,
        num_cached_tokens=None,
    )
