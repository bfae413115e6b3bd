"""Requests that wait for their grammars: let in once, taken back by request or by frontend."""

from cearx.core.block_hash import root_hash
from cearx.core.grammar_waits import MAX_PREPARED, GrammarWaits
from cearx.core.identifiers import RequestKey
from cearx.core.messages import GrammarPrepared, SamplingParams, Submit, pack_tokens


def submit(key: int) -> Submit:
    return Submit(
        request_key=RequestKey(key),
        token_ids=pack_tokens([1]),
        block_hashes=(),
        cache_root=root_hash(bytes(32), None),
        max_tokens=1,
        sampling=SamplingParams(),
        grammar=f"grammar {key}",
    )


def prepared(key: int, error: str | None = None) -> GrammarPrepared:
    return GrammarPrepared(key=key, error=error)


def test_a_request_is_let_in_once() -> None:
    """Keys tell requests apart, also those of two frontends with the same request key."""
    waits = GrammarWaits()
    first, second = waits.hold(0, submit(5)), waits.hold(1, submit(5))
    assert first.grammar == "grammar 5" and first.key != second.key
    assert waits.release(prepared(second.key)) == (1, submit(5))
    assert waits.release(prepared(second.key)) is None
    assert waits.release(prepared(first.key)) == (0, submit(5))


def test_cancelled_requests_are_not_let_in() -> None:
    """One request of one frontend, or all of a frontend that is gone."""
    waits = GrammarWaits()
    keys = {(i, k): waits.hold(i, submit(k)).key for i in (0, 1) for k in (1, 2)}
    waits.cancel(0, RequestKey(1))
    waits.cancel(0, RequestKey(9))
    assert waits.release(prepared(keys[0, 1])) is None
    waits.cancel(1)
    assert (
        waits.release(prepared(keys[1, 1])) is None and waits.release(prepared(keys[1, 2])) is None
    )
    assert waits.release(prepared(keys[0, 2])) == (0, submit(2))


def test_a_grammar_is_asked_for_once() -> None:
    """Until it was not used for long; one that failed is asked for again."""
    waits = GrammarWaits()
    assert waits.must_wait(submit(1))
    waits.release(prepared(waits.hold(0, submit(1)).key, "no"))
    assert waits.must_wait(submit(1))
    waits.release(prepared(waits.hold(0, submit(1)).key))
    for key in range(2, MAX_PREPARED + 1):
        assert not waits.must_wait(submit(1))
        waits.release(prepared(waits.hold(0, submit(key)).key))
    assert not waits.must_wait(submit(1))
    for key in range(900, 900 + MAX_PREPARED):
        waits.release(prepared(waits.hold(0, submit(key)).key))
    assert waits.must_wait(submit(1))
