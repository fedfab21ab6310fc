"""What an engine has put into its streams, as one event that copies of its device pages wait for."""

from __future__ import annotations

from collections.abc import Callable

from kvhoist.errors import ConfigError
from kvhoist.platform.base import Event, Platform, Stream


class EnginePoints:
    """Joins points of the engine's streams: `latest` has happened when all that was marked has. One thread at a time.

    `engine_stream` returns the runtime handle of the stream that the calling thread's model works in. Where the
    platform has no streams there is nothing to mark: `latest` and `stream()` are None. Raises ConfigError where one is
    needed (`required`) and none is given.
    """

    def __init__(self, platform: Platform, engine_stream: Callable[[], int] | None, *, required: bool) -> None:
        if required and platform.capabilities.asynchronous and engine_stream is None:
            raise ConfigError(
                f"a cache on {platform.device} needs to know the engine's stream",
                remedy="Give engine_stream=lambda: torch.cuda.current_stream().cuda_stream.",
            )
        self.latest: Event | None = None
        self._platform = platform
        self._engine_stream = engine_stream if platform.capabilities.asynchronous else None
        self._joint = platform.make_stream()

    def stream(self) -> Stream | None:
        """Return the stream that the calling thread's model works in now."""
        return None if self._engine_stream is None else self._platform.wrap_stream(self._engine_stream())

    def mark(self) -> None:
        """Let later copies start after what the calling thread's model has been given to do so far."""
        stream = self.stream()
        if stream is not None:
            self.join(self._platform.record(stream))

    def catch_up(self) -> None:
        """Let the calling thread's model start after all that was marked, by whatever thread."""
        stream = self.stream()
        if stream is not None and self.latest is not None:
            with self._platform.current():
                stream.wait(self.latest)

    def join(self, event: Event) -> None:
        """Let later copies start after `event` as well."""
        with self._platform.current():
            self._joint.wait(event)
        self.latest = self._platform.record(self._joint)
