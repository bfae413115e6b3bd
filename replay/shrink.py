"""`cearx replay shrink`: the smallest input under which a scheduler still does the same mistake.

Owns delta debugging over a script: first everything behind the failure goes, then requests, then
steps and cancels, then numbers come down. The predicate owns what "the same" means; step results
come from the oracle, so every part of a script can be run.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from cearx.core.events import FinishReason
from cearx.core.identifiers import RequestId
from cearx.replay.oracle import SimulatedRequest
from cearx.replay.scripted import Arrive, Cancel, Item, Plan, Script

T = TypeVar("T")

Predicate = Callable[[Script], int | None]
"""How many items of the script are needed to see the failure, or None when it does not show."""


LOWERED = ("max_num_seqs", "num_blocks", "max_num_batched_tokens", "max_model_len")
"""Fields of the configuration that shrinking makes smaller."""


class NotReproduced(Exception):
    """The whole script does not show what should be kept."""


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """The result."""

    script: Script
    num_tried: int
    finished: bool
    """False when the time ran out before nothing could be taken away any more."""


class _OutOfTime(Exception):
    pass


class Shrinker:
    """One search; `script` is the smallest so far."""

    def __init__(
        self, script: Script, predicate: Predicate, seconds: float, keep_config: bool = False
    ) -> None:
        self.script = script
        self.num_tried = 0
        self._predicate = predicate
        self._keep_config = keep_config
        self._give_up = time.monotonic() + seconds

    def run(self) -> Shrunk:
        """Raises NotReproduced."""
        if not self._keeps(self.script):
            raise NotReproduced("the input as it is does not show it")
        try:
            while True:
                size = _size(self.script)
                self._requests()
                self._items()
                self._numbers()
                if _size(self.script) == size:
                    break
        except _OutOfTime:
            return Shrunk(script=self.script, num_tried=self.num_tried, finished=False)
        return Shrunk(script=self.script, num_tried=self.num_tried, finished=True)

    def _keeps(self, script: Script) -> bool:
        """Whether it still fails; then it is the smallest, cut off behind the failure."""
        if time.monotonic() > self._give_up:
            raise _OutOfTime
        self.num_tried += 1
        needed = self._predicate(script)
        if needed is None:
            return False
        self.script = Script(script.config, script.items[:needed])
        return True

    # --- what is taken away --------------------------------------------------------------------

    def _requests(self) -> None:
        """Requests with all that belongs to them, the earliest first: most ended long before."""
        ids = [item.request.request_id for item in self.script.items if isinstance(item, Arrive)]
        self._reduce(ids, lambda kept: _with_requests(self.script, frozenset(kept)))

    def _items(self) -> None:
        """Steps, cancels and whatever else is not an arrival."""
        positions = list(range(len(self.script.items)))
        whole = self.script

        def with_positions(kept: Sequence[int]) -> Script:
            return Script(whole.config, tuple(whole.items[i] for i in kept if i < len(whole.items)))

        self._reduce(positions, with_positions)

    def _reduce(self, parts: Sequence[T], make: Callable[[Sequence[T]], Script]) -> None:
        """Takes out runs of parts, in halves down to single ones, until no run can go."""
        parts = list(parts)
        length = max(1, len(parts) // 2)
        while parts:
            position, removed = 0, False
            while position < len(parts):
                kept = parts[:position] + parts[position + length :]
                if self._keeps(make(kept)):
                    parts, removed = kept, True
                else:
                    position += length
            if length == 1 and not removed:
                return
            length = max(1, length // 2)

    def _numbers(self) -> None:
        """Lengths and the sizes of the configuration, each as small as it can be."""
        for name in () if self._keep_config else LOWERED:
            value = getattr(self.script.config, name)
            self._lower(value, partial(_with_config, name))
        ids = [item.request.request_id for item in self.script.items if isinstance(item, Arrive)]
        for request_id in ids:
            request = _find(self.script, request_id)
            if request is None:
                continue
            for edit, value in (
                (_with_outputs, request.num_outputs),
                (_with_prompt, request.num_prompt_tokens),
                (_with_max_tokens, request.max_tokens),
            ):
                self._lower(value, partial(_edited, request_id, edit))

    def _lower(self, value: int, make: Callable[[Script, int], Script | None]) -> None:
        """Binary search for the smallest value from 1 that keeps the failure."""
        low, high = 1, value
        while low < high:
            middle = (low + high) // 2
            script = make(self.script, middle)
            if script is not None and self._keeps(script):
                high = middle
            else:
                low = middle + 1


def shrink(
    script: Script, predicate: Predicate, seconds: float = 120.0, keep_config: bool = False
) -> Shrunk:
    """Raises NotReproduced; stops with the smallest found when the time is up.

    `keep_config` leaves seats and pool alone: with fewer of them any scheduler makes people wait.
    """
    return Shrinker(script, predicate, seconds, keep_config).run()


def _size(script: Script) -> tuple[int, int]:
    numbers = sum(
        item.request.num_prompt_tokens + item.request.num_outputs + item.request.max_tokens
        for item in script.items
        if isinstance(item, Arrive)
    )
    return len(script.items), numbers


def _owner(item: Item) -> RequestId | None:
    if isinstance(item, Arrive):
        return item.request.request_id
    return item.request_id if isinstance(item, Cancel) else None


def _with_requests(script: Script, kept: frozenset[RequestId]) -> Script:
    """Only these requests' items, and no steps before the first of them."""
    items = [i for i in script.items if (owner := _owner(i)) is None or owner in kept]
    first = next((n for n, item in enumerate(items) if isinstance(item, Arrive)), len(items))
    return Script(script.config, tuple(items[first:]))


