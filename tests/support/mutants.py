"""Schedulers with one planted mistake: source-patched copies of the pure scheduler.

A patch is (module, text, replacement); the text must stand exactly once in the module, so a
mutation that no longer applies is an error and not a silent pass.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cearx.core.scheduler import Scheduler

MODULES = ("block_pool", "scheduler")


@dataclass(frozen=True)
class Mutation:
    """One planted mistake."""

    name: str
    module: str
    text: str
    replacement: str
    breaks_invariant: bool = True
    """Whether it is wrong by any measure, and not just another policy."""


def source(module: str) -> str:
    spec = importlib.util.find_spec(f"cearx.core.{module}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def mutant(mutation: Mutation) -> type[Scheduler]:
    """The scheduler class with this mistake."""
    made: dict[str, ModuleType] = {}
    for module in MODULES:
        text = source(module)
        if module == mutation.module:
            count = text.count(mutation.text)
            assert count == 1, f"{mutation.name}: {mutation.text!r} stands {count} times"
            text = text.replace(mutation.text, mutation.replacement)
        name = f"mutant_{mutation.name}_{module}"
        text = text.replace("cearx.core.block_pool", f"mutant_{mutation.name}_block_pool")
        made[module] = sys.modules[name] = ModuleType(name)
        exec(compile(text, name, "exec"), made[module].__dict__)
    scheduler: type[Scheduler] = made["scheduler"].Scheduler
    return scheduler


MUTATIONS = [
    Mutation(
        "shares_a_step_too_early",
        "scheduler",
        "        plan = StepPlan(\n            step_id=self._next_step,",
        "        for chunk in step.chunks:\n"
        "            early = self._running[chunk.request_id]\n"
        "            full = (chunk.start + chunk.num_tokens) // self.config.block_size\n"
        "            for index in range(min(full, len(early.block_hashes))):\n"
        "                self.pool.publish(early.block_ids[index], early.block_hashes[index])\n"
        "        plan = StepPlan(\n            step_id=self._next_step,",
    ),
    Mutation(
        "shares_before_the_last_admission",
        "scheduler",
        "        step.add_chunk(request)\n\n    def _grant(",
        "        step.add_chunk(request)\n"
        "        for index in range(len(hits), len(request.block_hashes)):\n"
        "            self.pool.publish(request.block_ids[index], request.block_hashes[index])\n"
        "\n    def _grant(",
    ),
    Mutation(
        "budget_off_by_one",
        "scheduler",
        "num_tokens = min(self.budget, request.num_tokens - request.num_computed)",
        "num_tokens = min(self.budget + 1, request.num_tokens - request.num_computed)",
    ),
    Mutation(
        "decodes_are_free",
        "scheduler",
        "        step.budget -= len(step.decodes)",
        "        step.budget -= 0",
    ),
    Mutation(
        "one_seat_too_many",
        "scheduler",
        "if len(self._running) == self.config.max_num_seqs:",
        "if len(self._running) == self.config.max_num_seqs + 1:",
    ),
    Mutation(
        "last_in_first_out",
        "scheduler",
        "            request = next(iter(self._waiting.values()))\n",
        "            request = next(reversed(self._waiting.values()))\n",
    ),
    Mutation(
        "preempts_the_first",
        "scheduler",
        "request_id, request = self._running.popitem()",
        "request_id = next(iter(self._running))\n        request = self._running.pop(request_id)",
    ),
    Mutation(
        "preempted_goes_to_the_end",
        "scheduler",
        "        self._waiting.move_to_end(request_id, last=False)\n",
        "",
    ),
    Mutation(
        "admits_after_a_preemption",
        "scheduler",
        "            if step.preempted:\n",
        "            if False:\n",
        breaks_invariant=False,
    ),
    Mutation(
        "forgets_a_holder_on_a_hit",
        "block_pool",
        "            if self._ref_counts[block] == 0:\n"
        "                del self._cached[block]\n"
        "            self._ref_counts[block] += 1",
        "            if self._ref_counts[block] == 0:\n"
        "                del self._cached[block]\n"
        "                self._ref_counts[block] += 1",
    ),
    Mutation(
        "hit_counts_the_last_token",
        "scheduler",
        "limit = (request.num_tokens - 1) // self.config.block_size",
        "limit = request.num_tokens // self.config.block_size",
    ),
    Mutation(
        "one_token_too_many",
        "scheduler",
        "self._num_outputs(request) == request.max_tokens:",
        "self._num_outputs(request) == request.max_tokens + 1:",
    ),
    Mutation(
        "cancel_keeps_the_blocks",
        "scheduler",
        "        elif request.block_ids:\n            self._fenced.append(request)\n",
        "",
    ),
    Mutation(
        "cancel_frees_under_a_running_step",
        "scheduler",
        "        if self._in_flight is None:\n            self._release(request)\n",
        "        if True:\n            self._release(request)\n",
    ),
    Mutation(
        "shares_what_failed",
        "scheduler",
        "        if stopped is not FinishReason.FAILED:\n            self._publish(request)\n",
        "        self._publish(request)\n        if stopped is not FinishReason.FAILED:\n",
    ),
    Mutation(
        "keeps_the_hash_of_an_evicted_block",
        "block_pool",
        "                del self._by_hash[evicted]\n",
        "",
    ),
    Mutation(
        "evicts_the_newest",
        "block_pool",
        "self._cached.popitem(last=False)",
        "self._cached.popitem(last=True)",
        breaks_invariant=False,
    ),
    Mutation(
        "never_shares_outputs",
        "scheduler",
        "                request.block_hashes.append(sealed.block_hash)",
        "                pass",
        breaks_invariant=False,
    ),
    Mutation(
        "no_room_to_grow",
        "scheduler",
        "            if need + growing + grows > free:",
        "            if need > free:",
        breaks_invariant=False,
    ),
    Mutation(
        "holds_back_too_much",
        "scheduler",
        "            if need + growing + grows > free:",
        "            if need + growing + grows + 2 > free:",
    ),
]
