"""Requests whose grammars the worker still prepares: they have not arrived yet, for the engine.

Owns who waits for which grammar, and nothing of grammars. So the scheduler and its log never see
that a request was constrained. Called by `process.py`.
"""

from cearx.core.identifiers import RequestKey
from cearx.core.messages import PrepareGrammar, Submit


class GrammarWaits:
    """Submits by the key under which their grammar was asked for."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, Submit]] = {}
        self._next_key = 0

    def hold(self, frontend_index: int, submit: Submit) -> PrepareGrammar:
        """Keeps a request; answers what to ask the worker."""
        assert submit.grammar is not None, "there is nothing to wait for"
        key = self._next_key
        self._next_key += 1
        self._waiting[key] = (frontend_index, submit)
        return PrepareGrammar(key=key, grammar=submit.grammar)

    def release(self, key: int) -> tuple[int, Submit] | None:
        """The request and its frontend, or None when it was taken back."""
        return self._waiting.pop(key, None)

    def cancel(self, frontend_index: int, request_key: RequestKey | None = None) -> None:
        """Forgets one request of a frontend, or all of them."""
        for key, (index, submit) in tuple(self._waiting.items()):
            if index == frontend_index and request_key in (None, submit.request_key):
                del self._waiting[key]
