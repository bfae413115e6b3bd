"""Rules that hold for every run whatever the policy, judged by the ledger.

    I1 every block exists and is in one place      I7  one end a request, for the right reason
    I2 nobody gets a block that somebody holds     I8  nothing for a request that waits or ended
    I3 a shared block holds what its hash says     I9  an idle engine lets the head in
    I4 a step keeps its token budget               I10 refused is what never fits
    I5 at most max_num_seqs run                    I11 the head is overtaken only so often
    I6 rows go on where the last one stopped       I12 preempted work resumes, no token is lost

Owns the order in which the rules hear of a record; they know events and decisions only, no
scheduler. One violation does not end the check.
"""

from collections.abc import Iterable, Iterator

from cearx.core.config import SchedulerConfig
from cearx.core.events import RequestArrived, RequestEnded, StepPlan
from cearx.core.identifiers import StepId
from cearx.core.trace_records import TraceGap, TraceSnapshot
from cearx.replay.admission_rules import AdmissionRules
from cearx.replay.block_rules import judge_grants
from cearx.replay.ledger import Ledger
from cearx.replay.outcome_rules import OutcomeRules
from cearx.replay.row_rules import judge_rows
from cearx.replay.trace import TraceRecord
from cearx.replay.violation import Finding, Violation
from cearx.replay.wait_rules import judge_waits


class Checker:
    """Feed every record in order; each call answers what it breaks."""

    def __init__(self, config: SchedulerConfig, max_overtaken: int | None = None) -> None:
        self.ledger = Ledger(config)
        most = config.max_overtakes if max_overtaken is None else max_overtaken
        self._admissions = AdmissionRules(self.ledger, most)
        self._outcomes = OutcomeRules(self.ledger)

    def feed(self, record: TraceRecord) -> list[Violation]:
        """Judges the record, then takes it into the books; raises as the ledger does."""
        value = record.value
        if isinstance(value, TraceGap | TraceSnapshot):
            self._go_on_behind(value)
            return []
        findings = list(self._judge(value))
        step_id = self.ledger.step_id
        self.ledger.apply(value)
        if isinstance(value, StepPlan):
            step_id = value.step_id
            findings += judge_rows(self.ledger, value)
            findings += judge_waits(self.ledger, value)
        return [_violation(record, step_id, finding) for finding in findings]

    def finish(self, last: TraceRecord, ended: bool) -> list[Violation]:
        """What is missing at the end of a log; only a log with its end must be complete."""
        if not ended:
            return []
        return [_violation(last, self.ledger.step_id, f) for f in self._outcomes.missing()]

    def _judge(self, value: object) -> Iterator[Finding]:
        """What can be said before the record is in the books."""
        yield from self._outcomes.judge(value)
        if isinstance(value, RequestArrived):
            self._admissions.arrive(value)
        elif isinstance(value, RequestEnded):
            self._admissions.end(value.request_id)
        elif isinstance(value, StepPlan):
            yield from self._admissions.judge_preemptions(value)
            yield from self._admissions.judge_admissions(value)
            yield from judge_grants(self.ledger, value)

    def _go_on_behind(self, value: TraceGap | TraceSnapshot) -> None:
        """What a gap holds is not judged."""
        begins = self.ledger.begins_with(value)
        self.ledger.apply(value)
        if isinstance(value, TraceGap):
            self._outcomes.forget()
        elif begins:
            self._outcomes.begin()
            self._admissions.begin()


def _violation(record: TraceRecord, step_id: StepId | None, finding: Finding) -> Violation:
    rule, text, request_ids = finding
    return Violation(
        invariant=rule,
        seq=record.seq,
        offset=record.offset,
        step_id=step_id,
        text=text,
        request_ids=request_ids,
    )


def violations(
    config: SchedulerConfig, records: Iterable[TraceRecord], max_overtaken: int | None = None
) -> Iterator[Violation]:
    """All violations of records that end in good order."""
    checker = Checker(config, max_overtaken)
    last = None
    for last in records:
        yield from checker.feed(last)
    if last is not None:
        yield from checker.finish(last, ended=True)
