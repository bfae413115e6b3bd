"""What a step needs from the host, in one copy; and its tokens back, without waiting for them.

Owns pinned memory and the events that say when it may be used again; never looks at a value. A step
packs arrays one behind the other and gets views of where they will stand on the device. Called by
the runner. On the CPU, which tests use, copies are done at once and there are no events.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_BYTES = 4
ALIGNMENT = 4
"""Words: arrays start at multiples of 16 bytes, as kernels are compiled for."""


class _Slot:
    """Pinned memory of one copy, and the event behind it."""

    def __init__(self, num_words: int, device: torch.device, is_timed: bool = False) -> None:
        is_cuda = device.type == "cuda"
        self.words = torch.empty(num_words, dtype=torch.int32, pin_memory=is_cuda)
        self.array: NDArray[np.int32] = self.words.numpy()
        self.event = _event(device, is_timed)
        self.is_used = False

    def mark(self) -> None:
        self.is_used = True
        if self.event is not None:
            self.event.record()

    def is_done(self) -> bool:
        if self.event is None or not self.is_used:
            return True
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.event is not None and self.is_used:
            self.event.synchronize()


def _event(device: torch.device, is_timed: bool) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]


class InputStaging:
    """A ring of pinned buffers, and the buffer on the device that each is copied to.

    The device has one: a copy is ordered behind the step that read what the last one brought.
    """

    def __init__(self, num_words: int, device: torch.device, num_slots: int = 4) -> None:
        self._slots = [_Slot(num_words, device) for _ in range(num_slots)]
        self._device_words = torch.empty(num_words, dtype=torch.int32, device=device)
        self._current = 0
        self._used = 0

    def begin(self) -> None:
        """Starts a new copy; waits only when all slots are still on their way."""
        self._current = (self._current + 1) % len(self._slots)
        self._slots[self._current].wait()
        self._used = 0

    def put(self, array: NDArray[Any]) -> Tensor:
        """Packs an int32 or int64 array; the view is valid from `send` to the next `send`."""
        num_words = array.nbytes // WORD_BYTES
        begin, end = self._used, self._used + num_words
        slot = self._slots[self._current]
        assert end <= len(slot.array), f"{end} words for a staging buffer of {len(slot.array)}"
        slot.array[begin:end].view(array.dtype)[:] = array
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        words = self._device_words[begin:end]
        return words if array.dtype == np.int32 else words.view(torch.int64)

    def send(self) -> None:
        """One copy of all that was packed."""
        if not self._used:
            return
        slot = self._slots[self._current]
        used = min(self._used, len(slot.array))
        self._device_words[:used].copy_(slot.words[:used], non_blocking=True)
        slot.mark()


class TokenTicket:
    """Tokens that are on their way to the host; good until as many further ones as the ring has."""

    def __init__(self, slot: "_TimedSlot", num_tokens: int) -> None:
        self._slot = slot
        self._num_tokens = num_tokens

    def is_done(self) -> bool:
        return self._slot.is_done()

    def take(self) -> list[int]:
        """Waits if need be."""
        self._slot.wait()
        tokens: list[int] = self._slot.array[: self._num_tokens].tolist()
        return tokens

    def elapsed_us(self) -> tuple[int, int]:
        """Of the work before the copy and of the copy, by the device's clock; after `take`."""
        begun, computed, copied = self._slot.begun, self._slot.computed, self._slot.event
        if begun is None or computed is None or copied is None:
            return 0, 0
        return _elapsed_us(begun, computed), _elapsed_us(computed, copied)


def _elapsed_us(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(1000 * float(begin.elapsed_time(end)))


class _TimedSlot(_Slot):
    """Two more events: where a step's work begins, and where its tokens are there."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        super().__init__(num_words, device, is_timed=True)
        self.begun = _event(device, is_timed=True)
        self.computed = _event(device, is_timed=True)


class TokenRing:
    """Pinned buffers for the tokens of the steps in flight."""

    def __init__(self, max_num_rows: int, device: torch.device, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = [_TimedSlot(max_num_rows, device) for _ in range(num_slots)]
        self._next = 0

    def begin(self) -> None:
        """The work behind which `fetch` comes next is enqueued from here on."""
        begun = self._slots[self._next].begun
        if begun is not None:
            begun.record()

    def fetch(self, tokens_R: Tensor) -> TokenTicket:
        """Starts the copy of int32 tokens behind the work that is in the stream now."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self.num_slots
        if slot.computed is not None:
            slot.computed.record()
        slot.words[: len(tokens_R)].copy_(tokens_R, non_blocking=True)
        slot.mark()
        return TokenTicket(slot, len(tokens_R))
