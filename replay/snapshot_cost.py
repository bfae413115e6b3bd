"""How much memory a snapshot would take, told before it is decoded.

Owns an upper bound from the msgpack bytes alone, so that a made-up file of a few megabytes cannot
become gigabytes of objects. Never decodes; called by `verify.py`.
"""

from cearx.core.trace_format import TraceIncompatible

MEMORY_BYTES_MAX = 64 * 1024 * 1024
"""What reading a trace may take beside its file."""
FREE_BYTES = 1024 * 1024
"""A snapshot below this cannot reach the limit, whatever it holds."""
_COPIES = 2
"""Of the bytes, while they are decoded."""
_ARRAY_BYTES = 352
"""An array: a struct with its empty lists, or a list that is copied to a tuple."""
_ITEM_BYTES = 12
_NUMBER_BYTES = 32
_BYTES_BYTES = 48

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2}
_FIXED |= {0xD2: 4, 0xD3: 8, 0xCA: 4, 0xCB: 8}
"""Bytes behind the first of nil, booleans and numbers."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length of binary data and text."""
_ARRAYS = {0xDC: 2, 0xDD: 4}


def require_bounded(state: bytes) -> None:
    """Raises TraceIncompatible for a snapshot that would take more than MEMORY_BYTES_MAX."""
    if len(state) < FREE_BYTES:
        return
    limit = MEMORY_BYTES_MAX - _COPIES * len(state)
    offset = cost = 0
    size = len(state)
    while offset < size and cost <= limit:
        first = state[offset]
        offset += 1
        if first < 0x80 or first >= 0xE0:
            continue
        if first in _FIXED:
            width = _FIXED[first]
            offset += width
            cost += _NUMBER_BYTES if width else 0
        elif first in _SIZED or 0xA0 <= first < 0xC0:
            width = _SIZED.get(first, 0)
            length = int.from_bytes(state[offset : offset + width], "big") if width else first & 31
            offset += width + length
            cost += _BYTES_BYTES + length
        elif first in _ARRAYS or 0x90 <= first < 0xA0:
            width = _ARRAYS.get(first, 0)
            count = int.from_bytes(state[offset : offset + width], "big") if width else first & 15
            offset += width
            cost += _ARRAY_BYTES + _ITEM_BYTES * count
        else:
            raise TraceIncompatible(f"a snapshot with byte {first:#x}, which no state has")
    if cost > limit:
        raise TraceIncompatible(
            f"a snapshot that needs more than {MEMORY_BYTES_MAX} bytes of memory, the limit"
        )
