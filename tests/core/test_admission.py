"""Admission policies: the forecast against a step-by-step count, and what each policy brings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_times import Burst, run_burst

from cearx.core import admission
from cearx.core.admission import Runner, Situation, find_policy, forecast, load_policy, watermark
from cearx.core.forecast import Growth, first_overflow
from cearx.core.output_lengths import (
    NUM_BUCKETS,
    OutputLengths,
    bucket_of,
    expected_length,
    upper_bound,
)
from cearx.core.prefill_pace import PrefillPace

growth_lists = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 70), st.integers(0, 3)), min_size=1, max_size=9
)


@settings(deadline=None)
@given(growth_lists, st.integers(1, 9), st.integers(0, 12), st.integers(0, 90))
def test_forecast_counts_blocks_step_by_step(
    lengths: list[tuple[int, int, int]], block_size: int, elsewhere: int, limit: int
) -> None:
    """The first overflow is where a plain simulation meets it, give or take a block's steps."""
    growths = []
    for num_steps, num_tokens, num_shared in lengths:
        held = -(-(num_tokens - 1) // block_size)
        own = max(held - num_shared, 0)
        growths.append(Growth(num_steps, num_tokens, own, held))
    num_held = elsewhere + sum(growth.num_held for growth in growths)
    first = None
    last_step = max(growth.num_steps for growth in growths)
    for step in range(last_step + 1):
        used = num_held
        for growth in growths:
            if growth.num_steps < step:
                used -= growth.num_blocks
            else:
                used += -(-(growth.num_tokens - 1 + step) // block_size) - growth.num_held
        if used > limit:
            first = step
            break
    found = first_overflow(growths, num_held, limit, block_size)
    if first is None:
        assert found is None
    else:
        assert found is not None
        assert first - block_size <= found <= first + block_size


def runner(prompt: int, tokens: int, max_tokens: int, block_size: int = 4) -> Runner:
    """An exact one that holds what its tokens need."""
    blocks = -(-tokens // block_size)
    return Runner(prompt, tokens, prompt + max_tokens, prompt + max_tokens, blocks, 0)


def situation(num_blocks: int, *runners: Runner, margin_blocks: int = 0) -> Situation:
    """Blocks of 4 tokens; what the runners hold is taken."""
    return Situation(
        num_blocks=num_blocks,
        block_size=4,
        num_free=num_blocks - sum(r.num_blocks for r in runners),
        num_to_come=sum(-(-(r.max_length - 1) // 4) - r.num_blocks for r in runners),
        margin_blocks=margin_blocks,
        find_runners=lambda: list(runners),
    )


def test_forecast_lets_ends_make_room() -> None:
    """Two that never fit together at full length do, when one ends before the other grows."""
    ends_soon = runner(40, 58, 20)
    newcomer = runner(8, 8, 60)
    assert forecast(situation(21, ends_soon), newcomer)
    assert not forecast(situation(21, runner(40, 41, 44)), runner(36, 36, 40))
    assert not forecast(situation(21, ends_soon, margin_blocks=5), newcomer)


def test_watermark_keeps_fixed_blocks_free() -> None:
    """8 blocks, or 64 behind a prompt longer than a block, beside everyone's whole length."""
    assert watermark(situation(30, runner(4, 4, 40)), runner(4, 4, 40))
    assert not watermark(situation(29, runner(4, 4, 40)), runner(4, 4, 40))
    assert watermark(situation(86, runner(4, 4, 40)), runner(5, 5, 40))
    assert not watermark(situation(85, runner(4, 4, 40)), runner(5, 5, 40))


class InstalledPolicy:
    """What a package's entry point is."""

    name = "mine"

    def load(self) -> object:
        return watermark


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "entry_points", lambda group: [InstalledPolicy()])
    monkeypatch.setattr(admission, "_loaded", {})


@pytest.mark.usefixtures("installed")
def test_an_unknown_policy_is_refused_with_the_names() -> None:
    """A typing error is told with what there is."""
    with pytest.raises(ValueError, match="forecast, watermark, greedy, got 'greed'"):
        find_policy("greed")
    with pytest.raises(ValueError, match="forecast, watermark, greedy, mine, got 'greed'"):
        load_policy("greed")


@pytest.mark.usefixtures("installed")
def test_an_installed_policy_is_loaded_only_for_who_asks() -> None:
    """A name in a file runs nothing; the same name from a person does."""
    with pytest.raises(ValueError, match="got 'mine'"):
        find_policy("mine")
    assert load_policy("mine") is watermark
    assert find_policy("mine") is watermark


@settings(deadline=None)
@given(st.integers(1, 2**30))
def test_buckets_hold_their_lengths(length: int) -> None:
    """Every length is in one bucket, at most an eighth below its upper bound."""
    bucket = bucket_of(length)
    assert 0 <= bucket < NUM_BUCKETS
    if bucket < NUM_BUCKETS - 1:
        assert length <= upper_bound(bucket) <= length + length // 8 + 1
        assert bucket_of(upper_bound(bucket)) == bucket


def test_expected_lengths_follow_what_was_seen() -> None:
    """Two thirds of those that got as far ended by it, and it always lies ahead."""
    lengths = OutputLengths()
    for _ in range(60):
        for length in (100, 200, 200, 900):
            lengths.observe(length)
    expected = lengths.expected()
    assert 200 <= expected_length(expected, 0, 4096) < 230
    assert 900 <= expected_length(expected, 300, 4096) <= 1023
    assert expected_length(expected, 0, 50) == 50
    for num_outputs in range(0, 3000, 7):
        assert num_outputs < expected_length(expected, num_outputs, 4096) <= 4096


def test_old_lengths_are_forgotten() -> None:
    """After some thousand short answers nobody expects a long one."""
    lengths = OutputLengths()
    for length in [3000] * 2000 + [10] * 9000:
        lengths.observe(length)
    assert expected_length(lengths.expected(), 0, 4096) == 10


def test_pace_learns_both_speeds() -> None:
    """Steps of 8 ms and 50 us more for each prefill token: 2 ms are left for 40 tokens."""
    pace = PrefillPace()
    assert pace.num_tokens(10_000, 16) is None
    pace.observe(100, 99_000)  # nobody knows the decodes' part yet
    for num_tokens in [0, 0, 100, 0, 200] * 20:
        pace.observe(num_tokens, 8_000 + 50 * num_tokens)
    assert pace.num_tokens(10_000, 16) == 40
    assert pace.num_tokens(8_001, 16) == 16


POINTS = [(64, 257, 256), (64, 257, 1024), (64, 257, 4096), (16, 257, 4096)]


@pytest.fixture(scope="module")
def bursts() -> dict[tuple[str, int, int], Burst]:
    """Bursts of equal requests on a simulated 32 GB card with an 8B model, blocks of 256 tokens.

    The prompt is 256 tokens and one that starts it, so that it is longer than a block.
    """
    return {
        (admission, concurrency, outputs): run_burst(
            admission,
            concurrency=concurrency,
            num_prompt_tokens=prompt,
            num_output_tokens=outputs,
        )
        for admission in ("forecast", "watermark", "greedy")
        for concurrency, prompt, outputs in POINTS
    }


def test_forecast_beats_a_watermark(bursts: dict[tuple[str, int, int], Burst]) -> None:
    """What a fixed reserve cost at the points where it was measured to cost most."""
    for concurrency, outputs in ((64, 1024), (64, 4096), (16, 4096)):
        ratio = (
            bursts["forecast", concurrency, outputs].tokens_per_s
            / bursts["watermark", concurrency, outputs].tokens_per_s
        )
        assert ratio >= 1.25, f"C{concurrency}/O{outputs}: {ratio:.2f}"


def test_forecast_is_never_far_under_greedy(bursts: dict[tuple[str, int, int], Burst]) -> None:
    """Caution costs at most 2 %, and where the pool is much too small it pays."""
    for concurrency, _, outputs in POINTS:
        forecast, greedy = (bursts[p, concurrency, outputs] for p in ("forecast", "greedy"))
        assert forecast.tokens_per_s >= 0.98 * greedy.tokens_per_s
        assert forecast.num_preemptions <= greedy.num_preemptions
    crowded = [bursts[policy, 64, 4096] for policy in ("forecast", "greedy")]
    assert crowded[0].tokens_per_s > 1.02 * crowded[1].tokens_per_s
    assert 3 * crowded[0].num_recomputed_tokens < 2 * crowded[1].num_recomputed_tokens
