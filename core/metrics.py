"""What the engine counts since its start, as plain integers: counters and histograms.

Types and their arithmetic only. `metrics_fold.py` fills them from the scheduler's events and
decisions; the frontends show them under the names that dashboards know. Times are microseconds.
"""

from bisect import bisect_left

import msgspec


def _us(*seconds: float) -> tuple[int, ...]:
    return tuple(round(second * 1_000_000) for second in seconds)


# Bounds of vLLM's histograms, so that its dashboards and alerts stay true.
FIRST_TOKEN_US = _us(
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
TOKEN_US = _us(
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
REQUEST_US = _us(
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_CHOICES = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)


def bounds_1_2_5(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... as long as they do not exceed `largest`."""
    bounds: list[int] = []
    power = 1
    while power <= largest:
        bounds += [power * mantissa for mantissa in (1, 2, 5) if power * mantissa <= largest]
        power *= 10
    return tuple(bounds)


class Histogram(msgspec.Struct, array_like=True, kw_only=True):
    """How many values fell up to each bound (inclusive), and the values' sum."""

    bounds: tuple[int, ...]
    counts: list[int]
    """One for each bound and one for what is larger; not cumulative."""
    total: int = 0

    @classmethod
    def of(cls, bounds: tuple[int, ...]) -> "Histogram":
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    def observe(self, value: int, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the scheduler holds now."""

    num_running: int
    num_waiting: int
    num_deferred: int
    """Of the waiting ones, those who wait for a step in flight."""
    num_free_blocks: int


class Counters(msgspec.Struct, array_like=True, kw_only=True):
    """Counts of requests, tokens and steps."""

    num_received: int = 0
    num_refused_queue_full: int = 0
    num_refused_queue_tokens: int = 0
    num_refused_impossible: int = 0
    """Refused because they could never run."""
    num_stopped: int = 0
    num_at_length: int = 0
    num_aborted: int = 0
    """Taken back by the client or the server, or out of time."""
    num_failed: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_lookup_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    """Of requests whose prompt is computed."""
    num_cached_prompt_tokens: int = 0
    """Of these, taken from the prefix cache."""
    num_generated_tokens: int = 0


class Histograms(msgspec.Struct, array_like=True, kw_only=True):
    """Of finished requests unless it says otherwise; finished means by stop or length."""

    first_token_us: Histogram
    """Of each request, when it comes: since the frontend has read the request."""
    inter_token_us: Histogram
    """Of each token but a request's first, when it comes."""
    per_token_us: Histogram
    """Decode time over tokens behind the first."""
    e2e_us: Histogram
    """Since the frontend has read the request."""
    queue_us: Histogram
    """From arrival in the core to the first admission."""
    prefill_us: Histogram
    """From the first admission to the first token."""
    decode_us: Histogram
    """From the first token to the last."""
    inference_us: Histogram
    """From the first admission to the last token."""
    prompt_tokens: Histogram
    generated_tokens: Histogram
    max_tokens: Histogram
    num_choices: Histogram
    """n of each prompt, when it arrives."""
    num_preemptions: Histogram
    computed_prefill_tokens: Histogram
    """Prompt tokens that the prefix cache did not have."""
    step_tokens: Histogram
    """Of each step that computes any."""

    @classmethod
    def empty(cls, max_model_len: int) -> "Histograms":
        lengths = bounds_1_2_5(max_model_len)
        return cls(
            first_token_us=Histogram.of(FIRST_TOKEN_US),
            inter_token_us=Histogram.of(TOKEN_US),
            per_token_us=Histogram.of(TOKEN_US),
            e2e_us=Histogram.of(REQUEST_US),
            queue_us=Histogram.of(REQUEST_US),
            prefill_us=Histogram.of(REQUEST_US),
            decode_us=Histogram.of(REQUEST_US),
            inference_us=Histogram.of(REQUEST_US),
            prompt_tokens=Histogram.of(lengths),
            generated_tokens=Histogram.of(lengths),
            max_tokens=Histogram.of(lengths),
            num_choices=Histogram.of(NUM_CHOICES),
            num_preemptions=Histogram.of(NUM_PREEMPTIONS),
            computed_prefill_tokens=Histogram.of(lengths),
            step_tokens=Histogram.of(STEP_TOKENS),
        )
