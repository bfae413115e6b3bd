"""Requests whose grammars the worker still prepares: they have not arrived yet, for the engine.

Owns who waits for which grammar, and nothing of grammars. So the scheduler and its log never see
that a request was constrained. Called by `frontend_desk.py`.
"""

from collections import OrderedDict

from cearx.core.identifiers import RequestKey
from cearx.core.messages import GrammarPrepared, PrepareGrammar, Submit

MAX_PREPARED = 128
"""Grammars that need not be asked for again; fewer than the worker keeps."""


class GrammarWaits:
    """Submits by the key under which their grammar was asked for."""

    def __init__(self) -> None:
        self._prepared: OrderedDict[str, None] = OrderedDict()
        """Least recently used first, as in the worker's own table."""
        self._waiting: dict[int, tuple[int, Submit]] = {}
        self._next_key = 0

    def must_wait(self, submit: Submit) -> bool:
        """Whether its grammar has to be prepared before it can be let in."""
        if submit.grammar is None:
            return False
        if submit.grammar not in self._prepared:
            return True
        self._prepared.move_to_end(submit.grammar)
        return False

    def hold(self, frontend_index: int, submit: Submit) -> PrepareGrammar:
        """Keeps a request; answers what to ask the worker."""
        assert submit.grammar is not None, "there is nothing to wait for"
        key = self._next_key
        self._next_key += 1
        self._waiting[key] = (frontend_index, submit)
        return PrepareGrammar(key=key, grammar=submit.grammar)

    def release(self, prepared: GrammarPrepared) -> tuple[int, Submit] | None:
        """The request and its frontend, or None when it was taken back."""
        held = self._waiting.pop(prepared.key, None)
        if held is not None and held[1].grammar is not None and prepared.error is None:
            self._prepared[held[1].grammar] = None
            while len(self._prepared) > MAX_PREPARED:
                self._prepared.popitem(last=False)
        return held

    def cancel(self, frontend_index: int, request_key: RequestKey | None = None) -> None:
        """Forgets one request of a frontend, or all of them."""
        for key, (index, submit) in tuple(self._waiting.items()):
            if index == frontend_index and request_key in (None, submit.request_key):
                del self._waiting[key]
