"""The comparison of two logs for a person."""

from rich.console import Console

from cearx.replay.comparison import comparison
from cearx.replay.diff import Comparison, Effect
from cearx.replay.terminal import duration, printable, table


def print_diff(found: Comparison, console: Console, limit: int) -> None:
    """The first difference, the order of admission, the requests, then the run."""
    for name, (left, right) in found.config.items():
        console.print(f"config {name}: {printable(left)} -> {printable(right)}")
    if found.first is None:
        console.print("SAME decisions, block numbers aside")
    else:
        first = found.first
        step = "before the first step" if first.step_id is None else f"step {first.step_id}"
        console.print(f"DIFFERS first at {step}: {first.field} (requests by order of arrival)")
        console.print(f"  first   {printable(first.left)}")
        console.print(f"  second  {printable(first.right)}")
    order = found.order
    if order.num_moved:
        console.print(
            f"admission order: {order.num_moved} requests stand elsewhere; at position"
            f" {order.first} the first lets in {order.left}, the second {order.right}"
        )
    if found.num_unmatched:
        console.print(f"note: {found.num_unmatched} requests are in one log only")
    changed = [effect for effect in found.effects if _is_changed(effect)]
    if changed:
        console.print()
        columns = [
            "arrival",
            "first id",
            "second id",
            "waited",
            "ttft",
            "preempted",
            "hit",
            "ended",
        ]
        title = f"{len(changed)} of {len(found.effects)} requests fare otherwise, the most first"
        console.print(table(columns, map(_cells, changed[:limit]), title))
        if len(changed) > limit:
            console.print(f"… and {len(changed) - limit} more (--limit, --json)")
    console.print()
    console.print(table(["", "first", "second", "change"], comparison(found.left, found.right)))


def _is_changed(effect: Effect) -> bool:
    changes = (effect.size, effect.preemptions, effect.hit_tokens)
    return any(changes) or effect.left_ended != effect.right_ended


def _cells(effect: Effect) -> list[object]:
    ended = effect.left_ended
    if effect.right_ended != ended:
        ended += f" -> {effect.right_ended}"
    return [
        effect.arrival,
        effect.left_id,
        effect.right_id,
        _signed_time(effect.waited_us),
        _signed_time(effect.ttft_us),
        f"{effect.preemptions:+d}" if effect.preemptions else "-",
        f"{effect.hit_tokens:+d}" if effect.hit_tokens else "-",
        ended,
    ]


def _signed_time(us: int | None) -> str | None:
    return "-" if not us else f"{'+' if us > 0 else ''}{duration(us)}"
