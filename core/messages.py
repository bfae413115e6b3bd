"""Every message between processes: one tagged union a direction, in msgpack.

Bodies only: boot id, epoch and sequence number travel in the frame's header (`link.py`). One
message a step, not a request. No tensors, no pickle. Token ids travel packed as little-endian int32
(`pack_tokens`), because nobody between the ends looks at them.
"""

import sys
from array import array

import msgspec

from cearx.core.events import (
    CancelReason,
    FinishReason,
    PrefixCacheEmptied,
    RefusalReason,
    StepPlan,
)
from cearx.core.identifiers import BlockHash, RequestId, RequestKey, StepId
from cearx.core.metrics import Counters, EngineLoad, Histograms


def pack_tokens(token_ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32; raises OverflowError outside int32."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """The inverse of `pack_tokens`; raises ValueError unless the length is a multiple of 4."""
    token_ids = array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    pass


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the worker picks tokens; validated in the frontend, meanings as in vLLM."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """In [0, 1]: relative to the most likely token."""
    seed: int = 0
    """64 bits; the n-th token of a request depends on (seed, n) only, never on the batch."""
    min_tokens: int = 0
    """Before that many tokens neither an end-of-sequence nor a stop token can be sampled."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids; empty with ignore_eos."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end the request and are reported as its stop_reason."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, added to the logits before everything else."""
    num_logprobs: int | None = None
    """None: no log-probabilities; k: those of the sampled token and of the k most likely ones."""
    num_prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first, in `PromptLogprobs`."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None: no limit; else nothing but these can be sampled."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens; the last token of one cannot follow the others in the output."""


class Embed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="embed"):
    """Wanted of a prompt: its last token's hidden state behind the final norm."""

    dimensions: int | None = None
    """Only so many first components; None: all."""
    normalize: bool = True
    """To length 1, behind the cut."""


class Score(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="score"):
    """Wanted of a prompt: how likely `positive` follows it, if it is one of the two tokens."""

    negative: int
    positive: int


Pooling = Embed | Score
"""What is made of a prompt in place of a token; little-endian float32 in `vector` fields."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Natural-log probabilities under the raw model distribution (before any processing)."""

    logprob: float
    """Of the token itself; -inf is sent as -9999.0."""
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first, num_logprobs of them."""


class Vocabulary(_Message, frozen=True, tag="vocabulary"):
    """What grammars need to know of the tokens; passed on to the worker as it is."""

    token_bytes: bytes
    """The bytes of all tokens, one behind the other; those of special ones as they are written."""
    token_lengths: bytes
    """Bytes of each token, `pack_tokens`."""
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


# --- frontend -> core -----------------------------------------------------------------------


class FrontendHello(_Message, frozen=True, tag="hello"):
    """First message of a frontend; answered by `EngineReady` when the worker is ready."""

    frontend_index: int


class Submit(_Message, frozen=True, tag="submit"):
    request_key: RequestKey
    token_ids: bytes
    """The prompt, `pack_tokens`."""
    block_hashes: tuple[BlockHash, ...]
    """`block_hash.prompt_hashes` over the prompt's full blocks; empty when caching is off."""
    cache_root: BlockHash
    """`block_hash.root_hash` of the request's salt: the parent of the first block."""
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    """Lower goes first, under the priority policy."""
    has_exact_length: bool = False
    """Nothing but max_tokens can end it by itself: no end-of-sequence, no stop of any kind."""
    received_us: int | None = None
    """When the frontend had read the HTTP request, on the machine's monotonic clock."""
    num_choices: int = 0
    """n of the HTTP request in the first of its n submits, 0 in the others."""
    grammar: str | None = None
    """What the output must follow (`core/grammar.py`); a `Vocabulary` was sent before."""
    pooling: Pooling | None = None
    """The one output is a vector and no token; max_tokens is 1 and nothing is sampled."""


class Cancel(_Message, frozen=True, tag="cancel"):
    """Takes a request back in any state; an unknown or finished key is ignored."""

    request_key: RequestKey
    reason: CancelReason


class ResetPrefixCache(_Message, frozen=True, tag="reset_prefix_cache"):
    """Nothing computed before is found again; answered by `PrefixCacheWasReset` with the number."""

    number: int


class ReadMetrics(_Message, frozen=True, tag="read_metrics"):
    """Answered by `EngineMetrics` with the same number."""

    number: int


class AbortLabels(_Message, frozen=True, tag="abort_labels"):
    """Requests are known to clients by labels, which only their frontend knows: the core passes
    this on to every frontend, the sender included."""

    labels: tuple[str, ...]


class Profile(_Message, frozen=True, tag="profile"):
    """Starts or stops the worker's profiler, in order with the steps; answered by `Profiled`."""

    number: int
    is_on: bool
    frontend_index: int = 0
    """Whose question it is; set by the core, which passes it on to the worker."""


class Profiled(_Message, frozen=True, tag="profiled"):
    """From the worker, and from the core to the frontend that asked."""

    frontend_index: int
    number: int
    path: str | None
    """The trace that a stop has written."""
    error: str | None
    """Why nothing was started or stopped."""


FrontendToCore = (
    FrontendHello
    | Vocabulary
    | Submit
    | Cancel
    | ResetPrefixCache
    | ReadMetrics
    | AbortLabels
    | Profile
)

# --- core -> frontend -----------------------------------------------------------------------


class EngineReady(_Message, frozen=True, tag="ready"):
    max_model_len: int
    """Tokens of prompt and output together that one request may have."""
    block_size: int
    num_blocks: int
    vocab_size: int
    """Rows of the output layer: valid token ids are 0 <= id < vocab_size."""
    enable_prefix_caching: bool
    has_priorities: bool = False
    """Whether a request's priority counts."""
    embedding_size: int | None = None
    """Components of an embedding; None: the server makes none."""
    has_profiler: bool = False
    """Whether `Profile` can write traces."""


class Output(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one step brought to one request; after `finish_reason` nothing more comes."""

    request_key: RequestKey
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    """One per token when asked for."""
    finish_reason: FinishReason | None
    stop_token_id: int | None
    """The member of stop_token_ids that ended it, else None."""
    num_cached_tokens: int | None
    """Set in the request's first output: prompt tokens taken from the prefix cache."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next tokens of the prompt, which come in order, the first token left out."""
    is_grammar_fault: bool = False
    """With FAILED: the request's own grammar took too much work."""
    vector: bytes | None = None
    """Of a request with `pooling`, whose only output this is."""


class StepOutputs(_Message, frozen=True, tag="outputs"):
    outputs: tuple[Output, ...]


class Refused(_Message, frozen=True, tag="refused"):
    request_key: RequestKey
    reason: RefusalReason
    num_tokens: int
    limit_tokens: int


class EngineMetrics(_Message, frozen=True, tag="metrics"):
    number: int
    load: EngineLoad
    counters: Counters
    histograms: Histograms


class PrefixCacheWasReset(_Message, frozen=True, tag="prefix_cache_was_reset"):
    """Requests that the core gets from now on find nothing old, of whatever frontend."""

    number: int
    outcome: PrefixCacheEmptied


CoreToFrontend = (
    EngineReady
    | StepOutputs
    | Refused
    | EngineMetrics
    | PrefixCacheWasReset
    | AbortLabels
    | Profiled
)

# --- core -> worker -------------------------------------------------------------------------


class NewRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sent once, with the first step that names the request; the worker keeps its tokens."""

    request_id: RequestId
    token_ids: bytes
    sampling: SamplingParams
    grammar: str | None = None
    """What the output must follow; it was prepared."""
    pooling: Pooling | None = None
    """Its row brings a vector and no token."""


class PrepareGrammar(_Message, frozen=True, tag="prepare_grammar"):
    """Asks for a grammar to be compiled beside the steps; answered by `GrammarPrepared`."""

    key: int
    grammar: str


class ExecuteStep(_Message, frozen=True, tag="step"):
    plan: StepPlan
    new_requests: tuple[NewRequest, ...]
    ended: tuple[RequestId, ...]
    """Forget these; applied before the plan."""


CoreToWorker = ExecuteStep | Vocabulary | PrepareGrammar | Profile

# --- worker -> core -------------------------------------------------------------------------


class WorkerReady(_Message, frozen=True, tag="worker_ready"):
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    """As given, or what suits the worker's device."""
    max_num_batched_tokens: int
    embedding_size: int | None = None
    """Components of an embedding; None: the server makes none."""
    has_profiler: bool = False
    """Whether `Profile` can write traces."""


class RowOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    request_id: RequestId
    token_id: int | None
    """None when this request failed alone (for example non-finite logits), or with a vector."""
    logprobs: TokenLogprobs | None
    error: str | None
    """Set with token_id None: what failed, without user data."""
    is_grammar_fault: bool = False
    """With an error: the request's own grammar took too much work."""
    vector: bytes | None = None
    """In place of a token."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a prefill chunk tells of a prompt; after a preemption some of it is told again."""

    request_id: RequestId
    start: int
    """Index in the prompt of the first token that is told of; at least 1."""
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(_Message, frozen=True, tag="result"):
    step_id: StepId
    rows: tuple[RowOutput, ...]
    """One for each row of the plan that samples: decodes first, then sampling chunks."""
    execute_us: int
    """Wall time of the step in the worker."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Of the chunks whose requests ask for them."""
    launch_us: int = 0
    """Its inputs brought to the device, its work enqueued."""
    device_us: int = 0
    """Of the model and the sampling, by the device's clock; on the CPU by the wall clock."""
    transfer_us: int = 0
    """Of the tokens, to the host."""
    received_us: int | None = None
    """When the worker had the step, on the machine's monotonic clock."""
    sent_us: int | None = None
    """When its result left, on the same clock."""


class GrammarPrepared(_Message, frozen=True, tag="grammar_prepared"):
    key: int
    error: str | None
    """Why there will be no such grammar."""


WorkerToCore = WorkerReady | StepResult | GrammarPrepared | Profiled

# --- child -> supervisor --------------------------------------------------------------------


class Progress(_Message, frozen=True, tag="progress"):
    process: str
    """'core', 'worker', 'frontend-0', ..."""
    stage: str
    """What is going on, for a person: 'loading weights', 'warming up'."""
    completed: int
    total: int
    """0 when unknown."""


class ProcessReady(_Message, frozen=True, tag="process_ready"):
    process: str
    detail: str
    """Printed by the supervisor, may be several lines (the worker's memory table)."""


class ProcessFailed(_Message, frozen=True, tag="process_failed"):
    """A start-up failure with a known cause: one clear line for the person who started it."""

    process: str
    reason: str


ChildToSupervisor = Progress | ProcessReady | ProcessFailed
