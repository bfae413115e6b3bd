"""The engine client against a scripted core: order, window, refusals, cancels, loss, shutdown."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from fake_core import FakeCore, Reply, logprob_of
from frontend_server import BOOT_ID, ENGINE

from cearx.core.block_hash import root_hash
from cearx.core.events import CancelReason, RefusalReason
from cearx.core.identifiers import RequestKey
from cearx.core.messages import Output, Refused, SamplingParams, Submit, pack_tokens
from cearx.frontend import request_stream, request_window
from cearx.frontend.engine_client import EngineClient
from cearx.frontend.errors import ApiError
from cearx.frontend.request_window import EngineRequest

Scenario = Callable[[EngineClient, FakeCore], Awaitable[None]]


def request(*token_ids: int, max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        token_ids=pack_tokens(token_ids),
        block_hashes=(),
        cache_root=root_hash(b"s" * 32, None),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
    )


@asynccontextmanager
async def client_of(folder: Path) -> AsyncIterator[EngineClient]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = EngineClient(context, folder, BOOT_ID, 0)
    try:
        yield client
    finally:
        client.close()
        context.destroy(linger=0)


def play(scenario: Scenario) -> None:
    """Runs a scenario with a ready client and a core."""
    with tempfile.TemporaryDirectory() as name, FakeCore(Path(name), BOOT_ID, ENGINE) as core:

        async def run() -> None:
            async with client_of(Path(name)) as client:
                await asyncio.wait_for(client.status.wait_ready(), 10)
                await asyncio.wait_for(scenario(client, core), 10)

        asyncio.run(run())


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def drain(client: EngineClient, *requests: EngineRequest) -> list[tuple[int, Output]]:
    with client.submit(requests) as stream:
        return [pair async for batch in stream for pair in batch]


def test_outputs_find_their_requests() -> None:
    """Interleaved outputs of several streams arrive where they belong, in order, to the end."""

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        jobs = [drain(client, request(i, max_tokens=i + 1), request(i + 100)) for i in range(20)]
        for i, pairs in enumerate(await asyncio.gather(*jobs)):
            first = [t for index, output in pairs if index == 0 for t in output.token_ids]
            second = [t for index, output in pairs if index == 1 for t in output.token_ids]
            assert (first, second) == ([i] * (i + 1), [i + 100] * 4)
        assert (client.requests.num_outstanding, client.requests.num_waiting) == (0, 0)

    play(scenario)


@pytest.mark.parametrize("round_", range(15))
def test_every_start_becomes_ready(round_: int) -> None:
    """The hello reaches the core however connecting, reading and sending fall together."""

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        assert client.require_ready() == ENGINE

    play(scenario)


def test_the_core_may_come_later() -> None:
    """A frontend that is up first waits for the core and then for the engine."""

    async def run(folder: Path) -> None:
        async with client_of(folder) as client:
            with pytest.raises(ApiError, match="starting"):
                client.submit([request(1)])
            await asyncio.sleep(0.1)
            with FakeCore(folder, BOOT_ID, ENGINE):
                assert await asyncio.wait_for(client.status.wait_ready(), 10) == ENGINE

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(Path(name)))


def test_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more requests at the core than the window holds; the others follow in order."""
    monkeypatch.setattr(request_window, "MAX_OUTSTANDING", 5)

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        core.is_paused = True
        with client.submit([request(i) for i in range(12)]) as stream:
            await eventually(lambda: core.num_running == 5)
            assert (client.requests.num_outstanding, client.requests.num_waiting) == (5, 7)
            stream.cancel(1, CancelReason.DISCONNECT)  # at the core: its seat goes to the next
            stream.cancel(11, CancelReason.DISCONNECT)  # still here: the core never hears of it
            await eventually(lambda: len(core.submits) == 6)
            core.is_paused = False
            ended = [i async for batch in stream for i, o in batch if o.finish_reason is not None]
        assert sorted(ended) == [0, *range(2, 11)]
        assert [s.request_key for s in core.submits] == list(range(11))
        assert core.most_running == 5
        assert core.cancels == [(RequestKey(1), CancelReason.DISCONNECT)]

    play(scenario)


