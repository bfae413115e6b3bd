"""Questions to the core about its metrics, and the answers on their way.

Owns the numbers that match them and the time that an answer may take. Called by `engine_client.py`.
"""

import asyncio
from collections.abc import Callable

from cearx.core.messages import EngineMetrics, FrontendToCore, ReadMetrics
from cearx.frontend.errors import ApiError, unavailable

ANSWER_WITHIN_S = 5.0
"""The core answers between two steps."""


class MetricsQueries:
    """Use inside the event loop."""

    def __init__(self) -> None:
        self._next_number = 0
        self._open: dict[int, asyncio.Future[EngineMetrics]] = {}

    async def ask(self, send: Callable[[FrontendToCore], None]) -> EngineMetrics:
        """Raises ApiError (503) when no answer comes."""
        number = self._next_number
        self._next_number += 1
        future: asyncio.Future[EngineMetrics] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        send(ReadMetrics(number=number))
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await future
        except TimeoutError:
            message = f"The engine did not answer within {ANSWER_WITHIN_S:.0f} s"
            raise unavailable(message, "engine_busy") from None
        finally:
            del self._open[number]

    def answer(self, metrics: EngineMetrics) -> None:
        future = self._open.get(metrics.number)
        if future is not None and not future.done():
            future.set_result(metrics)

    def fail(self, error: ApiError) -> None:
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
