"""`cearx serve`: starts the core, the worker and the frontends, watches them, ends them.

Owns signals, the listening socket, the runtime folder and what the person at the terminal sees.
Makes no request pass through itself. When a child ends that should not, all end, and the message
says which one and why; exit code 2 for what could never have started, 1 for a later fault.
"""

import os
import secrets
import signal
import socket
import time
from pathlib import Path

import msgspec
import zmq
from rich.console import Console
from rich.markup import escape

from cearx.core.api_keys import api_key_digests
from cearx.core.block_hash import SECRET_SIZE
from cearx.core.certificate import CannotUseCertificate, check_certificate
from cearx.core.child import configure_logging, endpoint, signal_fd
from cearx.core.children import KILL_AFTER_S, PROFILE_END_S, Child, end_all
from cearx.core.config import (
    CoreConfig,
    CoreLaunch,
    FrontendConfig,
    FrontendLaunch,
    Launch,
    ModelFiles,
    ServerConfig,
    Task,
    WorkerConfig,
    WorkerLaunch,
)
from cearx.core.listener import (
    CannotListen,
    allow_many_connections,
    close,
    listen,
    public_host,
    url,
)
from cearx.core.machine import available_cores
from cearx.core.messages import ChildToSupervisor, ProcessFailed, ProcessReady, Progress
from cearx.core.model_source import ModelNotFound, resolve
from cearx.core.model_task import with_task
from cearx.core.router_links import RouterLinks
from cearx.core.runtime_folder import RuntimeFolder
from cearx.core.standard_streams import secure_standard_streams
from cearx.core.startup_display import StartupDisplay
from cearx.core.trace_start import pin_after_crash

EXIT_FAULT = 1
EXIT_CANNOT_START = 2
CORES_PER_FRONTEND = 4
MAX_DEFAULT_FRONTENDS = 4
PURPOSES: dict[Task, str] = {"embed": "embeddings only", "score": "scores of texts only"}
END_FRONTENDS_WITHIN_S = 5.0
"""From the end of the time that running requests get."""


class ServeFlags(msgspec.Struct, frozen=True, kw_only=True):
    """All flags of `cearx serve`."""

    server: ServerConfig
    frontend: FrontendConfig
    core: CoreConfig
    worker: WorkerConfig


class CannotStart(Exception):
    """One clear line why the server does not come up."""


class ChildEnded(Exception):
    """A child ended by itself; the message says which and how."""


class EndRequested(Exception):
    """A signal asks for the end; SIGTERM lets running requests finish, the others do not."""

    def __init__(self, is_graceful: bool) -> None:
        super().__init__()
        self.is_graceful = is_graceful


def serve(model: str | None, flags: ServeFlags) -> int:
    """Serves until a signal ends it; answers the exit code."""
    secure_standard_streams()
    configure_logging(flags.server.log_level, flags.server.log_format)
    console = Console(stderr=True)
    start = time.monotonic()
    try:
        with StartupDisplay(console) as display:
            digests = api_key_digests(flags.server, os.environ)
            objection = check_certificate(flags.frontend)
            allow_many_connections()
            listener = listen(flags.server)
            try:
                files = _find_model(model, flags.server, display)
            except BaseException:
                close(listener, flags.server)
                raise
    except (CannotStart, CannotListen, CannotUseCertificate, ValueError) as error:
        return _report(console, error, EXIT_CANNOT_START)
    except KeyboardInterrupt:
        return EXIT_FAULT
    runtime = RuntimeFolder()
    supervisor = Supervisor(files, flags, listener, digests, runtime.path)
    try:
        with StartupDisplay(console) as display:
            details = supervisor.wait_until_ready(display)
        name = flags.frontend.served_model_name or files.name
        purpose = "" if files.task == "generate" else f" ({PURPOSES[files.task]})"
        _tell(console, details)
        if not digests and (host := public_host(listener)):
            console.print(
                f"[yellow]warning[/] whoever reaches {host} can use it: there are no API keys"
            )
        if objection is not None:
            console.print(f"[yellow]warning[/] clients will refuse the certificate: {objection}")
        scheme = "http" if flags.frontend.ssl_certfile is None else "https"
        console.print(
            f"[green]ready[/] {escape(name)} on {url(listener, scheme)}"
            f" after {time.monotonic() - start:.1f} s{purpose}",
            highlight=False,
            soft_wrap=True,
        )
        supervisor.watch()
        return 0
    except EndRequested:
        return 0
    except CannotStart as error:
        return _report(console, error, EXIT_CANNOT_START)
    except ChildEnded as error:
        code = _report(console, error, EXIT_FAULT)
        pinned = pin_after_crash(flags.core, supervisor.boot_id)
        if pinned is not None:
            console.print(pinned, highlight=False, soft_wrap=True)
        return code
    finally:
        supervisor.end()
        close(listener, flags.server)
        runtime.remove()


