"""Stop strings in text that arrives in pieces, cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string. The result never depends on how the text was cut.

    The first is the one that is complete first; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """What is certain to come before a stop string; the rest is held back."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: what is held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0
