"""From a checkpoint's tensors to a model's weights.

Owns the two ends, `WeightSource` (names and tensors of a checkpoint, whatever its file format) and
`WeightSlot` (a place in a model), and the check that they fit exactly. Never reads a file itself.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from zlib import crc32

import torch
from torch import Tensor

from cearx.core.child import StartupError
from cearx.worker.block_quantised import BlockQuantised, round_to_int8

MAX_LISTED = 8
"""Names that an error lists before it only counts."""


class WeightMismatch(StartupError):
    """The checkpoint's tensors are not the model's; the message lists names and shapes."""


class WeightSource(Protocol):
    """A checkpoint."""

    def names(self) -> Iterable[str]:
        """Names of all tensors, as Hugging Face names them (`model.layers.0...`)."""
        ...

    def get(self, name: str) -> Tensor:
        """The whole tensor, in any float type."""
        ...


@runtime_checkable
class QuantisedSource(WeightSource, Protocol):
    """A checkpoint that may hold matrices as quantised blocks."""

    def get_quantised(self, name: str) -> BlockQuantised | None:
        """The whole tensor; None when it must be taken as floats."""
        ...


@dataclass(frozen=True)
class WeightSlot:
    """A place for one tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, as it stands in the checkpoint."""
    fill: Callable[[Tensor], None]
    """Takes the whole tensor in any float type and keeps this rank's share of it.

    Raises ValueError for one that it cannot keep."""
    fill_quantised: Callable[[BlockQuantised], None] | None = None
    """As `fill`, for places that can keep quantised blocks."""
    keep_exact: Callable[[Tensor], None] | None = None
    """Takes the whole tensor too when only its blocks are rounded: a place that is looked up."""
    kept_as: Mapping[str, int] | None = None
    """Bytes by form, where `fill` keeps something else than the tensor in the model's type."""


def fill_slots(
    slots: Mapping[str, WeightSlot],
    source: WeightSource,
    ignored: Callable[[str], bool],
    on_progress: Callable[[int, int], None],
    int8: bool = False,
) -> dict[str, dict[str, int]]:
    """Fills every slot from the source, name by name.

    Returns the bytes of those kept quantised, by name and form. `ignored` says which further names
    may stand in the checkpoint; `on_progress` gets tensors done and tensors in all; `int8` rounds
    what the source has as floats, where the place can keep blocks. Raises WeightMismatch with all
    missing, unexpected and misshapen tensors, StartupError for one that cannot be rounded.
    """
    names = set(source.names())
    wrong = [f"missing: {name} {list(slots[name].shape)}" for name in slots if name not in names]
    unexpected = sorted(name for name in names - slots.keys() if not ignored(name))
    wrong += [f"unexpected: {name} {list(source.get(name).shape)}" for name in unexpected]
    if wrong:
        raise _mismatch(wrong)
    num_bytes: dict[str, dict[str, int]] = {}
    quantised = source if isinstance(source, QuantisedSource) else None
    for index, (name, slot) in enumerate(slots.items()):
        blocks = quantised.get_quantised(name) if quantised and slot.fill_quantised else None
        tensor = source.get(name) if blocks is None else blocks
        if tuple(tensor.shape) != slot.shape:
            wrong.append(f"shape of {name}: file {list(tensor.shape)}, model {list(slot.shape)}")
        elif isinstance(tensor, BlockQuantised):
            num_bytes[name] = _fill_blocks(slot, tensor)
        elif not tensor.dtype.is_floating_point:
            wrong.append(f"type of {name}: {tensor.dtype} is not a float type")
        elif int8 and slot.fill_quantised:
            num_bytes[name] = _fill_rounded(name, slot, tensor)
        else:
            _fill(name, slot, tensor)
        on_progress(index + 1, len(slots))
    if wrong:
        raise _mismatch(wrong)
    return num_bytes


def _fill(name: str, slot: WeightSlot, tensor: Tensor) -> None:
    try:
        slot.fill(tensor)
    except ValueError as error:
        raise StartupError(f"{name}: {error}") from error


def _fill_blocks(slot: WeightSlot, blocks: BlockQuantised) -> dict[str, int]:
    assert slot.fill_quantised is not None, "nobody asks for blocks where they cannot be kept"
    slot.fill_quantised(blocks)
    return {blocks.form: blocks.num_bytes}


def _fill_rounded(name: str, slot: WeightSlot, tensor: Tensor) -> dict[str, int]:
    try:
        blocks = round_to_int8(tensor)
    except ValueError as error:
        raise StartupError(f"{name}: {error}") from error
    num_bytes = _fill_blocks(slot, blocks)
    if slot.keep_exact is not None:
        slot.keep_exact(tensor)
        num_bytes[type_name(tensor.dtype)] = tensor.nbytes
    return num_bytes


def type_name(dtype: torch.dtype) -> str:
    """As the flags spell it."""
    return str(dtype).removeprefix("torch.")


def _mismatch(wrong: list[str]) -> WeightMismatch:
    more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
    return WeightMismatch(
        "the weights do not fit the model: " + "; ".join(wrong[:MAX_LISTED]) + more
    )


class DummyWeights:
    """Random tensors for every slot, at the scale of trained ones.

    The same for the same seed, device and type: each device draws numbers of its own, where they
    are wanted, because a large model's would take minutes on the CPU.
    """

    def __init__(
        self,
        slots: Mapping[str, WeightSlot],
        seed: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._slots = slots
        self._seed = seed
        self._device = device or torch.device("cpu")
        self._dtype = dtype

    def names(self) -> Iterable[str]:
        return self._slots.keys()

    def get(self, name: str) -> Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(crc32(f"{self._seed} {name}".encode()))
        shape = self._slots[name].shape
        tensor = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        if len(shape) == 2:
            return tensor.mul_(shape[1] ** -0.5)
        if name.endswith("norm.weight"):
            return tensor.mul_(0.05).add_(1.0)
        return tensor.mul_(0.02)
