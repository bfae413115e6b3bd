"""What every measuring verb needs: the server, the client processes, a seed, a place for rows.

Owns their making from the flags and that all is ended again. Called by `cli.py`.
"""

import argparse
import contextlib
import os
import platform
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from cearx.frontend.bench.display import Display
from cearx.frontend.bench.endpoint import Endpoint, Sampling, find_endpoint
from cearx.frontend.bench.fleet import Fleet, auto_num_clients, open_fleet
from cearx.frontend.bench.results import BenchRun, write_results

CONNECT_TIMEOUT_S = 5.0


def chosen_seed(options: argparse.Namespace) -> int:
    """A new one unless given: equal prompts would be in the server's prefix cache."""
    return random.SystemRandom().randrange(2**32) if options.seed is None else int(options.seed)


@contextlib.asynccontextmanager
async def open_session(
    options: argparse.Namespace, concurrency: int, *, ignores_eos: bool
) -> AsyncIterator[tuple[Endpoint, Fleet]]:
    """The endpoint, and clients enough for so many streams; raises BenchError."""
    sampling = Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        ignore_eos=ignores_eos or None,
    )
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = httpx.Timeout(options.request_timeout, connect=CONNECT_TIMEOUT_S)
    num_cores = len(os.sched_getaffinity(0))
    num_clients = options.num_clients or auto_num_clients(concurrency, num_cores)
    async with httpx.AsyncClient(
        base_url=options.base_url, headers=headers, timeout=timeout
    ) as http:
        endpoint = find_endpoint(
            http, options.endpoint, options.model, sampling, options.request_timeout
        )
        async with open_fleet(num_clients) as fleet:
            yield endpoint, fleet


class Recorder:
    """Keeps the rows of one run; the file is rewritten after each, so that none is lost."""

    def __init__(self, path: Path | None, run: BenchRun) -> None:
        self._path = path
        self._run = run

    def add(self, row: dict[str, Any]) -> None:
        self._run.points.append(row)
        if self._path is not None:
            write_results(self._path, [self._run])

    def tell(self, display: Display) -> None:
        if self._path is not None:
            display.note(f"{len(self._run.points)} rows in {self._path}")


def recorder(options: argparse.Namespace, endpoint: Endpoint, settings: dict[str, Any]) -> Recorder:
    """For the file that the flags name, if any; tries to write it before anything is measured."""
    path = options.output
    if path is None and options.verb == "serve" and options.save_result:
        path = Path(f"bench-serve-{time.strftime('%Y%m%d-%H%M%S')}.json")
    run = BenchRun(
        engine=options.label or endpoint.model,
        model=endpoint.model,
        kind=options.verb,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        settings={
            "endpoint": endpoint.kind,
            "stream_interval": options.stream_interval_label,
            "sampling": {
                name: value
                for name in ("temperature", "top_p", "top_k", "min_p")
                if (value := getattr(options, name)) is not None
            },
            "client_python": platform.python_version(),
            **settings,
        },
    )
    if path is not None:
        write_results(path, [run])
    return Recorder(path, run)
