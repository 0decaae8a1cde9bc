"""Where the time of a start goes."""

import time
from collections.abc import Callable


class Phases:
    """Wall time of one phase after another, in seconds by name. The first begins with the object."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._last = clock()

    def ends(self, name: str) -> None:
        """The phase `name` ended just now and the next began."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
