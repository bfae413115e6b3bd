"""Where prompts are made: on the event loop's thread, or off it."""

import gc
import threading
import time

import anyio
import pytest

from cearx.frontend.prompt_work import MAX_AT_ONCE_BYTES, MAX_READ_AT_ONCE_BYTES, SLOW_S, PromptWork


def test_short_prompts_are_made_at_once_and_long_ones_in_a_thread() -> None:
    """The bound itself is short; one byte more is not."""

    async def threads() -> list[int]:
        work = PromptWork(1)
        sizes = (0, MAX_AT_ONCE_BYTES, MAX_AT_ONCE_BYTES + 1)
        return [await work.run(size, threading.get_ident) for size in sizes]

    first, second, third = anyio.run(threads)
    assert first == second == threading.get_ident() != third


def test_after_a_slow_short_prompt_the_next_goes_to_a_thread_until_one_was_fast() -> None:
    """A template that loops holds the event loop up once."""

    def slow() -> int:
        time.sleep(2 * SLOW_S)
        return threading.get_ident()

    async def threads() -> list[int]:
        work = PromptWork(1)
        tasks = (slow, slow, threading.get_ident, threading.get_ident)
        return [await work.run(1, task) for task in tasks]

    here = threading.get_ident()
    assert [thread == here for thread in anyio.run(threads)] == [True, False, False, True]


def test_a_failure_comes_out_of_either_place() -> None:
    """The routes turn it into an answer."""

    def fail() -> None:
        raise ValueError("no")

    async def both() -> None:
        work = PromptWork(1)
        for size in (1, MAX_AT_ONCE_BYTES + 1):
            with pytest.raises(ValueError, match="no"):
                await work.run(size, fail)

    anyio.run(both)


def test_large_bodies_are_read_in_a_thread_while_the_collector_rests() -> None:
    """And it works again afterwards, whatever became of the body."""

    def fail(body: bytes) -> None:
        assert not gc.isenabled()
        raise ValueError(threading.get_ident())

    async def read(size: int) -> int:
        return await PromptWork(1).read(bytes(size), lambda _: threading.get_ident())

    assert anyio.run(read, MAX_READ_AT_ONCE_BYTES) == threading.get_ident()
    assert anyio.run(read, MAX_READ_AT_ONCE_BYTES + 1) != threading.get_ident()
    with pytest.raises(ValueError):
        anyio.run(PromptWork(1).read, bytes(MAX_READ_AT_ONCE_BYTES + 1), fail)
    assert gc.isenabled()
