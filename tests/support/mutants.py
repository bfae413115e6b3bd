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

MODULES = (  # in an order in which each imports only what stands before it
    "prefix_index",
    "block_pool",
    "request",
    "waiting_queue",
    "decode_batch",
    "fences",
    "output_lengths",
    "prefill_pace",
    "forecast",
    "admission",
    "preemption",
    "step_books",
    "books",
    "settling",
    "step_draft",
    "making_way",
    "decode_planning",
    "chunk_planning",
    "admitting",
    "planner",
    "refusals",
    "scheduler_state",
    "scheduler",
)


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
    prefix = f"mutant_{mutation.name}_"
    for module in MODULES:
        text = source(module)
        if module == mutation.module:
            count = text.count(mutation.text)
            assert count == 1, f"{mutation.name}: {mutation.text!r} stands {count} times"
            text = text.replace(mutation.text, mutation.replacement)
        name = f"{prefix}{module}"
        for copied in MODULES:
            text = text.replace(f"from cearx.core.{copied} import", f"from {prefix}{copied} import")
        made[module] = sys.modules[name] = ModuleType(name)
        exec(compile(text, name, "exec"), made[module].__dict__)
    scheduler: type[Scheduler] = made["scheduler"].Scheduler
    return scheduler


MUTATIONS = [
    Mutation(
        "shares_a_step_too_early",
        "settling",
        "            books.publish(request)\n    outcomes",
        "            request.num_unsettled -= books.config.block_size\n"
        "            books.publish(request)\n"
        "            request.num_unsettled += books.config.block_size\n"
        "    outcomes",
    ),
    Mutation(
        "shares_at_admission",
        "books",
        "        return hits + self.grant(request, count)\n",
        "        block_ids = hits + self.grant(request, count)\n"
        "        for index in range(len(hits), len(request.block_hashes)):\n"
        "            self.pool.publish(request.block_ids[index], request.block_hashes[index])\n"
        "        return block_ids\n",
    ),
    Mutation(
        "shares_rows_in_flight",
        "step_books",
        "        return self.batch.num_scheduled(request) - rows - request.num_unsettled\n",
        "        return self.batch.num_scheduled(request)\n",
    ),
    Mutation(
        "budget_off_by_one",
        "chunk_planning",
        "num_tokens = min(draft.budget, rest,",
        "num_tokens = min(draft.budget + 1, rest,",
    ),
    Mutation(
        "decodes_are_free",
        "decode_planning",
        "    draft.budget -= len(draft.decodes)",
        "    draft.budget -= 0",
    ),
    Mutation(
        "one_seat_too_many",
        "admitting",
        "if len(self._books.running) == self._config.max_num_seqs:",
        "if len(self._books.running) == self._config.max_num_seqs + 1:",
    ),
    Mutation(
        "last_in_first_out",
        "waiting_queue",
        "for _, request_id in self._orders[:count]]",
        "for _, request_id in self._orders[::-1][:count]]",
    ),
    Mutation(
        "preempts_the_first",
        "preemption",
        "if request.order <= after or",
        "if request.order > after or",
    ),
    Mutation(
        "preempts_for_nothing",
        "decode_planning",
        "        if num_coming > len(draft.waits):",
        "        if num_coming > len(draft.waits) + 1:",
    ),
    Mutation(
        "waits_for_too_little",
        "decode_planning",
        "        if num_coming > len(draft.waits):",
        "        if num_coming >= len(draft.waits) > 0:",
    ),
    Mutation(
        "admits_after_a_preemption",
        "admitting",
        "        if self._draft.is_short_of_blocks:\n",
        "        if False:\n",
    ),
    Mutation(
        "forgets_a_holder_on_a_hit",
        "block_pool",
        "                del cached[block]\n            counts[block] += 1",
        "                del cached[block]\n                counts[block] += 1",
    ),
    Mutation(
        "hit_counts_the_last_token",
        "books",
        "limit = (request.num_promised - 1) // books.config.block_size",
        "limit = request.num_promised // books.config.block_size",
    ),
    Mutation(
        "one_row_too_many",
        "decode_planning",
        "    if length == request.final_length:",
        "    if length == request.final_length + 1:",
    ),
    Mutation(
        "due_too_late",
        "decode_batch",
        "len(request.block_ids) * block_size + 1, request",
        "len(request.block_ids) * block_size + 2, request",
    ),
    Mutation(
        "fence_opens_too_early",
        "fences",
        "fence for fence in self._fences if fence.last_step > finished]",
        "fence for fence in self._fences if fence.last_step > finished + 1]",
    ),
    Mutation(
        "frees_under_a_running_step",
        "books",
        "            self.fences.add(last_step, request.block_ids)\n",
        "            self.pool.release(request.block_ids)\n",
    ),
    Mutation(
        "fence_misses_the_batch",
        "step_books",
        "            request.last_step = step.step_id\n",
        "            pass\n",
    ),
    Mutation(
        "cancel_keeps_the_blocks",
        "books",
        "            self._take_blocks(request)\n        del self.requests",
        "            pass\n        del self.requests",
    ),
    Mutation(
        "shares_what_failed",
        "settling",
        "        request.publishes = False\n    if reason",
        "        pass\n    if reason",
        breaks_invariant=False,
    ),
    Mutation(
        "keeps_the_hash_of_an_evicted_block",
        "prefix_index",
        "            del self._by_hash[evicted]\n",
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
        "settling",
        "                request.block_hashes.append(sealed.block_hash)",
        "                pass",
        breaks_invariant=False,
    ),
    Mutation(
        "reset_forgets_nothing",
        "scheduler",
        "        num_freed = pool.forget_contents()\n",
        "        num_freed = len(pool.snapshot().cached)\n",
        breaks_invariant=False,
    ),
    Mutation(
        "reset_leaves_the_running_alone",
        "scheduler",
        "            request.publishes = False\n",
        "            pass\n",
        breaks_invariant=False,
    ),
    Mutation(
        "a_preempted_token_is_lost",
        "settling",
        "            request.num_tokens += not has_failed\n",
        "            request.num_tokens += not has_failed and request.admitted_step is not None\n",
    ),
    Mutation(
        "a_token_counts_twice",
        "step_books",
        "        request.num_tokens = request.num_scheduled + 1 - request.num_pending\n",
        "        request.num_tokens = request.num_scheduled + 1\n",
    ),
    Mutation(
        "resumes_with_a_token_in_flight",
        "admitting",
        "        if request.num_pending:\n            return WaitReason.IN_FLIGHT\n",
        "",
        breaks_invariant=False,
    ),
    Mutation(
        "overtakes_without_end",
        "admitting",
        "request.num_overtaken < self._config.max_overtakes",
        "True",
    ),
    Mutation(
        "never_counts_an_overtaking",
        "admitting",
        "other.num_overtaken += 1",
        "pass",
    ),
    Mutation(
        "ignores_priorities",
        "request",
        "        return self.priority, self.request_id",
        "        return 0, self.request_id",
    ),
    Mutation(
        "deadline_passes_by",
        "scheduler",
        "deadline_us <= now_us:",
        "deadline_us < now_us:",
    ),
    Mutation(
        "queue_has_no_end",
        "refusals",
        "    elif 0 < config.max_num_queued_reqs <= num_queued:",
        "    elif 0 < config.max_num_queued_reqs < num_queued:",
    ),
    Mutation(
        "no_cap_on_a_prompt",
        "chunk_planning",
        "books.config.long_prefill_token_threshold or rest)",
        "rest)",
    ),
    Mutation(
        "margin_never_falls",
        "settling",
        "        books.margin_blocks -= min(",
        "        books.margin_blocks -= 0 * min(",
        breaks_invariant=False,
    ),
    Mutation(
        "forecast_forgets_the_candidate",
        "admission",
        "    everyone = [*situation.runners, candidate]\n",
        "    everyone = [*situation.runners]\n",
        breaks_invariant=False,
    ),
    Mutation(
        "forecast_never_frees",
        "forecast",
        "        used = num_held - freed + max",
        "        used = num_held + max",
        breaks_invariant=False,
    ),
    Mutation(
        "recomputes_uncounted",
        "admitting",
        "num_recomputed = max(min(request.num_lost, request.num_promised) - num_cached, 0)",
        "num_recomputed = 0",
    ),
    Mutation(
        "pace_forgets_decodes",
        "prefill_pace",
        "(target_us - self.decode_us) * 1000",
        "target_us * 1000",
    ),
]
