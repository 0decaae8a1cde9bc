"""Work recorded once as a CUDA graph and replayed: 0.5 us a kernel instead of the 10 us and more that a launch from Python costs."""

from collections.abc import Callable
from typing import Any

from rollkv.cuda.driver import DriverCalls

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: calls that are no stream work, such as loading a module, stay allowed


class Graph:
    """An executable graph; lives until `close`."""

    def __init__(self, calls: DriverCalls, executable: Any) -> None:
        self._calls = calls
        self._executable: Any = executable

    def replay(self, stream: Any) -> None:
        """Runs it behind everything issued on `stream`; later work on `stream` runs behind it."""
        self._calls("cuGraphLaunch", self._executable, stream)

    def close(self) -> None:
        """May be called twice. The graph must not be running."""
        executable, self._executable = self._executable, None
        if executable is not None:
            self._calls.bindings.cuGraphExecDestroy(executable)


def capture(calls: DriverCalls, stream: Any, work: Callable[[], None]) -> Graph:
    """Records what `work` issues on `stream`, and on streams that it makes wait for `stream` and joins again, without running it."""
    calls("cuStreamBeginCapture", stream, calls.bindings.CUstreamCaptureMode(_RELAXED))
    try:
        work()
    except BaseException:
        status, graph = calls.bindings.cuStreamEndCapture(stream)
        if int(status) == 0 and graph is not None:
            calls.bindings.cuGraphDestroy(graph)
        raise
    graph = calls("cuStreamEndCapture", stream)
    try:
        return Graph(calls, calls("cuGraphInstantiate", graph, 0))
    finally:
        calls.bindings.cuGraphDestroy(graph)
