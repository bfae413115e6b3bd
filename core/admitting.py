"""The newcomers of a step: who waits gets a seat and blocks, in order, or a reason why not.

A few may pass those who wait for blocks, each a few times only. The policy of `admission.py` is
asked; what it decides on is gathered here. One instance plans one step; called by `planner.py`.
"""

from cearx.core.admission import Policy, Runner, Situation
from cearx.core.books import Books, blocks_needed
from cearx.core.chunk_planning import add_chunk
from cearx.core.events import Admission, WaitReason
from cearx.core.identifiers import BlockId
from cearx.core.output_lengths import expected_length
from cearx.core.request import Request
from cearx.core.step_draft import StepDraft

LOOK_AHEAD = 8
"""Waiting requests that are considered behind the head of the queue, in one step."""
FOR_BLOCKS = (WaitReason.NO_BLOCKS, WaitReason.ADMISSION)


class Newcomers:
    """See the module docstring."""

    def __init__(self, books: Books, draft: StepDraft, policy: Policy) -> None:
        self._books = books
        self._config = books.config
        self._draft = draft
        self._policy = policy
        self._expected: list[int] | None = None
        """`OutputLengths.expected`, once somebody asked."""

    def plan(self) -> None:
        """Admits in order; a few may pass those who wait for blocks, each a few times only."""
        books = self._books
        if not books.waiting:
            return
        head = next(iter(books.waiting))
        refusal = self._refusal_of_step()
        if refusal is None and books.blocked is not None and books.blocked[0] == head.request_id:
            refusal = WaitReason(books.blocked[1])
        if refusal is None:
            self._admit_in_order()
        else:
            self._draft.wait(head, refusal)

    def _admit_in_order(self) -> None:
        books = self._books
        situation = self._situation()
        passed: list[Request] = []
        has_overtaken = False
        num_seats = self._config.max_num_seqs - len(books.running)
        for request in books.waiting.first(num_seats + LOOK_AHEAD):
            reason = self._refusal_of_step()
            if reason is None:
                reason = self._try(request, situation)
            if reason is None:
                for other in passed:
                    other.num_overtaken += 1
                    has_overtaken = True
                if any(not self._may_pass(other) for other in passed):
                    break
                continue
            self._draft.wait(request, reason)
            passed.append(request)
            if reason not in FOR_BLOCKS or not self._may_pass(request) or len(passed) > LOOK_AHEAD:
                break
        if passed and not has_overtaken:
            waits = self._draft.waits[-len(passed) :]
            if all(wait.reason in FOR_BLOCKS for wait in waits):
                self._draft.blocked = waits[0].request_id, int(waits[0].reason)

    def _may_pass(self, request: Request) -> bool:
        return not request.is_entitled and request.num_overtaken < self._config.max_overtakes

    def _refusal_of_step(self) -> WaitReason | None:
        """Why nobody more is let in, whoever it is."""
        if self._draft.is_short_of_blocks:
            return WaitReason.AFTER_PREEMPTION
        if len(self._books.running) == self._config.max_num_seqs:
            return WaitReason.NO_SEAT
        return None if self._draft.budget else WaitReason.NO_BUDGET

    def _try(self, request: Request, situation: Situation) -> WaitReason | None:
        """Admits it, or tells why not."""
        if request.request_id in self._draft.preempted:
            return WaitReason.AFTER_PREEMPTION
        if request.num_pending:
            return WaitReason.IN_FLIGHT
        hits, need, num_free = blocks_needed(self._books, request)
        if need > num_free:
            return WaitReason.NO_BLOCKS
        situation.num_free = num_free
        situation.num_to_come = self._books.num_to_come
        runner = self._runner(request, need, len(hits))
        is_asked = bool(self._books.running) and not request.is_entitled
        if is_asked and not self._policy(situation, runner):
            return WaitReason.ADMISSION
        if self._has_too_many_partial(request, len(hits)):
            return WaitReason.PARTIAL_PREFILLS
        self._admit(request, hits, need)
        if situation.found is not None:
            situation.found.append(runner)
        return None

    def _has_too_many_partial(self, request: Request, num_hits: int) -> bool:
        limit = self._config.max_num_partial_prefills
        rest = request.num_promised - num_hits * self._config.block_size
        most = min(
            self._draft.budget, self._config.long_prefill_token_threshold or self._draft.budget
        )
        return bool(limit) and rest > most and self._draft.num_partial >= limit

    def _admit(self, request: Request, hits: list[BlockId], need: int) -> None:
        """Takes the blocks of all known tokens at once: a prefill never stalls half way."""
        books = self._books
        num_cached = len(hits) * self._config.block_size
        num_recomputed = max(min(request.num_lost, request.num_promised) - num_cached, 0)
        if not request.num_admitted_tokens:
            books.totals.num_lookup_tokens += request.num_promised
            books.totals.num_hit_tokens += num_cached
        books.totals.num_recomputed_tokens += num_recomputed
        block_ids = books.admit(request, hits, need)
        request.is_entitled = False
        request.num_overtaken = 0
        self._draft.admitted.append(
            Admission(
                request_id=request.request_id,
                num_cached_tokens=num_cached,
                num_recomputed_tokens=num_recomputed,
            )
        )
        self._draft.grant(request, block_ids)
        add_chunk(books, self._draft, request)

    def _situation(self) -> Situation:
        """Who runs, for the policy."""
        books = self._books
        return Situation(
            num_blocks=self._config.num_blocks,
            block_size=self._config.block_size,
            num_free=books.pool.num_free,
            num_to_come=books.num_to_come,
            margin_blocks=books.margin_blocks,
            find_runners=self._runners,
        )

    def _runners(self) -> list[Runner]:
        return [
            self._runner(r, len(r.block_ids) - r.num_shared, r.num_shared)
            for r in self._books.running.values()
        ]

    def _runner(self, request: Request, num_blocks: int, num_shared: int) -> Runner:
        num_tokens = self._books.steps.num_promised(request)
        max_tokens = num_output_tokens = request.max_tokens
        if not request.has_exact_length:
            num_outputs = num_tokens - request.num_prompt_tokens
            if self._expected is None:
                self._expected = self._books.lengths.expected()
            num_output_tokens = expected_length(self._expected, num_outputs, max_tokens)
        return Runner(
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=num_tokens,
            max_length=request.num_prompt_tokens + max_tokens,
            expected_length=request.num_prompt_tokens + num_output_tokens,
            num_blocks=num_blocks,
            num_shared=num_shared,
        )