def test_the_window_is_1024() -> None:
    """As many as one frontend may have at the core."""
    assert request_window.MAX_OUTSTANDING == 1024


def test_a_refusal() -> None:
    """What the core refuses becomes a 400 with both sizes; the rest is taken back."""

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        def reply(submit: Submit) -> Reply | Refused:
            if submit.max_tokens < 100:
                return Reply(token_ids=[1] * 100_000)
            return Refused(
                request_key=submit.request_key,
                reason=RefusalReason.POOL_TOO_SMALL,
                num_tokens=987,
                limit_tokens=654,
            )

        core.reply = reply
        core.step_s = 0.001
        with pytest.raises(ApiError, match=r"987.*654") as caught:
            await drain(client, request(1), request(1, max_tokens=100))
        assert caught.value.status == 400
        await eventually(lambda: core.cancels == [(RequestKey(0), CancelReason.FRONTEND_ERROR)])
        assert client.requests.num_outstanding == 0

    play(scenario)


def test_leaving_cancels() -> None:
    """The end of the task that reads a stream is the end of its requests."""

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        core.is_paused = True
        task = asyncio.create_task(drain(client, request(1), request(2)))
        await eventually(lambda: core.num_running == 2)
        task.cancel()
        await eventually(lambda: core.num_running == 0)
        assert {reason for _, reason in core.cancels} == {CancelReason.DISCONNECT}

    play(scenario)


def test_a_reader_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gathers for it is bounded; then its request ends, and the others go on."""
    monkeypatch.setattr(request_stream, "MAX_GATHERED", 50)

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        core.reply = lambda submit: Reply(
            token_ids=[1] * 100_000, logprobs=[logprob_of(i, 1) for i in range(100_000)]
        )
        with client.submit([request(1)]) as stream:
            await eventually(lambda: bool(core.cancels))
            assert core.cancels == [(RequestKey(0), CancelReason.DISCONNECT)]
            with pytest.raises(ApiError, match="too slowly"):
                async for _ in stream:
                    pass
        core.reply = lambda submit: Reply(token_ids=[1, 2])
        assert len(await drain(client, request(1))) == 2

    play(scenario)


def test_the_core_is_lost() -> None:
    """Every stream ends with an error, and new requests get one at once."""

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        core.is_paused = True
        tasks = [asyncio.create_task(drain(client, request(i))) for i in range(3)]
        await eventually(lambda: core.num_running == 3)
        await asyncio.to_thread(core.die)
        for task in tasks:
            with pytest.raises(ApiError, match="gone") as caught:
                await task
            assert (caught.value.status, caught.value.error.code) == (503, "engine_lost")
        with pytest.raises(ApiError, match="gone"):
            client.submit([request(1)])

    play(scenario)


def test_the_core_is_lost_before_it_is_ready() -> None:
    """Waiting for readiness ends too."""

    async def run(folder: Path, core: FakeCore) -> None:
        core.answers_hello = False
        async with client_of(folder) as client:
            waiting = asyncio.create_task(client.status.wait_ready())
            await asyncio.sleep(0.2)
            await asyncio.to_thread(core.die)
            with pytest.raises(ApiError, match="gone"):
                await asyncio.wait_for(waiting, 5)

    with tempfile.TemporaryDirectory() as name, FakeCore(Path(name), BOOT_ID, ENGINE) as core:
        asyncio.run(run(Path(name), core))


def test_shutting_down() -> None:
    """Running and waiting requests end with an error; the core is told once for each of its own."""

    async def scenario(client: EngineClient, core: FakeCore) -> None:
        core.is_paused = True
        task = asyncio.create_task(drain(client, request(1), request(2)))
        await eventually(lambda: core.num_running == 2)
        client.shut_down()
        with pytest.raises(ApiError, match="shutting down"):
            await task
        await eventually(lambda: core.num_running == 0)
        assert core.cancels == [(RequestKey(k), CancelReason.SHUTDOWN) for k in (0, 1)]
        with pytest.raises(ApiError, match="shutting down"):
            client.submit([request(1)])

    play(scenario)
