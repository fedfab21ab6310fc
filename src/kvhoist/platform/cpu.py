"""The CPU platform: device memory is host memory, and work is done when its call returns."""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from kvhoist.errors import ConfigError
from kvhoist.platform.base import (
    CPU,
    ByteArray,
    Capabilities,
    Device,
    Event,
    IdArray,
    MemoryRegion,
    Module,
    Priority,
    Rects,
    Registration,
    Stream,
    region_of,
)


class CpuEvent:
    """A flag that a thread sets. Events that `record` returns are set; a producer that works in a thread of its own
    makes one with `CpuEvent()` and calls `set()` after its last byte."""

    def __init__(self) -> None:
        self._flag = threading.Event()

    def set(self) -> None:
        self._flag.set()

    def query(self) -> bool:
        return self._flag.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._flag.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class CpuStream:
    """The calling thread: `wait` blocks it, `synchronize` has nothing to wait for."""

    priority: Priority = Priority.NORMAL

    def wait(self, event: Event) -> None:
        event.wait()

    def record(self, event: Event) -> None:
        """Nothing: what was enqueued is done."""

    def synchronize(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class CpuRegistration:
    """Host memory as it is: the device's address is the host's."""

    region: MemoryRegion

    @property
    def device_address(self) -> int:
        return self.region.address

    def close(self) -> None:
        return


class CpuPlatform:
    """One machine's main memory as the device."""

    name: str = "cpu"
    device: Device = CPU
    capabilities: Capabilities = Capabilities(
        engines=("reference",), asynchronous=False, host_visible=True, registers_host=False, launches_kernels=False
    )

    def make_stream(self, priority: Priority = Priority.NORMAL) -> Stream:
        return CpuStream(priority)

    def wrap_stream(self, handle: int) -> Stream:
        """Return a stream for handle 0, the only one that CPU engines have. Raises ConfigError for others."""
        if handle != 0:
            raise ConfigError("the cpu platform has no stream handles", got=handle, expected="0")
        return CpuStream()

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def enter_thread(self) -> None:
        return

    def make_event(self) -> Event:
        return self.record(CpuStream())

    def record(self, stream: Stream) -> Event:
        event = CpuEvent()
        event.set()
        return event

    def view(self, region: MemoryRegion) -> ByteArray:
        self._check_host(region, "cannot be viewed")
        return host_view(region)

    def register(self, region: MemoryRegion) -> Registration:
        self._check_host(region, "cannot be registered")
        return CpuRegistration(region)

    def copy_batch(self, sources: IdArray, destinations: IdArray, num_bytes: IdArray, stream: Stream) -> None:
        lengths = (len(sources), len(destinations), len(num_bytes))
        if len(set(lengths)) > 1 or (lengths[0] and int(num_bytes.min()) < 0):
            raise ConfigError(
                "a batch of copies whose arrays do not fit together",
                got="{} sources, {} destinations, {} lengths".format(*lengths),
                expected="one of each an entry, lengths not negative",
            )
        for source, destination, count in zip(sources.tolist(), destinations.tolist(), num_bytes.tolist(), strict=True):
            ctypes.memmove(destination, source, count)

    def copy_batch_2d(self, rects: Rects, stream: Stream) -> None:
        for source, destination, width, height, *pitches in zip(*(field.tolist() for field in rects), strict=True):
            for row in range(height):
                ctypes.memmove(destination + row * pitches[1], source + row * pitches[0], width)

    def allocate(self, num_bytes: int) -> MemoryRegion:
        return region_of(np.empty(num_bytes, dtype=np.uint8))

    def allocate_host(self, num_bytes: int) -> MemoryRegion | None:
        return None

    def allocation_of(self, address: int) -> int:
        return 0

    def write(self, region: MemoryRegion, data: ByteArray) -> None:
        self.view(region)[: data.nbytes] = data

    def copy(self, source: int, destination: int, num_bytes: int, stream: Stream) -> None:
        ctypes.memmove(destination, source, num_bytes)

    def load_module(self, image: bytes) -> Module:
        raise ConfigError(
            "the cpu platform launches no kernels",
            got=f"a code object of {len(image)} bytes",
            remedy="Ask capabilities.launches_kernels first.",
        )

    def _check_host(self, region: MemoryRegion, what: str) -> None:
        if region.device.type != CPU.type:
            raise ConfigError(f"memory of {region.device} {what} by the cpu platform", expected="host memory")


class _Memory:
    """Carries an address range into numpy, and its owner with it."""

    def __init__(self, region: MemoryRegion) -> None:
        self.owner = region.owner
        self.__array_interface__ = {
            "data": (region.address, False),
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def host_view(region: MemoryRegion) -> ByteArray:
    """Return host memory as a writable uint8 array that keeps `region.owner` alive."""
    view: ByteArray = np.asarray(_Memory(region))
    return view
