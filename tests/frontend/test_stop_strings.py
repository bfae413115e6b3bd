"""Stop strings against a brute-force search, for every way of cutting the text."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cearx.frontend.stop_strings import StopStringMatcher

ALPHABET = st.sampled_from("abé\U0001f600")
TEXT = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def brute_force(text: str, stops: list[str]) -> tuple[str, str] | None:
    """Text before the first completed stop string, and that string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return None


@given(TEXT, STOPS, st.lists(st.integers(0, 30)), st.booleans())
@example("aaab", ["aab"], [2], False)  # a match that begins inside a failed one
@example("ababac", ["abac"], [], False)
@example("abcd", ["bc", "abcd"], [], True)  # complete first, not begun first
@example("xabc", ["bc", "abc"], [1, 2], False)  # complete together: the longest
def test_matches_brute_force(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """The released text and the match are those of a search over the whole text."""
    matcher = StopStringMatcher(tuple(stops), include)
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    shown = "".join(matcher.push(text[a:b]) for a, b in pairwise(bounds))
    shown += matcher.flush()
    expected = brute_force(text, stops)
    if expected is None:
        assert (shown, matcher.matched) == (text, None)
    else:
        before, stop = expected
        assert (shown, matcher.matched) == (before + (stop if include else ""), stop)


@given(TEXT, STOPS)
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    """What is held back is the longest end of the text that begins a stop string."""
    if brute_force(text, stops):
        return
    matcher = StopStringMatcher(tuple(stops), include_stop=False)
    shown = "".join(map(matcher.push, text))
    longest = max(
        (n for s in stops for n in range(len(s) + 1) if n and text.endswith(s[:n])), default=0
    )
    assert shown == text[: len(text) - longest]


def test_nothing_after_a_match() -> None:
    """Text behind the match is never shown, whatever comes."""
    matcher = StopStringMatcher(("END",), include_stop=False)
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert (matcher.push("three"), matcher.flush(), matcher.matched) == ("", "", "END")


def test_an_empty_stop_string_is_a_bug() -> None:
    """Empty stop strings are refused at the edge, so here they break an invariant."""
    with pytest.raises(AssertionError):
        StopStringMatcher(("",), include_stop=False)
