"""Stop strings: found in a growing text however it is cut into pieces.

One Knuth-Morris-Pratt automaton a stop string, advanced character by character, so that the result
depends on the text alone and never on token or event boundaries. The match that is complete first
wins; of several complete at the same character, the longest. Called by `choice.py`.
"""


def _failure_links(pattern: str) -> list[int]:
    """links[i]: length of the longest proper prefix of pattern that ends pattern[:i + 1]."""
    links = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = links[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        links[i] = length
    return links


class StopStringMatcher:
    """Releases text as soon as it cannot become part of a stop string any more."""

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self.matched: str | None = None
        self._stops = sorted(stops, key=len, reverse=True)
        self._links = [_failure_links(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """Takes more text, answers what may be shown now; after a match (`matched`) nothing."""
        if self.matched is not None:
            return ""
        held = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None:
                self.matched = stop
                self._held = ""
                return held[: position if self._include_stop else position - len(stop)]
        released = len(held) - max(self._states, default=0)
        self._held = held[released:]
        return held[:released]

    def flush(self) -> str:
        """The text still held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._links[index][state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                return stop
            self._states[index] = state
        return None