def _with_config(name: str, script: Script, value: int) -> Script | None:
    try:
        return Script(msgspec.structs.replace(script.config, **{name: value}), script.items)
    except ValueError:
        return None


def _find(script: Script, request_id: RequestId) -> SimulatedRequest | None:
    for item in script.items:
        if isinstance(item, Arrive) and item.request.request_id == request_id:
            return item.request
    return None


Edit = Callable[[SimulatedRequest, int, int], SimulatedRequest]


def _edited(request_id: RequestId, edit: Edit, script: Script, value: int) -> Script:
    size = script.config.block_size
    items = tuple(
        Arrive(edit(item.request, value, size))
        if isinstance(item, Arrive) and item.request.request_id == request_id
        else item
        for item in script.items
    )
    return Script(script.config, items)


def _with_prompt(request: SimulatedRequest, value: int, block_size: int) -> SimulatedRequest:
    hashes = request.block_hashes[: value // block_size]
    return msgspec.structs.replace(request, num_prompt_tokens=value, block_hashes=hashes)


def _with_outputs(request: SimulatedRequest, value: int, _size: int) -> SimulatedRequest:
    """Fewer tokens; one that ended by its length asks for fewer."""
    if request.finish is FinishReason.LENGTH:
        return msgspec.structs.replace(request, num_outputs=value, max_tokens=value)
    return msgspec.structs.replace(request, num_outputs=value)


def _with_max_tokens(request: SimulatedRequest, value: int, _size: int) -> SimulatedRequest:
    outputs = min(request.num_outputs, value)
    return msgspec.structs.replace(request, max_tokens=value, num_outputs=outputs)


def renumbered(script: Script) -> Script:
    """Requests from 0 and a clock that starts at 0."""
    ids: dict[RequestId, RequestId] = {}
    items: list[Item] = []
    ticks = [item.now_us for item in script.items if isinstance(item, Plan)]
    for item in script.items:
        if isinstance(item, Arrive):
            new = ids.setdefault(item.request.request_id, RequestId(len(ids)))
            items.append(Arrive(msgspec.structs.replace(item.request, request_id=new)))
        elif isinstance(item, Cancel):
            if item.request_id in ids:
                items.append(Cancel(ids[item.request_id], item.reason))
        elif isinstance(item, Plan):
            items.append(Plan(item.now_us - ticks[0]))
        else:
            items.append(item)
    return Script(script.config, tuple(items))
