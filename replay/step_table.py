"""The steps of a run as a table of columns: what each computed, and how long it took.

Kept by `timeline.py`, which knows when records come; read by whatever makes figures of steps.
"""

from array import array

import msgspec

from cearx.core.events import RequestWaits, StepPlan
from cearx.core.trace_records import StepNote
from cearx.replay.ledger import Ledger
from cearx.replay.rows import num_attended, num_batched_tokens


def column() -> "array[int]":
    return array("q")


class StepTable(msgspec.Struct, kw_only=True):
    """One entry a planned step in each column, in order; counts are those behind the plan."""

    step_id: "array[int]" = msgspec.field(default_factory=column)
    planned_us: "array[int]" = msgspec.field(default_factory=column)
    finished_us: "array[int]" = msgspec.field(default_factory=column)
    """0 when the log ends before the step did."""
    num_decodes: "array[int]" = msgspec.field(default_factory=column)
    num_prefill_tokens: "array[int]" = msgspec.field(default_factory=column)
    num_context_tokens: "array[int]" = msgspec.field(default_factory=column)
    """Tokens in KV that the rows attend to, summed over the rows."""
    num_attended: "array[int]" = msgspec.field(default_factory=column)
    """Pairs of a token of a chunk and one that it attends to, itself included."""
    num_running: "array[int]" = msgspec.field(default_factory=column)
    num_waiting: "array[int]" = msgspec.field(default_factory=column)
    num_held: "array[int]" = msgspec.field(default_factory=column)
    """Blocks in use."""
    num_preempted: "array[int]" = msgspec.field(default_factory=column)
    execute_us: "array[int]" = msgspec.field(default_factory=column)
    """This and the next ones are the step's note, 0 without one."""
    schedule_us: "array[int]" = msgspec.field(default_factory=column)
    log_us: "array[int]" = msgspec.field(default_factory=column)
    receive_us: "array[int]" = msgspec.field(default_factory=column)
    launch_us: "array[int]" = msgspec.field(default_factory=column)
    device_us: "array[int]" = msgspec.field(default_factory=column)
    transfer_us: "array[int]" = msgspec.field(default_factory=column)
    result_us: "array[int]" = msgspec.field(default_factory=column)
    turn_us: "array[int]" = msgspec.field(default_factory=column)
    apply_us: "array[int]" = msgspec.field(default_factory=column)
    deliver_us: "array[int]" = msgspec.field(default_factory=column)
    num_in_flight: "array[int]" = msgspec.field(default_factory=column)
    """Steps before it that were planned and not finished when it was planned."""
    head_id: "array[int]" = msgspec.field(default_factory=column)
    """Who waits first in the queue with a reason, -1 for nobody."""
    head_reason: "array[int]" = msgspec.field(default_factory=column)

    def __len__(self) -> int:
        return len(self.step_id)

    def num_tokens(self, index: int) -> int:
        """Computed in the step: what counts against the budget."""
        return self.num_decodes[index] + self.num_prefill_tokens[index]

    def busy_us(self, index: int) -> int:
        """How long the step took by the device's clock, or else by the worker's."""
        return self.device_us[index] + self.transfer_us[index] or self.execute_us[index]

    def dispatched_us(self, index: int) -> int:
        """When it left the core."""
        return self.planned_us[index] + self.schedule_us[index] + self.log_us[index]

    def launched_us(self, index: int) -> int:
        """When the worker could begin with it."""
        return self.dispatched_us(index) + self.receive_us[index] + self.launch_us[index]

    def add(self, plan: StepPlan, ledger: Ledger, num_context: int, num_in_flight: int) -> None:
        """A planned step; `ledger` has it in its books."""
        self.step_id.append(plan.step_id)
        self.planned_us.append(ledger.now_us)
        self.finished_us.append(0)
        self.num_decodes.append(len(plan.decodes))
        self.num_prefill_tokens.append(num_batched_tokens(plan) - len(plan.decodes))
        self.num_context_tokens.append(num_context)
        self.num_attended.append(num_attended(plan))
        self.num_running.append(ledger.num_running)
        self.num_waiting.append(ledger.num_waiting)
        self.num_held.append(ledger.blocks.num_held)
        self.num_preempted.append(len(plan.preempted))
        for name in StepNote.__struct_fields__:
            getattr(self, name).append(0)
        self.num_in_flight.append(num_in_flight)
        head = queue_head(plan, ledger)
        self.head_id.append(-1 if head is None else head.request_id)
        self.head_reason.append(-1 if head is None else head.reason)

    def take_note(self, at: int, note: StepNote) -> int:
        """How long the step took; answers when it was finished."""
        for name in StepNote.__struct_fields__:
            getattr(self, name)[at] = getattr(note, name)
        begun = self.launched_us(at)
        if at:
            begun = max(begun, self.finished_us[at - 1])
        self.finished_us[at] = begun + self.busy_us(at)
        return self.finished_us[at]


def queue_head(plan: StepPlan, ledger: Ledger) -> RequestWaits | None:
    """The first request in the plan's waits that is not running: those behind it wait for it."""
    for wait in plan.waits:
        request = ledger.live.get(wait.request_id)
        if request is not None and not request.is_running:
            return wait
    return None
