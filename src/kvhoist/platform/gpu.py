"""One GPU: its streams, events, copies, host registrations and kernels, over either vendor's driver."""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import replace

from kvhoist.errors import ConfigError, DeviceError
from kvhoist.platform.base import (
    CPU,
    ByteArray,
    Capabilities,
    Device,
    Event,
    IdArray,
    KernelCall,
    MemoryRegion,
    Module,
    Priority,
    Rects,
    Registration,
    Stream,
)
from kvhoist.platform.cpu import host_view
from kvhoist.platform.gpu_driver import (
    ALREADY_REGISTERED,
    HOST_REGISTER_DEVICEMAP,
    HOST_REGISTER_PORTABLE,
    STREAM_NON_BLOCKING,
    GpuDriver,
)
from kvhoist.platform.gpu_streams import GpuEvent, GpuStream

_FEW_COPIES = 1
"""So many copies cost less one by one than as a batch."""


class GpuRegistration:
    """Host memory pinned for the GPU, until `close`. Raises DeviceError where it is refused; then none is pinned."""

    def __init__(self, driver: GpuDriver, region: MemoryRegion) -> None:
        self._driver = driver
        self._open = True
        self.region = region
        flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP
        pointer = c_void_p()
        with driver.current():
            self._pinned(driver.call.register(region.address, region.num_bytes, flags))
            if code := driver.call.host_address(byref(pointer), region.address, 0):
                driver.call.unregister(region.address)
                driver.check(code, "asking for the device's address of host memory")
        self.device_address = int(pointer.value or 0)

    def close(self) -> None:
        if self._open:
            self._open = False
            with self._driver.current():
                self._driver.check(self._driver.call.unregister(self.region.address), "unpinning memory")

    def _pinned(self, code: int) -> None:
        doing = f"pinning {self.region.num_bytes} B of host memory"
        if code != ALREADY_REGISTERED:
            self._driver.check(code, doing)
            return
        self._driver.forget_error()
        raise DeviceError(
            f"{self._driver.vendor} failed in {doing}",
            got=f"{self._driver.error_name(code)}, in {self.region.address:#x} to {self.region.end:#x}",
            expected="memory that nobody has registered, not even in part",
            remedy="Let whoever registered it (a store, the engine) unregister it, or give kvhoist memory of its own.",
        )


class GpuKernelCall:
    """A function and the struct that is its only parameter; the driver reads it at each launch."""

    def __init__(self, module: GpuModule, function: int, kernel: str, parameters: ctypes.Structure) -> None:
        self._module = module
        self._driver = module.driver
        self._launch = module.driver.call.launch
        self._function = c_void_p(function)
        self._kernel = kernel
        self._parameters = parameters
        self._pointers = (c_void_p * 1)(ctypes.addressof(parameters))

    def launch(self, grid: int, block: int, stream: Stream) -> None:
        assert isinstance(stream, GpuStream)
        code = self._launch(self._function, grid, 1, 1, block, 1, 1, 0, stream.handle, self._pointers, None)
        if code:
            self._driver.check(code, f"launching {self._kernel}")


class GpuModule:
    """A loaded code object, unloaded with this object. Functions are looked up once."""

    def __init__(self, driver: GpuDriver, image: bytes) -> None:
        self.driver = driver
        self._functions: dict[str, int] = {}
        self._lock = threading.Lock()
        module = c_void_p()
        with driver.current():
            driver.check(driver.call.module_load(byref(module), image), "loading a code object")
        self._handle = module.value
        weakref.finalize(self, driver.release, "module_unload", self._handle)

    def prepare(self, kernel: str, parameters: ctypes.Structure) -> KernelCall:
        with self._lock:
            if kernel not in self._functions:
                self._functions[kernel] = self._find(kernel)
            return GpuKernelCall(self, self._functions[kernel], kernel, parameters)

    def _find(self, kernel: str) -> int:
        function = c_void_p()
        with self.driver.current():
            code = self.driver.call.module_function(byref(function), self._handle, kernel.encode())
            self.driver.check(code, f"looking up the kernel {kernel}")
        return int(function.value or 0)


