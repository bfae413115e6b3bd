"""What the shell keeps of each request from its arrival to its end.

Owns token ids and hashes of the last open block, sampling parameters, who asked, and what the
worker has to hear of: requests that it does not know yet, and ends. Decides nothing and logs
nothing. Called by `engine.py`; `step_tokens.py` and `step_outputs.py` read and count on.
"""

from array import array
from collections.abc import Iterable

import msgspec

from cearx.core.block_hash import DIGEST_SIZE, TOKEN_BYTES
from cearx.core.config import SchedulerConfig
from cearx.core.events import Admission, PrefillChunk
from cearx.core.identifiers import BlockHash, RequestId, RequestKey
from cearx.core.messages import NewRequest, SamplingParams, Submit, unpack_tokens


class MessageRejected(ValueError):
    """A message that decodes but cannot be meant: the sender is at fault, nothing has changed."""


class LiveRequest(msgspec.Struct, kw_only=True):
    """What the shell keeps of a request until it ends."""

    frontend_index: int
    request_key: RequestKey
    sampling: SamplingParams
    min_tokens: int
    """Before that many tokens no token ends it."""
    parent_hash: BlockHash
    """Hash of the last full block of known tokens (the root before the first)."""
    open_block: "array[int]"
    """The known tokens behind the last full block."""
    num_outputs: int = 0
    num_cached_tokens: int | None = None
    """From the first admission, until the first output has told it."""
    is_at_worker: bool = False
    num_prefilled: int = 0
    """Most tokens that its chunks have come to."""
    num_prompt_told: int = 1
    """Tokens of the prompt whose log-probabilities have left; the first has none."""


class LiveRequests:
    """By the core's id, and by the frontend's key."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._requests: dict[RequestId, LiveRequest] = {}
        self.get = self._requests.get
        """By id; None for one that has ended."""
        self._by_key: dict[tuple[int, RequestKey], RequestId] = {}
        self._unsent: dict[RequestId, NewRequest] = {}
        self._ended_at_worker: list[RequestId] = []

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, frontend_index: int, key: RequestKey) -> RequestId | None:
        """The id under which a frontend's request runs; None when it has ended."""
        return self._by_key.get((frontend_index, key))

    def of_frontend(self, frontend_index: int) -> list[RequestId]:
        return [i for i, r in self._requests.items() if r.frontend_index == frontend_index]

    def check(self, frontend_index: int, submit: Submit) -> None:
        """Raises MessageRejected."""
        if len(submit.token_ids) % TOKEN_BYTES:
            raise MessageRejected(f"token_ids of {len(submit.token_ids)} bytes")
        if (frontend_index, submit.request_key) in self._by_key:
            raise MessageRejected(f"request key {submit.request_key} is in use")
        if submit.pooling is not None and submit.max_tokens != 1:
            raise MessageRejected(f"max_tokens {submit.max_tokens} for one vector")
        full_blocks = len(submit.token_ids) // TOKEN_BYTES // self._config.block_size
        expected = full_blocks if self._config.enable_prefix_caching else 0
        if len(submit.block_hashes) != expected:
            raise MessageRejected(f"{len(submit.block_hashes)} block hashes for {expected} blocks")
        if any(len(h) != DIGEST_SIZE for h in (*submit.block_hashes, submit.cache_root)):
            raise MessageRejected(f"a block hash is not {DIGEST_SIZE} bytes")

    def add(self, request_id: RequestId, frontend_index: int, submit: Submit) -> None:
        """It was let in."""
        token_ids, hashes = unpack_tokens(submit.token_ids), submit.block_hashes
        block_size = self._config.block_size
        self._requests[request_id] = LiveRequest(
            frontend_index=frontend_index,
            request_key=submit.request_key,
            sampling=submit.sampling,
            # The worker knows when a grammar is at its end, and keeps min_tokens until then.
            min_tokens=submit.sampling.min_tokens if submit.grammar is None else 0,
            parent_hash=hashes[-1] if hashes else submit.cache_root,
            open_block=token_ids[len(token_ids) // block_size * block_size :],
        )
        self._by_key[frontend_index, submit.request_key] = request_id
        self._unsent[request_id] = NewRequest(
            request_id=request_id,
            token_ids=submit.token_ids,
            sampling=submit.sampling,
            grammar=submit.grammar,
            pooling=submit.pooling,
        )

    def forget(self, request_id: RequestId) -> LiveRequest:
        """It has ended."""
        request = self._requests.pop(request_id)
        del self._by_key[request.frontend_index, request.request_key]
        self._unsent.pop(request_id, None)
        if request.is_at_worker:
            self._ended_at_worker.append(request_id)
        return request

    def take_unsent(self, admitted: Iterable[Admission]) -> tuple[NewRequest, ...]:
        """Of those, the ones that the worker does not know yet: it will with the next step."""
        taken: list[NewRequest] = []
        for admission in admitted:
            new_request = self._unsent.pop(admission.request_id, None)
            if new_request is not None:
                request = self._requests[admission.request_id]
                request.num_cached_tokens = admission.num_cached_tokens
                request.is_at_worker = True
                taken.append(new_request)
        return tuple(taken)

    def take_ended(self) -> tuple[RequestId, ...]:
        """The ends that the worker has not heard of: it will with the next step."""
        ended = tuple(self._ended_at_worker)
        self._ended_at_worker.clear()
        return ended

    def goes_on(self, chunk: PrefillChunk) -> bool:
        """Whether a chunk computes what was not computed before: a repetition is no progress."""
        request = self._requests.get(chunk.request_id)
        end = chunk.start + chunk.num_tokens
        if request is None or end <= request.num_prefilled:
            return False
        request.num_prefilled = end
        return True
