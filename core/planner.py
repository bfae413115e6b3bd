"""What the next step does: one budget of tokens, decodes first, then prefills, then newcomers.

Owns the decisions of a step and their reasons; the books change as they are taken. One instance
plans one step. Called by `scheduler.py`.
"""

from cearx.core.admission import Policy, Runner, Situation, pays
from cearx.core.books import Books
from cearx.core.events import (
    Admission,
    BlocksGranted,
    PrefillChunk,
    RequestWaits,
    StepPlan,
    WaitReason,
)
from cearx.core.identifiers import BlockId, RequestId
from cearx.core.output_lengths import expected_length
from cearx.core.preemption import choose_victim
from cearx.core.request import Request, RequestState

LOOK_AHEAD = 8
"""Waiting requests that are considered behind the head of the queue, in one step."""
MAX_PREEMPTIONS_FOR_HEAD = 4
"""In one step, for a more urgent request that waits."""


FOR_BLOCKS = (WaitReason.NO_BLOCKS, WaitReason.ADMISSION)


class Planner:
    """The step under construction."""

    def __init__(self, books: Books, policy: Policy) -> None:
        self._books = books
        self._config = books.config
        self._policy = policy
        self._budget = self._config.max_num_batched_tokens
        self._decodes: tuple[RequestId, ...] = ()
        self._chunks: list[PrefillChunk] = []
        self._granted: list[BlocksGranted] = []
        self._admitted: list[Admission] = []
        self._preempted: list[RequestId] = []
        self._waits: list[RequestWaits] = []
        self._finishing: list[Request] = []
        """Members of the batch whose last row this is."""
        self._is_short_of_blocks = False
        self._blocked: tuple[RequestId, int] | None = None
        """The head of the queue, if only a change of the books can help it."""
        self._expected: list[int] | None = None
        """`OutputLengths.expected`, once somebody asked."""
        self._num_partial = 0
        """Prompts that stay computed in part behind this step."""

    def plan(self) -> StepPlan | None:
        """The step, or None when nothing can be done before a step in flight is finished."""
        books = self._books
        if self._config.scheduling_policy == "priority":
            self._make_way_for_head()
        self._plan_decodes()
        self._limit_prefill()
        self._plan_chunks()
        self._plan_admissions()
        if not (self._decodes or self._chunks or self._preempted or self._is_short_of_blocks):
            return None  # nothing in the books has changed
        return StepPlan(
            step_id=books.next_step,
            decodes=self._decodes,
            chunks=tuple(self._chunks),
            granted=tuple(self._granted),
            admitted=tuple(self._admitted),
            preempted=tuple(self._preempted),
            waits=tuple(self._waits),
            margin_blocks=books.margin_blocks,
        )

    def close(self) -> None:
        """Brings the books behind the step, which is in flight now."""
        for request in self._finishing:
            self._books.leave_batch(request)
            self._books.set_state(request, RequestState.FINISHING)
        if self._blocked is not None:
            self._books.blocked = self._blocked

    # --- decodes -----------------------------------------------------------------------------

    def _plan_decodes(self) -> None:
        """Everyone in the batch gets a row; only who joins or is due is looked at."""
        books = self._books
        if not books.joining and not len(books.batch):
            return
        due_ids = dict.fromkeys(books.batch.tick())
        due = [books.running[i] for i in due_ids if self._is_due(i)]
        joining = list(books.joining.values())
        for request in joining:
            books.join_batch(request)
        for request in sorted(due + joining, key=_order):
            if request.state is RequestState.DECODING:  # else preempted for one before it
                self._plan_due_decode(request)
        self._decodes = books.batch.rows()
        self._budget -= len(self._decodes)  # the config holds max_num_seqs within the budget

    def _is_due(self, request_id: RequestId) -> bool:
        """An entry of the calendar may be of somebody who has left, or joined anew since."""
        request = self._books.running.get(request_id)
        return request is not None and request.state is RequestState.DECODING

    def _plan_due_decode(self, request: Request) -> None:
        books = self._books
        length = books.batch.num_scheduled(request)
        if length > len(request.block_ids) * self._config.block_size:
            if not self._find_block(request):
                return
            self._grant(request, books.grant(request, 1))
        if length == request.final_length:
            self._finishing.append(request)
        else:
            books.batch.set_due(request, self._config.block_size)

    def _find_block(self, request: Request) -> bool:
        """Whether a block is free for its row, after preemptions if need be; else it has left."""
        books = self._books
        while not books.pool.num_free:
            self._is_short_of_blocks = True
            num_coming = books.num_coming(self._finishing)
            if num_coming > len(self._waits):  # one for each that waits already
                # Its block is on its way: whoever is preempted now would be so for nothing.
                books.leave_batch(request, has_row=False)
                self._wait(request, WaitReason.NO_BLOCKS)
                return False
            victim = choose_victim(
                ((r, books.num_scheduled(r)) for r in books.running.values()),
                request.order,
                books.pool,
                self._config.block_size,
            )
            self._preempt(victim or request, has_row=False)
            if victim is None:
                return False
        return True

    # --- preemption --------------------------------------------------------------------------

    def _preempt(self, request: Request, *, has_row: bool) -> None:
        books = self._books
        num_new = books.num_scheduled(request) - (not has_row) - request.num_admitted_tokens
        if not pays(max(num_new, 0), request.num_admitted_tokens):
            more = 1 + self._config.num_blocks // 128
            books.margin_blocks = min(books.margin_blocks + more, self._config.num_blocks // 4)
        books.preempt(request, has_row=has_row)
        self._preempted.append(request.request_id)

    def _make_way_for_head(self) -> None:
        """Preempts less urgent requests when the head of the queue lacks a seat or blocks."""
        books = self._books
        head = next(iter(books.waiting), None)
        if head is None or head.num_pending:
            return
        for _ in range(MAX_PREEMPTIONS_FOR_HEAD):
            victims = [
                (r, books.num_scheduled(r))
                for r in books.running.values()
                if r.priority > head.priority and r.state is not RequestState.FINISHING
            ]
            if not victims:
                return
            lacks_seat = len(books.running) >= self._config.max_num_seqs
            _, need, num_free = self._need(head)
            if not lacks_seat and need <= num_free:
                return
            if need > num_free + books.num_coming(r for r, _ in victims):
                return  # it would not be enough
            if not lacks_seat and need <= num_free + books.num_coming():
                return  # on their way
            worst = max(r.priority for r, _ in victims)
            least_urgent = [(r, n) for r, n in victims if r.priority == worst]
            victim = choose_victim(least_urgent, head.order, books.pool, self._config.block_size)
            if victim is None:
                return
            self._preempt(victim, has_row=True)
            head.is_entitled = True

    # --- prefill chunks ----------------------------------------------------------------------

    def _limit_prefill(self) -> None:
        """Beside decodes, chunks may not make the step longer than its target."""
        if self._config.target_itl_us and self._decodes:
            books = self._books
            limit = books.pace.num_tokens(self._config.target_itl_us, self._config.block_size)
            if limit is not None:
                self._budget = min(self._budget, limit)

    def _plan_chunks(self) -> None:
        for request in sorted(self._books.prefilling.values(), key=_order):
            if self._budget:
                self._add_chunk(request)
            else:
                self._num_partial += 1
                self._wait(request, WaitReason.NO_BUDGET)

    def _add_chunk(self, request: Request) -> None:
        """The next part of its known tokens, as long as budget and cap allow."""
        rest = request.num_promised - request.num_scheduled
        num_tokens = min(self._budget, rest, self._config.long_prefill_token_threshold or rest)
        self._budget -= num_tokens
        samples = num_tokens == rest
        self._chunks.append(
            PrefillChunk(
                request_id=request.request_id,
                start=request.num_scheduled,
                num_tokens=num_tokens,
                samples=samples,
            )
        )
        request.num_scheduled += num_tokens
        request.num_unsettled += num_tokens
        request.last_step = self._books.next_step
        if not samples:
            self._num_partial += 1
            return
        request.num_pending += 1
        request.num_lost = 0
        is_last = request.num_scheduled == request.final_length
        state = RequestState.FINISHING if is_last else RequestState.JOINING
        self._books.set_state(request, state)

    # --- admissions --------------------------------------------------------------------------

    def _plan_admissions(self) -> None:
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
            self._wait(head, refusal)

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
            self._wait(request, reason)
            passed.append(request)
            if reason not in FOR_BLOCKS or not self._may_pass(request) or len(passed) > LOOK_AHEAD:
                break
        if passed and not has_overtaken:
            waits = self._waits[-len(passed) :]
            if all(wait.reason in FOR_BLOCKS for wait in waits):
                self._blocked = waits[0].request_id, int(waits[0].reason)

    def _may_pass(self, request: Request) -> bool:
        return not request.is_entitled and request.num_overtaken < self._config.max_overtakes

    def _refusal_of_step(self) -> WaitReason | None:
        """Why nobody more is let in, whoever it is."""
        if self._is_short_of_blocks:
            return WaitReason.AFTER_PREEMPTION
        if len(self._books.running) == self._config.max_num_seqs:
            return WaitReason.NO_SEAT
        return None if self._budget else WaitReason.NO_BUDGET

    def _need(self, request: Request) -> tuple[list[BlockId], int, int]:
        """Its hits, the blocks that it needs beside them, and what is free for those."""
        pool = self._books.pool
        # The last known token is always computed, because its logits are needed.
        limit = (request.num_promised - 1) // self._config.block_size
        hits = pool.find(request.block_hashes, limit)
        need = self._books.num_blocks(request.num_promised) - len(hits)
        return hits, need, pool.num_free - pool.num_cached(hits)

    def _try(self, request: Request, situation: Situation) -> WaitReason | None:
        """Admits it, or tells why not."""
        if request.request_id in self._preempted:
            return WaitReason.AFTER_PREEMPTION
        if request.num_pending:
            return WaitReason.IN_FLIGHT
        hits, need, num_free = self._need(request)
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
        most = min(self._budget, self._config.long_prefill_token_threshold or self._budget)
        return bool(limit) and rest > most and self._num_partial >= limit

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
        self._admitted.append(
            Admission(
                request_id=request.request_id,
                num_cached_tokens=num_cached,
                num_recomputed_tokens=num_recomputed,
            )
        )
        self._grant(request, block_ids)
        self._add_chunk(request)

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
        num_tokens = self._books.num_promised(request)
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

    def _grant(self, request: Request, block_ids: list[BlockId]) -> None:
        self._granted.append(
            BlocksGranted(request_id=request.request_id, block_ids=tuple(block_ids))
        )

    def _wait(self, request: Request, reason: WaitReason) -> None:
        self._waits.append(RequestWaits(request_id=request.request_id, reason=reason))


def _order(request: Request) -> tuple[int, RequestId]:
    return request.order
