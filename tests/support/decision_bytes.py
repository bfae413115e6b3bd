"""Digests of what the scheduler decides in random runs: equal on every machine, or it is a fault.

Each part is a run of its own configuration with cancels, late results, failed rows, lost workers,
clock jumps, resets and hardly any blocks; its inputs are a function of the part's number and of the
decisions. Every step is checked as in the other simulations. Needs no more than the core does:

    PYTHONHASHSEED=1 python tests/support/decision_bytes.py --steps 1000000
    PYTHONHASHSEED=2 python3.13 tests/support/decision_bytes.py --steps 1000000
"""

import argparse
import hashlib
import platform
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))

from random_run import CONFIGS, RandomRun, random_config

from cearx.core.events import Decision, Event, FinishReason
from cearx.core.scheduler import Scheduler
from cearx.core.trace_format import RecordType
from cearx.core.trace_records import RecordEncoder

PART_STEPS = 400
SLICE_STEPS = 50_000
"""Steps to a printed line, so that a difference is easily found."""


class Digests:
    """Over inputs, over decisions, both as the trace log has them, and over snapshots."""

    def __init__(self) -> None:
        self.events = hashlib.sha256()
        self.decisions = hashlib.sha256()
        self.states = hashlib.sha256()

    def line(self) -> str:
        digests = (self.events, self.decisions, self.states)
        names = ("events", "decisions", "states")
        return " ".join(
            f"{name} {digest.hexdigest()}" for name, digest in zip(names, digests, strict=True)
        )


class DigestLog:
    """A log of one run that keeps nothing of it."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._encode = RecordEncoder()

    def append(self, record: Event | Decision) -> None:
        record_type, flags, payload = self._encode.encode(record)
        is_event = record_type < RecordType.STEP_PLAN
        digest = self._digests.events if is_event else self._digests.decisions
        digest.update(bytes([record_type, flags]) + len(payload).to_bytes(4, "little") + payload)

    def flush(self) -> None:
        """Nothing to do."""


class FaultyRun:
    """Parts one after the other, with their digests and counts of what happened."""

    def __init__(self, seed: int) -> None:
        self.digests = Digests()
        self.num_steps = 0
        self.counts = dict.fromkeys(
            ("preemptions", "recomputed", "cached", "lost workers", "restores"), 0
        )
        self.ends = dict.fromkeys(FinishReason, 0)
        self._seed = seed

    def run_part(self, part: int) -> None:
        """Some hundred steps with faults, then quiet until everyone has ended."""
        random = Random(self._seed * 1_000_003 + part)
        config = random_config(random) if part % 2 else CONFIGS[part // 2 % len(CONFIGS)]
        log = DigestLog(self.digests)
        run = RandomRun(config, random.getrandbits(64), Scheduler(config), log)
        engine = run.engine
        while engine.checker.num_steps < PART_STEPS:
            run.step()
            if random.random() < 0.004:
                self._lose_worker(run, random)
            if random.random() < 0.01:
                self.digests.states.update(engine.scheduler.snapshot())
            if random.random() < 0.002:
                engine.fork()
                self.counts["restores"] += 1
        self.digests.states.update(engine.scheduler.snapshot())
        engine.drain()
        self.num_steps += engine.checker.num_steps
        totals = engine.scheduler.books.totals
        self.counts["preemptions"] += totals.num_preemptions
        self.counts["recomputed"] += totals.num_recomputed_tokens
        self.counts["cached"] += totals.num_hit_tokens
        for reason in engine.ended.values():
            self.ends[reason] += 1

    def _lose_worker(self, run: RandomRun, random: Random) -> None:
        """The KV of all who run is gone: what was in flight fails, sooner or later the rest."""
        engine = run.engine
        gone = list(engine.scheduler.books.running)
        if random.random() < 0.5:
            for request_id in gone:
                engine.cancel(request_id)
        while engine.in_flight:
            engine.finish(failed=engine.sampling_rows())
        for request_id in gone:
            engine.cancel(request_id)
        self.counts["lost workers"] += 1

    def summary(self) -> str:
        ends = (f"{reason.name.lower()} {count}" for reason, count in self.ends.items())
        return ", ".join([*(f"{name} {n}" for name, n in self.counts.items()), *ends])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run, part, next_line = FaultyRun(arguments.seed), 0, SLICE_STEPS
    while run.num_steps < arguments.steps:
        run.run_part(part)
        part += 1
        if run.num_steps >= next_line:
            print(f"{run.num_steps} {run.digests.line()}", flush=True)
            next_line += SLICE_STEPS
    print(f"{run.num_steps} {run.digests.line()}")
    print(run.summary())
    print(f"Python {platform.python_version()}", file=sys.stderr)


if __name__ == "__main__":
    main()
