"""Synthetic load: a JSON-lines file of requests, or so many of one size.

Owns the file format and its checks. A line is one request:

    {"prompt": 256, "output": 1024, "at_us": 0, "max_tokens": 2048, "prefix": "a", "shared": 128}

`output` is its real length, `max_tokens` what it asks for (default: the same, so that it ends by
length). Requests with the same `prefix` begin with the same `shared` tokens.
"""

import random
from collections.abc import Iterable
from typing import Annotated

import msgspec

from cearx.core.config import SchedulerConfig
from cearx.core.events import FinishReason
from cearx.core.identifiers import BlockHash, RequestId
from cearx.replay.oracle import SimulatedRequest, made_up_hash
from cearx.replay.simulation import Arrival

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class WorkloadLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a workload file."""

    prompt: Positive
    output: Positive
    at_us: Count = 0
    max_tokens: Positive | None = None
    prefix: str = ""
    shared: Count = 0


class WorkloadError(Exception):
    """The message names the line and what is wrong with it."""


def read_workload(lines: Iterable[str]) -> list[WorkloadLine]:
    """Raises WorkloadError; blank lines are passed over."""
    decoder = msgspec.json.Decoder(WorkloadLine)
    found: list[WorkloadLine] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise WorkloadError(f"line {number}: {error}") from None
        if line.max_tokens is not None and line.max_tokens < line.output:
            raise WorkloadError(
                f"line {number}: output {line.output} is over max_tokens {line.max_tokens}"
            )
        if line.shared > line.prompt:
            raise WorkloadError(f"line {number}: shared {line.shared} is over prompt {line.prompt}")
        found.append(line)
    if not found:
        raise WorkloadError("no request in the workload")
    return sorted(found, key=lambda line: line.at_us)


def uniform(
    num_requests: int, prompt: int, output: int, shared: int, rate: float | None, seed: int
) -> list[WorkloadLine]:
    """Requests of one size, all at once or as a Poisson process of `rate` requests a second."""
    draw = random.Random(seed)
    at_s = 0.0
    lines: list[WorkloadLine] = []
    for _ in range(num_requests):
        lines.append(
            WorkloadLine(prompt=prompt, output=output, at_us=round(at_s * 1e6), shared=shared)
        )
        if rate is not None:
            at_s += draw.expovariate(rate)
    return lines


def arrivals_of(
    lines: Iterable[WorkloadLine], config: SchedulerConfig, concurrency: int | None
) -> list[Arrival]:
    """By the clock, or with `concurrency` of them in flight all the time."""
    arrivals: list[Arrival] = []
    for index, line in enumerate(lines):
        request = _request(RequestId(index), line, config)
        if concurrency is None:
            arrivals.append(Arrival(request=request, delay_us=line.at_us))
        else:
            num_ended = max(0, index + 1 - concurrency)
            arrivals.append(Arrival(request=request, num_ended=num_ended, delay_us=0))
    return arrivals


def _request(
    request_id: RequestId, line: WorkloadLine, config: SchedulerConfig
) -> SimulatedRequest:
    hashes: list[BlockHash] = []
    if config.enable_prefix_caching:
        for index in range(line.prompt // config.block_size):
            is_shared = (index + 1) * config.block_size <= line.shared
            name = f"prefix {line.prefix}" if is_shared else f"request {request_id}"
            hashes.append(made_up_hash(name, index))
    max_tokens = line.output if line.max_tokens is None else line.max_tokens
    ends_itself = line.output < max_tokens
    return SimulatedRequest(
        request_id=request_id,
        arrived_us=line.at_us,
        num_prompt_tokens=line.prompt,
        max_tokens=max_tokens,
        num_outputs=line.output,
        finish=FinishReason.STOP if ends_itself else FinishReason.LENGTH,
        block_hashes=tuple(hashes),
    )
