"""A host backend that knows which accesses are ordered: any two that touch the same page unordered, one of them writing, are a race.

Vector clocks (Fidge 1988, Mattern 1989): a stream counts its own work; an event carries the counts its stream had reached and had
waited for; a wait takes the larger of each count.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from rollkv.backend import PageRun, Stream
from rollkv.host_backend import HostArray, HostBackend

Clock = dict[Stream, int]


class RaceDetector(HostBackend):
    """Runs everything at once and raises AssertionError on the first unordered pair of accesses."""

    def __init__(self) -> None:
        super().__init__(order="eager")
        self._clocks: dict[Stream, Clock] = {stream: dict.fromkeys(Stream, 0) for stream in Stream}
        self._writes: dict[tuple[int, int], tuple[Stream, int]] = {}
        self._reads: dict[tuple[int, int], Clock] = {}
        self._recent: set[tuple[int, int]] = set()  # places touched since the last feed-forward part
        self._kept: list[Any] = []  # arrays stay alive, so that their addresses stay theirs
        self.checked = 0

    def record(self, stream: Stream) -> Any:
        return dict(self._clocks[stream])

    def wait(self, stream: Stream, event: Any) -> None:
        for other, count in event.items():
            self._clocks[stream][other] = max(self._clocks[stream][other], count)

    def synchronize(self) -> None:
        """What comes later comes behind everything so far, on every stream."""
        super().synchronize()
        joined = {stream: max(clock[stream] for clock in self._clocks.values()) for stream in self._clocks}
        self._clocks = {stream: dict(joined) for stream in joined}
        for past in (self._writes, self._reads, self._recent, self._kept):
            past.clear()

    def copy_in(self, run: PageRun, host: np.ndarray) -> None:
        self._begin(Stream.COPY_IN)
        self._run(Stream.COPY_IN, run, write=True)
        self._host(Stream.COPY_IN, run, host, write=False)
        super().copy_in(run, host)

    def copy_out(self, run: PageRun, host: np.ndarray) -> None:
        self._begin(Stream.COPY_OUT)
        self._run(Stream.COPY_OUT, run, write=False)
        self._host(Stream.COPY_OUT, run, host, write=True)
        super().copy_out(run, host)

    def copy_page(self, source: HostArray, source_slot: int, target: HostArray, target_slot: int) -> None:
        self._begin(Stream.COMPUTE)
        self._touch(Stream.COMPUTE, source.values[source_slot], write=False)
        self._touch(Stream.COMPUTE, target.values[target_slot], write=True)
        super().copy_page(source, source_slot, target, target_slot)

    def append(self, projected: Any, position: Any, runs: tuple[PageRun, ...], *rest: Any) -> None:
        self._begin(Stream.COMPUTE)
        for run in runs:
            self._run(Stream.COMPUTE, run, write=True)
        super().append(projected, position, runs, *rest)

    def attend_step(self, projected: Any, position: Any, runs: tuple[PageRun, ...], *rest: Any) -> None:
        self._begin(Stream.COMPUTE)
        for run in runs:
            self._run(Stream.COMPUTE, run, write=False)
        super().attend_step(projected, position, runs, *rest)  # which appends by `append`

    def attend_tile(self, q: Any, position: Any, run: PageRun, *rest: Any, **flags: Any) -> None:
        self._begin(Stream.COMPUTE)
        self._run(Stream.COMPUTE, run, write=False)
        self._overwrite_all(rest[4].values)
        super().attend_tile(q, position, run, *rest, **flags)

    def reencode(self, source: PageRun, source_page: Any, target: PageRun, target_page: Any) -> None:
        self._begin(Stream.COMPUTE)
        self._run(Stream.COMPUTE, source, write=False)
        self._run(Stream.COMPUTE, target, write=True)
        super().reencode(source, source_page, target, target_page)

    def feed_forward(self, *args: Any, **options: Any) -> None:
        """Its scratch is lent to the staging ring: whatever was seen there is written to."""
        self._begin(Stream.COMPUTE)
        self._overwrite_all(args[6].values)
        self._recent.clear()
        super().feed_forward(*args, **options)

    def _begin(self, stream: Stream) -> None:
        self._clocks[stream][stream] += 1

    def _overwrite_all(self, scratch: np.ndarray) -> None:
        """COMPUTE writes to all of it, pages that were seen there included."""
        begin = scratch.__array_interface__["data"][0]
        for address, num_bytes in self._recent:
            if begin <= address < begin + scratch.nbytes:
                self._overwrite(Stream.COMPUTE, (address, num_bytes))

    def _run(self, stream: Stream, run: PageRun, write: bool) -> None:
        for index in range(run.num_pages):
            self._touch(stream, run.pool.values[(run.first_slot + index) % run.num_slots], write)  # type: ignore[attr-defined]

    def _host(self, stream: Stream, run: PageRun, host: np.ndarray, write: bool) -> None:
        for index in range(run.num_pages):
            self._touch(stream, host[run.first_page + index], write)

    def _touch(self, stream: Stream, page: np.ndarray, write: bool) -> None:
        self._kept.append(page)
        place = (page.__array_interface__["data"][0], page.nbytes)
        self.checked += 1
        self._recent.add(place)
        if write:
            self._overwrite(stream, place)
        else:
            self._behind_writer(stream, place)
            self._reads.setdefault(place, {})[stream] = self._clocks[stream][stream]

    def _behind_writer(self, stream: Stream, place: tuple[int, int]) -> None:
        if place in self._writes:
            writer, count = self._writes[place]
            assert self._clocks[stream][writer] >= count, f"{stream.name} touches a page that {writer.name} may still be writing"

    def _overwrite(self, stream: Stream, place: tuple[int, int]) -> None:
        self._behind_writer(stream, place)
        for reader, count in self._reads.pop(place, {}).items():
            assert self._clocks[stream][reader] >= count, f"{stream.name} overwrites a page that {reader.name} may still be reading"
        self._writes[place] = (stream, self._clocks[stream][stream])


class _Recorded(Enum):
    COPIES = 0


class Recording(RaceDetector):
    """Records steps as a device does, so that generation runs ahead: a replay does what was issued while it was recorded, in that order, and waits
    for nothing else. Its copies in are a stream of their own: ordered against others by the recorded waits and by COMPUTE alone."""

    can_record = True

    def __init__(self) -> None:
        super().__init__()
        self._tape: list[tuple[str, tuple[Any, ...], dict[str, Any], object]] | None = None
        self._streams: dict[Stream, Any] = {stream: stream for stream in Stream}  # under which clock a stream goes now
        for clock in self._clocks.values():
            clock[_Recorded.COPIES] = 0  # type: ignore[index]
        self._clocks[_Recorded.COPIES] = dict.fromkeys(self._clocks[Stream.COMPUTE], 0)  # type: ignore[index]
        self.replays = 0

    def _begin(self, stream: Stream) -> None:
        super()._begin(self._streams[stream])

    def _touch(self, stream: Stream, page: np.ndarray, write: bool) -> None:
        super()._touch(self._streams[stream], page, write)

    def record(self, stream: Stream) -> Any:
        return super().record(self._streams[stream])

    def wait(self, stream: Stream, event: Any) -> None:
        super().wait(self._streams[stream], event)

    def capture(self, work: Callable[[], None]) -> Any:
        self._tape = tape = []
        try:
            work()
        finally:
            self._tape = None
        return tape

    def replay(self, graph: Any) -> None:
        self.replays += 1
        events: dict[object, Any] = {}
        self._streams[Stream.COPY_IN] = _Recorded.COPIES
        for name, args, options, event in graph:
            if name == "wait":
                assert args[1] in events, "a recorded step waits for what is not recorded"
                self.wait(args[0], events[args[1]])
            else:
                events[event] = getattr(self, name)(*args, **options)
        self._streams[Stream.COPY_IN] = Stream.COPY_IN

    def release(self, graph: Any) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        method, tape = super().__getattribute__(name), super().__getattribute__("__dict__").get("_tape")
        if tape is None or name not in _ISSUED:
            return method

        def issue(*args: Any, **options: Any) -> object:
            tape.append((name, args, options, event := object()))
            return event

        return issue


_ISSUED = (
    *("record", "wait", "copy_in", "copy_out", "copy_page"),
    *("embed", "linear", "feed_forward", "rope_table", "append", "queries", "reencode", "attend_step", "attend_tile", "add", "choose"),
)
