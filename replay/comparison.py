"""The figures of two runs side by side, as rows of a table. Used by `diff` and `what-if`."""

from cearx.replay.figures import RunFigures
from cearx.replay.terminal import duration


def comparison(before: RunFigures, after: RunFigures) -> list[list[object]]:
    """Name, before, after, change in percent."""
    rows: list[list[object]] = [
        _line("output tok/s", before.output_tokens_per_s, after.output_tokens_per_s, False),
        _line("duration", before.duration_us, after.duration_us, True),
        _line("steps", before.num_steps, after.num_steps, False),
    ]
    for name, left, right in (
        ("queue time", before.queue_us, after.queue_us),
        ("TTFT", before.ttft_us, after.ttft_us),
        ("ITL", before.itl_us, after.itl_us),
        ("request, whole", before.total_us, after.total_us),
    ):
        if left is not None and right is not None:
            for field in ("mean", "p50", "p99"):
                rows.append(
                    _line(f"{name} {field}", getattr(left, field), getattr(right, field), True)
                )
    for name in ("num_preemptions", "num_recomputed_tokens", "num_hit_tokens"):
        words = name.removeprefix("num_").replace("_", " ")
        rows.append(_line(words, getattr(before, name), getattr(after, name), False))
    return rows


def _line(name: str, before: int, after: int, is_time: bool) -> list[object]:
    change = f"{100 * (after - before) / before:+.1f} %" if before else "-"
    if is_time:
        return [name, duration(before), duration(after), change]
    return [name, before, after, change]
