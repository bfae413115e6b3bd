"""The frontend process: loads what it needs of the model, joins the core, serves HTTP, ends.

Owns the order of start and end and nothing of a request. On SIGTERM it is ready no more, lets
running requests finish for as long as --shutdown-timeout says, ends the rest with an error that
says so, and exits 0. SIGINT, which only the supervisor can send, skips the wait.
"""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Coroutine
from typing import Any

import anyio
import structlog
import zmq

from cearx.core.child import StartupError, SupervisorLink, read_launch
from cearx.core.config import FrontendLaunch
from cearx.frontend.app import build_app
from cearx.frontend.chat_template import load_chat_template
from cearx.frontend.engine_client import EngineClient
from cearx.frontend.errors import ApiError
from cearx.frontend.generation_defaults import load_generation_defaults
from cearx.frontend.grammar_checker import GrammarChecker
from cearx.frontend.http_server import serve_http
from cearx.frontend.pair_template import load_pair_template
from cearx.frontend.parser_choice import choose_tool_parser, has_reasoning
from cearx.frontend.prompt_work import PromptWork
from cearx.frontend.request_fields import RequestParser
from cearx.frontend.server_state import ServerState
from cearx.frontend.tokenizer import load_tokenizer

PROMPT_THREADS = 2
END_WITHIN_S = 3.0
"""From SIGTERM to the end, whatever the connections do; longer than `http_server.GRACEFUL_S`."""

DRAIN_LOOK_S = 0.05

log = structlog.get_logger()


def main() -> int:
    launch = read_launch(FrontendLaunch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    supervisor = SupervisorLink(context, launch, f"frontend-{launch.frontend_index}")
    try:
        _run(_serve(launch, context, supervisor))
    except StartupError as error:
        supervisor.failed(str(error))
        return 1
    finally:
        context.destroy(linger=500)
    return 0


def _run(main_coroutine: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it exists."""
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        loop_factory = None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main_coroutine)


async def _serve(
    launch: FrontendLaunch, context: zmq.Context[zmq.Socket[bytes]], supervisor: SupervisorLink
) -> None:
    end_requested, ends_now = anyio.Event(), anyio.Event()

    def end_now() -> None:
        end_requested.set()
        ends_now.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end_requested.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, end_now)
    client = EngineClient(context, launch.runtime_dir, launch.boot_id, launch.frontend_index)
    try:
        supervisor.progress("loading tokenizer")
        state = await anyio.to_thread.run_sync(_load, launch, client)
        supervisor.progress("waiting for the engine")
        await _wait_ready(client, end_requested)
        if not end_requested.is_set():
            await _serve_until(end_requested, ends_now, launch, state, supervisor)
    finally:
        client.close()


def _load(launch: FrontendLaunch, client: EngineClient) -> ServerState:
    """Raises StartupError."""
    config, files = launch.config, launch.model
    tokenizer = load_tokenizer(files)
    defaults = load_generation_defaults(files)
    template = load_chat_template(files, tokenizer, config.chat_template)
    try:
        make_tool_parser = choose_tool_parser(config.tool_call_parser, template)
    except ValueError as error:
        raise StartupError(str(error)) from error
    ends = {*tokenizer.eos_token_ids, *defaults.eos_token_ids}
    model_name = config.served_model_name or files.name
    return ServerState(
        config=config,
        model_name=model_name,
        model_root=files.name,
        created=int(time.time()),
        client=client,
        tokenizer=tokenizer,
        chat_template=template,
        make_tool_parser=make_tool_parser,
        task=files.task,
        pair_template=load_pair_template(files.path, tokenizer) if files.task == "score" else None,
        splits_reasoning=has_reasoning(config.reasoning_parser, template),
        defaults=defaults,
        eos_token_ids=tuple(sorted(ends)),
        hash_secret=launch.hash_secret,
        parser=RequestParser(
            config.strict_params, default_model=None if config.require_model else model_name
        ),
        grammars=GrammarChecker(client, tokenizer, tuple(sorted(ends))),
        prompt_work=PromptWork(PROMPT_THREADS),
        api_key_digests=launch.api_key_digests,
    )


async def _wait_ready(client: EngineClient, end_requested: anyio.Event) -> None:
    async def stop_waiting(scope: anyio.CancelScope) -> None:
        await end_requested.wait()
        scope.cancel()

    failure: ApiError | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(stop_waiting, group.cancel_scope)
        try:
            await client.status.wait_ready()
        except ApiError as error:
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise StartupError(failure.error.message)


async def _serve_until(
    end_requested: anyio.Event,
    ends_now: anyio.Event,
    launch: FrontendLaunch,
    state: ServerState,
    supervisor: SupervisorLink,
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_note_broken_connection)

    async def run_until_end() -> None:
        # What lives until here lives as long as the process: the collector need not visit it.
        gc.collect()
        gc.freeze()
        supervisor.ready()
        if state.task == "generate":
            await state.grammars.prepare()
        await end_requested.wait()
        log.info("ending", running=state.client.requests.num_outstanding)
        await _drain(state.client, launch.config.shutdown_timeout, ends_now)
        state.client.shut_down()
        loop.call_later(END_WITHIN_S, _end_now)
        await state.grammars.close()

    await serve_http(build_app(state), launch.listen_fd, launch.config, run_until_end)


async def _drain(client: EngineClient, timeout_s: int, ends_now: anyio.Event) -> None:
    """Until every request has ended, the time is over, or somebody has no time."""
    client.status.drain()
    with anyio.move_on_after(timeout_s):
        while client.is_busy and not ends_now.is_set():
            await anyio.sleep(DRAIN_LOOK_S)


def _note_broken_connection(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """One line for a connection that broke while it was served; the rest as asyncio does it.

    hypercorn lets some operating system errors of a connection escape, and a client can cause them.
    """
    error = context.get("exception")
    if isinstance(error, asyncio.CancelledError):
        return  # one that outlived the end of the server
    is_broken = isinstance(error, OSError)
    if isinstance(error, BaseExceptionGroup):
        is_broken = error.split(OSError)[1] is None
    if is_broken:
        log.debug("connection broke", reason=str(error))
    else:
        loop.default_exception_handler(context)


def _end_now() -> None:
    """For clients that do not read: closing their connections waits for them, so nobody closes."""
    log.warning("connections did not end in time", after_s=END_WITHIN_S)
    os._exit(0)
