"""Whether there is an engine to be asked, and what it told of itself.

Owns the answer that requests get while it starts, while the server ends and when it is gone. Called
by `engine_client.py`; the routes ask through it.
"""

import anyio

from cearx.core.messages import EngineReady
from cearx.frontend.errors import ApiError, unavailable


class EngineStatus:
    """Use inside the event loop."""

    def __init__(self) -> None:
        self._engine: EngineReady | None = None
        self._is_known = anyio.Event()
        self._down: ApiError | None = None
        self._is_draining = False

    @property
    def is_down(self) -> bool:
        return self._down is not None

    async def wait_ready(self) -> EngineReady:
        """Raises ApiError when the core goes away before it is ready."""
        await self._is_known.wait()
        return self.require_ready()

    def require_ready(self) -> EngineReady:
        """The engine's sizes; raises ApiError (503) when new requests cannot be served now."""
        if self._is_draining and self._down is None:
            raise unavailable("The server is shutting down", "shutting_down")
        return self.require_engine()

    def require_engine(self) -> EngineReady:
        """The engine's sizes; raises ApiError (503) when nobody is there to be asked."""
        if self._down is not None:
            raise self._down
        if self._engine is None:
            raise unavailable("The engine is starting", "engine_starting")
        return self._engine

    def set_ready(self, engine: EngineReady) -> None:
        self._engine = engine
        self._is_known.set()

    def drain(self) -> None:
        """From here on no new requests; those that run go on."""
        self._is_draining = True

    def go_down(self, error: ApiError) -> None:
        """The first reason stays."""
        self._down = self._down or error
        self._is_known.set()
