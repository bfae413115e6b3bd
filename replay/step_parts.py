"""Where the time of steps and of first tokens went, part by part, from the notes of a log.

Pure arithmetic over a timeline, in microseconds. A part that no note has measured is left out: logs
of a simulation have only what is simulated. Called by `figures.py`.

    arrival ─wait─ plan ─schedule─ log ─receive─ launch ─device─ transfer ─result─ apply ─deliver─
                                       └────────────────── turn ─────────────────┘
"""

from cearx.replay.request_line import RequestLine
from cearx.replay.step_table import StepTable
from cearx.replay.timeline import Timeline

STEP_PARTS = {
    "schedule_us": "plan it",
    "log_us": "write the log",
    "receive_us": "to the worker",
    "launch_us": "inputs and launch",
    "device_us": "model, device clock",
    "transfer_us": "tokens to the host",
    "result_us": "result to the core",
    "apply_us": "take the result in",
    "deliver_us": "first tokens out",
    "turn_us": "at the worker in all",
}
"""Columns of the table of steps, and what a person reads."""
FIRST_TOKEN = (
    "arrival to plan",
    "plan to dispatch",
    "further chunks",
    "dispatch to launched",
    "behind other steps",
    "model and transfer",
    "result to the core",
    "result to delivered",
)


def step_parts(steps: StepTable) -> dict[str, list[int]]:
    """The measured times of each part, by its name for a person."""
    columns = ((name, getattr(steps, column)) for column, name in STEP_PARTS.items())
    return {name: [us for us in column if us] for name, column in columns if any(column)}


def first_token_parts(timeline: Timeline) -> dict[str, list[int]]:
    """What each first token waited for, in order; empty where no log says it."""
    all_parts = (_parts(line, timeline.steps) for line in timeline.requests.values())
    found = [parts for parts in all_parts if parts is not None]
    return {name: [parts[i] for parts in found] for i, name in enumerate(FIRST_TOKEN) if found}


def _parts(line: RequestLine, steps: StepTable) -> tuple[int, ...] | None:
    """In the order of FIRST_TOKEN; None for who got none, or not all within the log."""
    if line.began_before or line.lost or not line.token_steps or not line.admissions:
        return None
    first, last = line.admissions[0].step, line.token_steps[0]
    turn_us = steps.turn_us[last]
    was_preempted = bool(line.preemptions) and line.preemptions[0] <= last
    if was_preempted or not turn_us or not steps.schedule_us[first]:
        return None
    launched = steps.receive_us[last] + steps.launch_us[last]
    computed = steps.device_us[last] + steps.transfer_us[last]
    result = steps.result_us[last]
    return (
        max(0, steps.planned_us[first] - line.arrived_us),
        steps.schedule_us[first] + steps.log_us[first],
        max(0, steps.dispatched_us(last) - steps.dispatched_us(first)),
        launched,
        max(0, turn_us - launched - computed - result),
        computed,
        result,
        steps.apply_us[last] + steps.deliver_us[last],
    )
