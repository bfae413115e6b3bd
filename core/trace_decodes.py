"""Short forms of a plan's decodes, the longest part of a step's record.

Two forms, both exact inverses of their expansion: runs of rising request ids, and the change from
the decodes of the plan before. Pure functions over tuples of integers; what they expand to is
bounded, because the bytes may come from anywhere. Called by `trace_records.py`.
"""

from cearx.core.identifiers import RequestId

MAX_DECODES = 8192
"""Most decodes that a short form may stand for, so that a few bytes cannot fill the memory."""


def compact_decodes(decodes: tuple[RequestId, ...]) -> tuple[RequestId, ...] | None:
    """Rising request ids in few small integers, or None where that is not possible.

    The first integer is the first id. Behind it a negative one, -n, stands for the n ids that
    follow; another one, g, for the id behind 1 + g left out. (7, 8, 9, 12, 13) is (7, -2, 1, -1).
    """
    if not 2 <= len(decodes) <= MAX_DECODES:
        return None
    first, last = decodes[0], decodes[-1]
    if last - first == len(decodes) - 1 and decodes == tuple(range(first, last + 1)):
        return (first, RequestId(first - last))
    short: list[int] = [first]
    expected = first + 1
    run = 0
    for request_id in decodes[1:]:
        gap = request_id - expected
        if gap == 0:
            run += 1
        elif gap > 0:
            if run:
                short.append(-run)
                run = 0
            short.append(gap - 1)
        else:
            return None
        expected = request_id + 1
    if run:
        short.append(-run)
    return tuple(short)  # type: ignore[arg-type]


def expand_decodes(short: tuple[RequestId, ...]) -> tuple[RequestId, ...]:
    """The inverse of `compact_decodes`; raises ValueError over MAX_DECODES."""
    decodes: list[int] = list(short[:1])
    for step in short[1:]:
        expected = decodes[-1] + 1
        if step >= 0:
            decodes.append(expected + 1 + step)
        elif len(decodes) - step <= MAX_DECODES:
            decodes.extend(range(expected, expected - step))
        else:
            count = len(decodes) - step
            raise ValueError(f"a plan of {count} decodes, the limit is {MAX_DECODES}")
    return tuple(decodes)  # type: ignore[arg-type]


def change_of_decodes(
    before: tuple[RequestId, ...], decodes: tuple[RequestId, ...]
) -> tuple[int, ...] | None:
    """What turns `before` into `decodes`, or None where that is not possible or not shorter.

    () stands for no change. Else the first integer is the number of removed ones, then come their
    positions in `before`, each less the one before it and one, then the added ids. The added ones
    go to the end; where that is another order than in `decodes`, all are sorted, and the first
    integer is -1 less the number.
    """
    if before == decodes:
        return ()
    if not 1 <= len(decodes) <= MAX_DECODES:
        return None
    kept = set(decodes)
    had = set(before)
    added = [i for i in decodes if i not in had]
    change, last = [0], -1
    for position, request_id in enumerate(before):
        if request_id not in kept:
            change.append(position - last - 1)
            last = position
    num_removed = len(change) - 1
    if num_removed + len(added) >= len(decodes):
        return None
    result = [i for i in before if i in kept] + added
    is_sorted = False
    if tuple(result) != decodes:
        result.sort()
        is_sorted = True
        if tuple(result) != decodes:
            return None
    change[0] = -1 - num_removed if is_sorted else num_removed
    return (*change, *added)


def changed_decodes(
    before: tuple[RequestId, ...], change: tuple[int, ...]
) -> tuple[RequestId, ...]:
    """The inverse of `change_of_decodes`; raises ValueError for what it never returns."""
    if not change:
        return before
    is_sorted = change[0] < 0
    num_removed = -1 - change[0] if is_sorted else change[0]
    if num_removed >= len(change):
        raise ValueError(f"{num_removed} removed decodes in a change of {len(change)} integers")
    added = change[1 + num_removed :]
    count = len(before) - num_removed + len(added)
    if count > MAX_DECODES:
        raise ValueError(f"a plan of {count} decodes, the limit is {MAX_DECODES}")
    decodes = list(before)
    position = -1
    for skipped in change[1 : 1 + num_removed]:
        position += skipped  # and one on, less the one that was removed before it
        if skipped < 0 or position + 1 > len(decodes) - 1:
            raise ValueError(f"decode {position + 1} of {len(decodes)} is removed")
        del decodes[position + 1]
    decodes.extend(added)  # type: ignore[arg-type]
    if is_sorted:
        decodes.sort()
    return tuple(decodes)