class GpuPlatform:
    """One GPU, by its vendor's driver, with the engines that `capabilities` name."""

    def __init__(self, name: str, device: Device, driver: GpuDriver, capabilities: Capabilities) -> None:
        self.name = name
        self.device = device
        self.driver = driver
        self.capabilities = replace(
            capabilities, multiprocessors=driver.num_multiprocessors, max_pitch_bytes=driver.max_pitch_bytes
        )
        least, greatest = c_int(), c_int()
        with driver.current():
            code = driver.call.stream_priorities(byref(least), byref(greatest))
            driver.check(code, "asking for stream priorities")
        # 0 is what streams have that say nothing: CUDA's least, the middle of HIP's.
        self._priorities = {Priority.NORMAL: 0, Priority.HIGH: greatest.value}

    def current(self) -> AbstractContextManager[None]:
        return self.driver.current()

    def enter_thread(self) -> None:
        self.driver.adopt_thread()

    def make_stream(self, priority: Priority = Priority.NORMAL) -> Stream:
        handle = c_void_p()
        with self.driver.current():
            code = self.driver.call.stream_create(byref(handle), STREAM_NON_BLOCKING, self._priorities[priority])
            self.driver.check(code, "making a stream")
        return GpuStream(self.driver, int(handle.value or 0), priority, owned=True)

    def wrap_stream(self, handle: int) -> Stream:
        return GpuStream(self.driver, handle, Priority.NORMAL, owned=False)

    def make_event(self) -> Event:
        return GpuEvent(self.driver)

    def record(self, stream: Stream) -> Event:
        event = GpuEvent(self.driver)
        with self.driver.current():
            stream.record(event)
        return event

    def view(self, region: MemoryRegion) -> ByteArray:
        if region.device != CPU:
            raise ConfigError("the CPU cannot address this memory", got=region.device, expected="host memory")
        return host_view(region)

    def register(self, region: MemoryRegion) -> Registration:
        if region.device != CPU:
            raise ConfigError("only host memory can be pinned", got=region.device, expected="host memory")
        return GpuRegistration(self.driver, region)

    def allocate(self, num_bytes: int) -> MemoryRegion:
        address = c_void_p()
        with self.driver.current():
            code = self.driver.call.allocate(byref(address), num_bytes)
            self.driver.check(code, f"allocating {num_bytes} B on the device")
        owner = _Owner()
        weakref.finalize(owner, self.driver.release, "free", address.value)
        return MemoryRegion(int(address.value or 0), num_bytes, self.device, owner)

    def allocate_host(self, num_bytes: int) -> MemoryRegion | None:
        return None

    def allocation_of(self, address: int) -> int:
        base, num_bytes = c_void_p(), c_size_t()
        with self.driver.current():
            code = self.driver.call.allocation(byref(base), byref(num_bytes), address)
            self.driver.check(code, f"asking for the allocation of {address:#x}")
        return int(base.value or 0)

    def write(self, region: MemoryRegion, data: ByteArray) -> None:
        with self.driver.current():
            code = self.driver.call.write(region.address, data.ctypes.data, data.nbytes)
            self.driver.check(code, f"writing {data.nbytes} B to the device")

    def copy(self, source: int, destination: int, num_bytes: int, stream: Stream) -> None:
        assert isinstance(stream, GpuStream)
        if code := self.driver.copy(destination, source, num_bytes, stream.handle):
            self.driver.check(code, f"copying {num_bytes} B")

    def copy_batch(self, sources: IdArray, destinations: IdArray, num_bytes: IdArray, stream: Stream) -> None:
        count = len(sources)
        if not (count == len(destinations) == len(num_bytes)):
            raise ConfigError("a batch of copies whose arrays do not fit together", got=f"{count} sources")
        assert isinstance(stream, GpuStream)
        if count > _FEW_COPIES and self.driver.has_batch_copies:
            addresses = _address(destinations), _address(sources), _address(num_bytes)
            if self.driver.copy_batch(*addresses, count, stream.handle):
                return
        for src, dst, n in zip(sources.tolist(), destinations.tolist(), num_bytes.tolist(), strict=True):
            self.copy(src, dst, n, stream)

    def copy_batch_2d(self, rects: Rects, stream: Stream) -> None:
        assert isinstance(stream, GpuStream)
        self.driver.copy_rects(rects, stream.handle)

    def load_module(self, image: bytes) -> Module:
        return GpuModule(self.driver, image)


class _Owner:
    __slots__ = ("__weakref__",)


def _address(array: IdArray) -> int:
    """Return where a C-contiguous, writable array lies, in a third of the time that numpy takes to tell."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
