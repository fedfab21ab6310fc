"""What the runtimes of both GPU vendors have in common: calls by one name each, errors, events used again."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any

from kvhoist.errors import ConfigError, DeviceError
from kvhoist.platform.base import Rects

STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_DEVICEMAP = 2
_CAPTURE_RELAXED = 2
ALREADY_REGISTERED = 712
_NOT_READY = 600
_NAME_BYTES = 256
_ALREADY = contextlib.nullcontext()

_P, _N, _I = c_void_p, c_size_t, c_int

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "allocate": (_P, _N),
    "allocation": (_P, _P, _P),
    "capture_mode": (_P,),
    "copy_batch": (_P, _P, _P, _N, _P, _P, _N, _P, _P),
    "device_attribute": (_P, _I, _I),
    "device_name": (_P, _I, _I),
    "event_create": (_P, _I),
    "event_destroy": (_P,),
    "event_elapsed": (_P, _P, _P),
    "event_query": (_P,),
    "event_record": (_P, _P),
    "event_synchronize": (_P,),
    "find_device": (_P, _I),
    "free": (_P,),
    "host_address": (_P, _P, _I),
    "init": (_I,),
    "launch": (_P, _I, _I, _I, _I, _I, _I, _I, _P, _P, _P),
    "module_function": (_P, _P, c_char_p),
    "module_load": (_P, c_char_p),
    "module_unload": (_P,),
    "register": (_P, _N, _I),
    "stream_create": (_P, _I, _I),
    "stream_destroy": (_P,),
    "stream_priorities": (_P, _P),
    "stream_synchronize": (_P,),
    "stream_wait": (_P, _P, _I),
    "unregister": (_P,),
    "version": (_P,),
    "write": (_P, _P, _N),
}
"""Arguments of the calls that both vendors have alike. ctypes must know them: it would cut addresses to 32 bits."""


class GpuDriver:
    """A loaded runtime and one of its devices; vendors derive theirs. Thread-safe.

    call: the runtime's functions by the names of the vendor's table, each returning an error code.
    name, num_multiprocessors, max_pitch_bytes: what the device says of itself.
    """

    vendor = ""  # as messages say it
    name: str
    num_multiprocessors: int
    max_pitch_bytes: int
    has_batch_copies: bool

    def __init__(
        self,
        library: ctypes.CDLL,
        functions: Mapping[str, str],
        *,
        others: Mapping[str, tuple[Any, ...]],
        optional: tuple[str, ...],
        least: str,
    ) -> None:
        """`functions` names the calls of `library`; `others` are the arguments of those that this vendor alone has.
        Raises ConfigError for a library without one of them that is not `optional`; `least` is the release to have."""
        self.call: Any = SimpleNamespace()
        signatures = {**_SIGNATURES, **others}
        for name, symbol in functions.items():
            function = getattr(library, symbol, None)
            if function is None and name not in optional:
                raise ConfigError(f"the {self.vendor} runtime is too old", got=f"one without {symbol}", expected=least)
            if function is not None:
                function.argtypes = signatures[name]
                setattr(self.call, name, function)
        self._local = threading.local()
        self.spare_events: list[int] = []
        self.check(self.call.init(0), "starting the driver")
        # Not at the process's end, when the runtime may be gone before.
        weakref.finalize(self, _destroy_events, self.call.event_destroy, self.spare_events).atexit = False

    def current(self) -> AbstractContextManager[None]:
        """Work on the device in the calling thread, and on what it worked on before again at the end."""
        return _ALREADY if getattr(self._local, "ours", False) else self._entered()

    def adopt_thread(self) -> None:
        """Work on the device for the rest of the calling thread's life, one that kvhoist started. What it calls does
        no harm to graphs that other threads capture meanwhile."""
        self._make_current()
        mode = c_int(_CAPTURE_RELAXED)
        self.check(self.call.capture_mode(byref(mode)), "setting the capture mode")
        self._local.ours = True

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> int:
        """Enqueue a copy and return the code."""
        raise NotImplementedError

    def copy_batch(self, destinations: int, sources: int, lengths: int, count: int, stream: int) -> bool:
        """Enqueue `count` copies by the addresses of their arrays. False where the device does not have that after all;
        raises DeviceError that names the failed entry."""
        raise NotImplementedError

    def copy_rects(self, rects: Rects, stream: int) -> None:
        """Enqueue 2-D copies. Raises DeviceError."""
        raise NotImplementedError

    def error_name(self, code: int) -> str:
        raise NotImplementedError

    def releases(self) -> str:
        """Return which releases of the kernel's driver and of the runtime these are, for a reader of measurements."""
        raise NotImplementedError

    def forget_error(self) -> None:
        """Let nobody else find an error that was dealt with here."""

    def release(self, call: str, handle: int | None) -> None:
        """Give something back, in whatever thread the last reference to it went. At the end of a process the driver may
        be gone: what it answers then does not matter."""
        with contextlib.suppress(DeviceError), self.current():
            if getattr(self.call, call)(handle):
                self.forget_error()

    def check(self, code: int, doing: str) -> None:
        """Raise DeviceError, naming the code and what was being done, unless `code` is success."""
        if code:
            self.forget_error()
            raise DeviceError(f"{self.vendor} failed in {doing}", got=self.error_name(code))

    def is_ready(self, code: int, doing: str) -> bool:
        """As `check`, for queries: False for `not ready`."""
        if code == _NOT_READY:
            self.forget_error()
            return False
        self.check(code, doing)
        return True

    def _entered(self) -> AbstractContextManager[None]:
        """As `current`, in a thread that is not kvhoist's."""
        raise NotImplementedError

    def _make_current(self) -> None:
        raise NotImplementedError

    def _device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self.check(self.call.device_name(text, _NAME_BYTES, device), "asking for the device's name")
        return text.value.decode(errors="replace")

    def _attribute(self, which: int, device: int) -> int:
        value = c_int()
        self.check(self.call.device_attribute(byref(value), which, device), "asking for an attribute")
        return value.value


def _destroy_events(destroy: Any, events: list[int]) -> None:
    while events:
        destroy(events.pop())