def _report(console: Console, error: Exception, code: int) -> int:
    console.print(f"[red]cearx:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    return code


def _find_model(model: str | None, config: ServerConfig, display: StartupDisplay) -> ModelFiles:
    try:
        files = resolve(model, lambda stage, done, total: display.show("model", stage, done, total))
        return with_task(files, None if config.task == "auto" else config.task)
    except ModelNotFound as error:
        raise CannotStart(str(error)) from error


def _tell(console: Console, details: dict[str, str]) -> None:
    for detail in filter(None, details.values()):
        console.print(detail, highlight=False, soft_wrap=True, markup=False)


class Supervisor:
    """The children of one run of the server."""

    def __init__(
        self,
        files: ModelFiles,
        flags: ServeFlags,
        listener: socket.socket,
        api_key_digests: tuple[bytes, ...],
        runtime_dir: Path,
    ) -> None:
        boot_id = self.boot_id = secrets.randbits(64)
        listen_fd = listener.fileno()
        self._startup_timeout_s = flags.server.startup_timeout
        self._shutdown_timeout_s = flags.frontend.shutdown_timeout
        self._may_profile = flags.worker.profiler_folder is not None
        self._launches = _launches(files, flags, boot_id, runtime_dir, listen_fd, api_key_digests)
        self._children: list[Child] = []
        self._is_ready = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports: RouterLinks[object, ChildToSupervisor] = RouterLinks(
            self._context,
            endpoint(runtime_dir, "supervisor"),
            boot_id,
            self._launches,
            ChildToSupervisor,
        )
        self._signal_fd = signal_fd(*_end_signals(), signal.SIGUSR1)
        self._poller = zmq.Poller()
        self._poller.register(self._reports.socket, zmq.POLLIN)
        self._poller.register(self._signal_fd, zmq.POLLIN)
        for name, (module, spec) in self._launches.items():
            child = Child(name, module, spec, (listen_fd,))
            self._children.append(child)
            self._poller.register(child.pid_fd, zmq.POLLIN)

    def wait_until_ready(self, display: StartupDisplay) -> dict[str, str]:
        """What each process says of itself, once all are ready; raises CannotStart if not."""
        details: dict[str, str] = {}
        give_up = time.monotonic() + self._startup_timeout_s
        while len(details) < len(self._children):
            left_ms = int((give_up - time.monotonic()) * 1000)
            if left_ms <= 0:
                slow = ", ".join(name for name in self._launches if name not in details)
                raise CannotStart(
                    f"not ready after {self._startup_timeout_s} s (--startup-timeout): {slow}"
                )
            ended = self._wait(left_ms)
            while (received := self._reports.receive()) is not None:
                name, report = received
                if isinstance(report, Progress):
                    display.show(name, report.stage, report.completed, report.total)
                elif isinstance(report, ProcessReady):
                    details[name] = report.detail
                    display.done(name)
                elif isinstance(report, ProcessFailed):
                    raise CannotStart(f"{name}: {report.reason}")
            if ended is not None:
                raise CannotStart(ended.describe_end())
        self._is_ready = True
        return details

    def watch(self) -> None:
        """Until a signal asks for the end and requests had their time; raises ChildEnded."""
        try:
            while True:
                ended = self._wait(None)
                while self._reports.receive() is not None:
                    pass  # reports after start-up change nothing
                if ended is not None:
                    raise ChildEnded(ended.describe_end())
        except EndRequested as end:
            if end.is_graceful:
                self._drain()

    def _wait(self, timeout_ms: int | None) -> Child | None:
        """Waits for a report, a signal (raises EndRequested) or a child's end (answered).

        SIGUSR1 goes on to the core, which pins the trace log.
        """
        events = dict(self._poller.poll(timeout_ms))
        if self._signal_fd in events:
            numbers = os.read(self._signal_fd, 4096)
            numbers_of_end = set(numbers) - {signal.SIGUSR1}
            if numbers_of_end:
                raise EndRequested(is_graceful=numbers_of_end == {signal.SIGTERM})
            for child in self._children:
                if child.name == "core" and self._is_ready:  # before that it would end by it
                    child.signal(signal.SIGUSR1)
        return next((child for child in self._children if child.pid_fd in events), None)

    def _drain(self) -> None:
        """Lets running requests finish, within their time; another signal cuts it short.

        Raises ChildEnded when one of those that are still needed ends, or a frontend by a fault.
        """
        if not self._shutdown_timeout_s:
            return
        frontends = [child for child in self._children if child.name.startswith("frontend-")]
        for child in frontends:
            child.signal(signal.SIGTERM)
        give_up = time.monotonic() + self._shutdown_timeout_s + END_FRONTENDS_WITHIN_S
        while any(child.is_running for child in frontends):
            left_ms = int((give_up - time.monotonic()) * 1000)
            if left_ms <= 0:
                return
            try:
                ended = self._wait(left_ms)
            except EndRequested:
                return
            if ended is not None:
                if ended not in frontends or ended.process.wait() != 0:
                    raise ChildEnded(ended.describe_end())
                self._poller.unregister(ended.pid_fd)

    def end(self) -> None:
        """Ends every child: those that accept requests first, the worker last."""
        names = {child.name: child for child in self._children}
        core, worker = names.pop("core"), names.pop("worker")
        frontends = list(names.values())
        if self._is_ready:  # before that SIGINT is not theirs to take
            for child in frontends:
                child.signal(signal.SIGINT)  # the time of running requests is over
        end_all([frontends, [core]])
        end_all([[worker]], PROFILE_END_S if self._may_profile else KILL_AFTER_S)
        self._context.destroy(linger=0)


def _launches(
    files: ModelFiles,
    flags: ServeFlags,
    boot_id: int,
    runtime_dir: Path,
    listen_fd: int,
    api_key_digests: tuple[bytes, ...],
) -> dict[str, tuple[str, Launch]]:
    """Each child's name, module and launch spec."""
    secret = secrets.token_bytes(SECRET_SIZE)
    frontends = num_frontends(flags.server, available_cores())
    log_level, log_format = flags.server.log_level, flags.server.log_format
    core = CoreLaunch(
        boot_id=boot_id,
        runtime_dir=runtime_dir,
        log_level=log_level,
        log_format=log_format,
        config=flags.core,
        frontends=frontends,
        generates=files.task == "generate",
        hash_secret=secret,
    )
    worker = WorkerLaunch(
        boot_id=boot_id,
        runtime_dir=runtime_dir,
        log_level=log_level,
        log_format=log_format,
        config=flags.worker,
        model=files,
        max_num_seqs=flags.core.max_num_seqs,
        max_num_batched_tokens=flags.core.max_num_batched_tokens,
    )
    launches: dict[str, tuple[str, Launch]] = {
        "core": ("cearx.core", core),
        "worker": ("cearx.worker", worker),
    }
    for index in range(frontends):
        frontend = FrontendLaunch(
            boot_id=boot_id,
            runtime_dir=runtime_dir,
            log_level=log_level,
            log_format=log_format,
            config=flags.frontend,
            model=files,
            frontend_index=index,
            hash_secret=secret,
            listen_fd=listen_fd,
            api_key_digests=api_key_digests,
        )
        launches[f"frontend-{index}"] = ("cearx.frontend", frontend)
    return launches


def num_frontends(config: ServerConfig, num_cores: int) -> int:
    """HTTP processes: as many as the person says, else what a burst needs and the machine has.

    A burst of requests waits for one process to read all of them; more than one costs the memory
    of another tokenizer, and on a small machine the model needs the cores.
    """
    if config.frontends is not None:
        return config.frontends
    return min(max(num_cores // CORES_PER_FRONTEND, 1), MAX_DEFAULT_FRONTENDS)


def _end_signals() -> list[signal.Signals]:
    """What asks for the end; under nohup the hang-up of the terminal does not."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_nohup else [signal.SIGHUP])]
