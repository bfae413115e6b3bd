"""Short forms of decodes: exact inverses, short where batches are steady, bounded for any bytes."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cearx.core.events import StepPlan
from cearx.core.trace_decodes import (
    MAX_DECODES,
    change_of_decodes,
    changed_decodes,
    compact_decodes,
    expand_decodes,
)
from cearx.core.trace_format import COMPACT, Frame, RecordType, TraceIncompatible
from cearx.core.trace_records import decode_record

ids = st.integers(0, 100)
batches = st.lists(ids, max_size=40).map(tuple)
rising = st.lists(ids, max_size=40, unique=True).map(sorted).map(tuple)


@given(st.lists(st.integers(0, 2**40), max_size=100, unique=True).map(sorted))
@example(list(range(64)))
@example(list(range(100_000, 100_064)))
def test_short_form_of_rising_decodes(decodes: list[int]) -> None:
    """Rising ids always have a short form, of no more integers, that expands to them."""
    short = compact_decodes(tuple(decodes))
    if len(decodes) < 2:
        assert short is None
        return
    assert short is not None
    assert len(short) <= len(decodes)
    assert expand_decodes(short) == tuple(decodes)


def test_64_decodes_in_a_row_are_two_integers() -> None:
    """What a steady batch costs in the log."""
    assert compact_decodes(tuple(range(500, 564))) == (500, -63)
    assert compact_decodes((7, 8, 9, 12, 13)) == (7, -2, 1, -1)
    assert compact_decodes((3, 2)) is None


def test_a_short_form_cannot_fill_the_memory() -> None:
    """A few bytes that stand for very many decodes are refused with the limit."""
    plan = StepPlan(
        step_id=0,
        decodes=(0, -(2**62)),
        chunks=(),
        granted=(),
        admitted=(),
        preempted=(),
        waits=(),
    )
    frame = Frame(9, 4, RecordType.STEP_PLAN, COMPACT, msgspec.msgpack.encode(plan))
    with pytest.raises(TraceIncompatible, match=f"record 4 at offset 9.*limit is {8192}"):
        decode_record(frame)
    most = (0, -(MAX_DECODES - 1))
    assert len(expand_decodes(most)) == MAX_DECODES
    assert compact_decodes(tuple(range(MAX_DECODES + 1))) is None


@given(batches | rising, batches | rising)
@example((), ())
@example((5, 5, 6), (5, 6))
def test_a_change_comes_back(before: tuple[int, ...], decodes: tuple[int, ...]) -> None:
    """Whatever two plans hold: no change form, or one that expands to the second."""
    change = change_of_decodes(before, decodes)
    if change is not None:
        assert changed_decodes(before, change) == decodes
        assert change == () or len(change) <= len(decodes)


@given(rising, st.data())
def test_a_rising_batch_with_few_changes_has_a_short_change(
    before: tuple[int, ...], data: st.DataObject
) -> None:
    """Some leave, some come at any place: the change is told with those only."""
    gone = data.draw(st.sets(st.sampled_from(before), max_size=2)) if before else set()
    come = data.draw(st.sets(st.integers(0, 200), max_size=2)) - set(before)
    decodes = tuple(sorted({*before, *come} - gone))
    change = change_of_decodes(before, decodes)
    if len(gone) + len(come) < len(decodes) and decodes != before:
        assert change is not None and len(change) == 1 + len(gone) + len(come)


@given(batches, st.lists(st.integers(-(2**63), 2**64 - 1), max_size=12).map(tuple))
def test_any_change_gives_decodes_or_one_error(
    before: tuple[int, ...], change: tuple[int, ...]
) -> None:
    """Integers from anywhere never take what is not there."""
    try:
        decodes = changed_decodes(before, change)
    except ValueError:
        return
    assert len(decodes) <= len(before) + len(change)


def test_a_change_cannot_grow_without_end() -> None:
    """Plan after plan of a made-up file adds to the decodes, up to the limit."""
    decodes: tuple[int, ...] = ()
    with pytest.raises(ValueError, match=f"limit is {MAX_DECODES}"):
        for _ in range(MAX_DECODES):
            decodes = changed_decodes(decodes, (0, *range(1000)))
    assert len(decodes) <= MAX_DECODES
