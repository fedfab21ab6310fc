"""What a platform is: streams, events, memory by address, registration, and the capabilities that it declares as data.

The mover and the copy engines see this protocol and no runtime: CPU today; CUDA and ROCm bind theirs behind it.
Streams are ordered queues of device work. On a platform whose `capabilities.asynchronous` is False there is no queue:
work is done when the call returns, and waiting blocks the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

ByteArray: TypeAlias = NDArray[np.uint8]
IdArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Device:
    """A memory: `Device("cpu")`, `Device("cuda", 3)`. ROCm devices are called `cuda` too, as torch calls them."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self == CPU else f"{self.type}:{self.index}"


CPU = Device("cpu")


class Priority(StrEnum):
    """Which stream goes first where both have work. Loads are HIGH: a prefill waits for them."""

    NORMAL = "normal"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """`num_bytes` bytes at `address` of `device`'s memory. `owner` is any object that keeps them mapped; None where the
    creator vouches for that. Regions compare by place, not by owner."""

    address: int
    num_bytes: int
    device: Device = CPU
    owner: object = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        return self.address + self.num_bytes


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a platform can do, as data: code asks these fields and never the platform's name."""

    engines: tuple[str, ...]  # copy engines that run here, by preference
    asynchronous: bool  # streams are queues; else all work is done when its call returns
    host_visible: bool  # the CPU may read and write device memory by address
    registers_host: bool  # `register` pins memory for DMA and may answer another device address
    launches_kernels: bool  # `load_module` works
    compute_capability: tuple[int, int] | None = None  # what NVIDIA calls the architecture that kernels are made for
    gpu_arch: str = ""  # what AMD calls it, "gfx942"; "" on NVIDIA, where compute_capability says it
    multiprocessors: int = 0  # how many blocks of a kernel run side by side, at least
    max_pitch_bytes: int = 0  # of a 2-D copy
    block_quota: int = 0  # blocks that a kernel on mapped host memory may take from the model, unless a user says


class Rects(NamedTuple):
    """2-D copies, one an entry: `heights` rows of `widths` bytes, the rows a pitch apart on either side. int64 arrays
    of one length, addresses in `sources` and `destinations`, the rest bytes; a pitch is at least the width."""

    sources: IdArray
    destinations: IdArray
    widths: IdArray
    heights: IdArray
    source_pitches: IdArray
    destination_pitches: IdArray


class Event(Protocol):
    """A point in a stream. Thread-safe."""

    def query(self) -> bool:
        """Tell whether all work before the point is done. Never blocks."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the calling thread (GIL released) until `query()`; False where `timeout_s` passed first."""
        ...


class Stream(Protocol):
    """An ordered queue of work on one device. One thread at a time enqueues."""

    @property
    def priority(self) -> Priority: ...

    def wait(self, event: Event) -> None:
        """Let later work of this stream start after `event`. Returns at once where streams are asynchronous."""
        ...

    def record(self, event: Event) -> None:
        """Move `event`, which `make_event` made, to the end of what this stream holds now. Who waits for it already
        waits for the point where it was."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread (GIL released) until all work enqueued so far is done."""
        ...


class Registration(Protocol):
    """Host memory that the device may address. A device address is valid within one registration only: no copy may
    span two (design rule 7)."""

    @property
    def region(self) -> MemoryRegion: ...

    @property
    def device_address(self) -> int:
        """Where the device sees `region.address`. Not the same number on every platform."""
        ...

    def close(self) -> None:
        """Unregister. Idempotent; all work that uses the memory must be done."""
        ...


class KernelCall(Protocol):
    """A kernel with its parameters."""

    def launch(self, grid: int, block: int, stream: Stream) -> None:
        """Enqueue the kernel with `grid` blocks of `block` threads and what the parameters hold now."""
        ...


class Module(Protocol):
    """A loaded code object."""

    def prepare(self, kernel: str, parameters: ctypes.Structure) -> KernelCall:
        """Return a call of `kernel`, whose single argument is the struct `parameters`. Raises DeviceError where the
        module has no such kernel."""
        ...


class Platform(Protocol):
    """One device and its runtime. Thread-safe."""

    name: str
    device: Device
    capabilities: Capabilities

    def make_stream(self, priority: Priority = Priority.NORMAL) -> Stream:
        """Return a new stream, owned by the caller."""
        ...

    def wrap_stream(self, handle: int) -> Stream:
        """Return the engine's own stream, from its runtime handle. Not owned: never destroyed here."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Work on this device in the calling thread. Whatever enqueues must stand in such a block."""
        ...

    def enter_thread(self) -> None:
        """As `current`, for the rest of the life of a thread that kvhoist started."""
        ...

    def make_event(self) -> Event:
        """Return an event that has happened, for `Stream.record`."""
        ...

    def record(self, stream: Stream) -> Event:
        """Return an event at the end of what `stream` holds now."""
        ...

    def view(self, region: MemoryRegion) -> ByteArray:
        """Return the region's bytes as a writable array that keeps `region.owner` alive.

        Raises ConfigError where the CPU cannot address that device's memory.
        """
        ...

    def register(self, region: MemoryRegion) -> Registration:
        """Make host memory known to the device. Raises ConfigError for memory that is not the host's."""
        ...

    def allocate(self, num_bytes: int) -> MemoryRegion:
        """Return device memory that is freed with the region's `owner`."""
        ...

    def allocate_host(self, num_bytes: int) -> MemoryRegion | None:
        """Return host memory that the device's driver owns, freed with the region's `owner`, where the user asked for
        such; else None: an arena maps its own. `register` takes either. Raises HostMemoryError."""
        ...

    def allocation_of(self, address: int) -> int:
        """Return where the allocation of device memory starts that holds `address`: no 2-D copy may span two."""
        ...

    def write(self, region: MemoryRegion, data: ByteArray) -> None:
        """Copy `data` to device memory, and wait until it is there: for small tables, at start."""
        ...

    def copy(self, source: int, destination: int, num_bytes: int, stream: Stream) -> None:
        """Enqueue one copy between addresses."""
        ...

    def copy_batch(self, sources: IdArray, destinations: IdArray, num_bytes: IdArray, stream: Stream) -> None:
        """Enqueue one copy an entry, between addresses (int64 arrays of one length), in any order; entries must not
        overlap. The caller keeps the memory and checks the bounds.

        Raises ConfigError for arrays of unequal length or negative counts.
        """
        ...

    def copy_batch_2d(self, rects: Rects, stream: Stream) -> None:
        """Enqueue 2-D copies, as `copy_batch`."""
        ...

    def load_module(self, image: bytes) -> Module:
        """Load a code object. Raises ConfigError where `capabilities.launches_kernels` is False."""
        ...


def region_of(array: ByteArray) -> MemoryRegion:
    """Return the region of a C-contiguous uint8 array, which it keeps alive."""
    return MemoryRegion(array.__array_interface__["data"][0], array.nbytes, CPU, array)


def regions_of(arrays: Sequence[ByteArray]) -> tuple[MemoryRegion, ...]:
    return tuple(region_of(array) for array in arrays)
