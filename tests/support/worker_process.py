"""A real worker process with this process in the places of supervisor and core."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import zmq

from cearx.core.block_hash import root_hash
from cearx.core.child import encode_launch, endpoint
from cearx.core.config import ModelFiles, SchedulerConfig, WorkerConfig, WorkerLaunch
from cearx.core.engine import Engine
from cearx.core.event_log import NullLog
from cearx.core.events import StepPlan
from cearx.core.identifiers import RequestId, RequestKey, StepId
from cearx.core.link import Channel, DealerLink, configure
from cearx.core.messages import (
    ChildToSupervisor,
    CoreToWorker,
    ExecuteStep,
    ProcessFailed,
    ProcessReady,
    Progress,
    SamplingParams,
    StepResult,
    Submit,
    WorkerReady,
    WorkerToCore,
    pack_tokens,
)
from cearx.core.router_links import RouterLinks

BOOT_ID = 2**63 + 5
SECRET = bytes(32)
TIMEOUT_S = 30


class WorkerProcess:
    """Starts `python -m cearx.worker`; use as a context manager."""

    def __init__(
        self, model: Path, max_num_seqs: int = 16, max_num_batched_tokens: int = 256, **flags: Any
    ) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="cearx-test-")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        runtime_dir = Path(self.directory.name)
        self.reports: RouterLinks[object, ChildToSupervisor] = RouterLinks(
            self.context,
            endpoint(runtime_dir, "supervisor"),
            BOOT_ID,
            ["worker"],
            ChildToSupervisor,
        )
        socket = self.context.socket(zmq.DEALER)
        configure(socket)
        socket.bind(endpoint(runtime_dir, "worker"))
        self.link: DealerLink[CoreToWorker, WorkerToCore] = DealerLink(
            socket, Channel(BOOT_ID, 0, WorkerToCore)
        )
        self.spec = WorkerLaunch(
            boot_id=BOOT_ID,
            runtime_dir=runtime_dir,
            log_level="info",
            config=WorkerConfig(**{"num_threads": 1, **flags}),
            model=ModelFiles(path=model, name="tiny"),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cearx.worker"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(encode_launch(self.spec))
        self.process.stdin.flush()
        self.progress: list[str] = []
        self.ready: WorkerReady | None = None
        """What it told the core; taken in before the first step."""
        self.num_preemptions = 0

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.context.destroy(linger=0)
        self.directory.cleanup()

    def report(self) -> ProcessReady | ProcessFailed:
        """The first report that is no progress."""
        give_up = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up:
            if received := self.reports.receive():
                if not isinstance(received[1], Progress):
                    return received[1]
                self.progress.append(received[1].stage)
            elif self.process.poll() is None:
                self.reports.socket.poll(200)
            elif not self.reports.socket.poll(200):
                break
        raise AssertionError(f"no report, exit code {self.process.poll()}")

    def receive(self) -> WorkerReady | StepResult:
        """The worker's next message to the core."""
        give_up = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up and self.process.poll() is None:
            message = self.link.receive()
            if message is not None:
                return message
            self.link.flush()
            self.link.socket.poll(50)
        raise AssertionError(f"no message, exit code {self.process.poll()}")

    def execute(self, step: ExecuteStep) -> StepResult:
        """One step there and back."""
        self.link.send(step)
        result = self.receive()
        assert isinstance(result, StepResult)
        return result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        max_tokens: int,
        budget: int | None = None,
    ) -> list[list[int]]:
        """Serves the requests under the real scheduler; `budget` cuts prompts into chunks."""
        engine = self._engine(budget or self.spec.max_num_batched_tokens)
        tokens: list[list[int]] = [[] for _ in prompts]
        for key, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            refused = engine.submit(
                0,
                Submit(
                    request_key=RequestKey(key),
                    token_ids=pack_tokens(list(prompt)),
                    block_hashes=(),
                    cache_root=root_hash(SECRET, None),
                    max_tokens=max_tokens,
                    sampling=sampling,
                ),
                0,
            )
            assert refused is None, refused
        num_in_flight = 0
        while engine.wants_step or num_in_flight:
            while engine.wants_step:
                step = engine.next_step()
                if step is not None:
                    self.num_preemptions += len(step.plan.preempted)
                    self.link.send(step)
                    num_in_flight += 1
            result = self.receive()
            assert isinstance(result, StepResult)
            num_in_flight -= 1
            for outputs in engine.finish_step(result).values():
                for output in outputs:
                    tokens[output.request_key].extend(output.token_ids)
        # The next engine numbers its requests from 0 again, so the worker forgets these.
        self.execute(step_without_rows(ended=range(len(prompts))))
        return tokens

    def _engine(self, budget: int) -> Engine:
        if self.ready is None:
            message = self.receive()
            assert isinstance(message, WorkerReady)
            self.ready = message
        config = SchedulerConfig(
            block_size=self.ready.block_size,
            num_blocks=self.ready.num_blocks,
            max_model_len=self.ready.max_model_len,
            max_num_seqs=min(self.spec.max_num_seqs, budget),
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            pipeline_depth=2,
            admission="greedy",
        )
        return Engine(config, SECRET, NullLog())

    def close_stdin(self) -> None:
        """What a supervisor's death does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None

    def end(self) -> tuple[int, str]:
        """Waits for the end; exit code and what stood on stderr."""
        code = self.process.wait(TIMEOUT_S)  # with standard input open: its end is a message
        assert self.process.stderr is not None
        return code, self.process.stderr.read().decode()


def step_without_rows(ended: Iterable[int] = ()) -> ExecuteStep:
    """A step that only tells who has ended."""
    plan = StepPlan(
        step_id=StepId(0), decodes=(), chunks=(), granted=(), admitted=(), preempted=(), waits=()
    )
    return ExecuteStep(plan=plan, new_requests=(), ended=tuple(map(RequestId, ended)))
