"""Running requests by the ids that clients know, so that somebody else can abort them.

An id is a label and nothing more: several requests may carry the same one, and all are aborted
then. Owned by `engine_client.py`; the answer in the making holds its label (`respond.py`).
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cearx.core.events import CancelReason
from cearx.frontend.errors import ApiError

if TYPE_CHECKING:
    from cearx.frontend.request_stream import RequestStream


class RequestLabels:
    def __init__(self) -> None:
        self._streams: dict[str, list[RequestStream]] = {}

    @contextlib.contextmanager
    def holding(self, label: str | None, stream: "RequestStream") -> Iterator[None]:
        """For as long as the block runs `label` stands for `stream`."""
        if label is None:
            yield
            return
        streams = self._streams.setdefault(label, [])
        streams.append(stream)
        try:
            yield
        finally:
            streams.remove(stream)
            if not streams:
                del self._streams[label]

    def abort(self, labels: Iterable[str]) -> None:
        """Ends their requests with an error that says so; unknown labels are passed over."""
        for label in labels:
            for stream in self._streams.get(label, ()):
                stream.fail(ApiError(409, "The request was aborted", code="request_aborted"))
                stream.close(CancelReason.DISCONNECT)
