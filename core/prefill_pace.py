"""How long steps take, learned from their measured times, and how long a prefill may make one.

Integers only; the estimates are state. Fed by `StepFinished`, asked by `plan` when there is a
target for the time between two tokens of a running request.
"""

import msgspec

WEIGHT = 8
"""A new measurement moves an estimate by 1/8 of the difference."""


class PrefillPace(msgspec.Struct, array_like=True, kw_only=True):
    decode_us: int = 0
    """A step of decodes alone; 0 until one was measured."""
    token_ns: int = 0
    """What one prefill token adds to it; 0 until it was measured."""

    def observe(self, num_prefill_tokens: int, execute_us: int) -> None:
        """Takes in the time of a step with so many prefill tokens beside its decodes."""
        if not num_prefill_tokens:
            self.decode_us = _moved(self.decode_us, max(execute_us, 1))
        elif self.decode_us:
            added_us = max(execute_us - self.decode_us, 0)
            self.token_ns = _moved(self.token_ns, max(added_us * 1000 // num_prefill_tokens, 1))

    def num_tokens(self, target_us: int, at_least: int) -> int | None:
        """Prefill tokens that fit beside decodes; None as long as nobody knows."""
        if not self.token_ns:
            return None
        return max((target_us - self.decode_us) * 1000 // self.token_ns, at_least)


def _moved(estimate: int, measured: int) -> int:
    if not estimate:
        return measured
    step = (abs(measured - estimate) + WEIGHT - 1) // WEIGHT
    return estimate + step if measured > estimate else estimate - step
