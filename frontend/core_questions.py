"""Questions to the core, and the answers on their way: counts, a reset, a start of the profiler.

Owns the numbers that match them and the time that an answer may take. Called by `engine_client.py`.
"""

import asyncio
from collections.abc import Callable

from cearx.core.events import PrefixCacheEmptied
from cearx.core.messages import (
    EngineMetrics,
    FrontendToCore,
    PrefixCacheWasReset,
    Profile,
    Profiled,
    ReadMetrics,
    ResetPrefixCache,
)
from cearx.frontend.errors import ApiError, unavailable

ANSWER_WITHIN_S = 5.0
"""The core answers between two steps."""
PROFILED_WITHIN_S = 300.0
"""The worker answers when the trace is written, a second for some ten thousand events."""

Answer = EngineMetrics | PrefixCacheWasReset | Profiled


class CoreQuestions:
    """Use inside the event loop; all questions raise ApiError (503) when no answer comes."""

    def __init__(self, send: Callable[[FrontendToCore], None]) -> None:
        self._send = send
        self._next_number = 0
        self._open: dict[int, asyncio.Future[Answer]] = {}

    async def read_metrics(self) -> EngineMetrics:
        """What the core has counted up to now, for all frontends."""
        answer = await self._ask(ReadMetrics(number=self._take_number()))
        assert isinstance(answer, EngineMetrics), f"metrics were asked for, {answer} came"
        return answer

    async def reset_prefix_cache(self) -> PrefixCacheEmptied:
        """Requests that any frontend sends from then on find nothing that was computed before."""
        answer = await self._ask(ResetPrefixCache(number=self._take_number()))
        assert isinstance(answer, PrefixCacheWasReset), f"a reset was asked for, {answer} came"
        return answer.outcome

    async def profile(self, is_on: bool) -> Profiled:
        """Starts or stops the worker's profiler."""
        question = Profile(number=self._take_number(), is_on=is_on)
        answer = await self._ask(question, PROFILED_WITHIN_S)
        assert isinstance(answer, Profiled), f"a profile was asked for, {answer} came"
        return answer

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number

    async def _ask(
        self,
        question: ReadMetrics | ResetPrefixCache | Profile,
        within_s: float = ANSWER_WITHIN_S,
    ) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[question.number] = future
        self._send(question)
        try:
            async with asyncio.timeout(within_s):
                return await future
        except TimeoutError:
            message = f"The engine did not answer within {within_s:.0f} s"
            raise unavailable(message, "engine_busy") from None
        finally:
            del self._open[question.number]

    def answer(self, answer: Answer) -> None:
        future = self._open.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: ApiError) -> None:
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
