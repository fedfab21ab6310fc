"""The CUDA platform: one NVIDIA GPU, its streams, events, copies, host registrations and kernels."""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import replace

from kvhoist.errors import ConfigError
from kvhoist.platform import cuda_driver as cu
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
from kvhoist.platform.cuda_driver import CudaDriver
from kvhoist.platform.cuda_rects import enqueue_rects
from kvhoist.platform.cuda_streams import CudaEvent, CudaStream

_FEW_COPIES = 1
"""So many copies cost less one by one than as a batch."""

CAPABILITIES = Capabilities(
    engines=("staged", "dma", "mapped"),
    asynchronous=True,
    host_visible=False,
    registers_host=True,
    launches_kernels=True,
    block_quota=2,  # design, copy engines
)
"""Of every NVIDIA GPU; the device at hand adds its own."""


class CudaRegistration:
    """Host memory pinned for the GPU, until `close`."""

    def __init__(self, driver: CudaDriver, region: MemoryRegion) -> None:
        self._driver = driver
        self._open = True
        self.region = region
        flags = cu.HOST_REGISTER_PORTABLE | cu.HOST_REGISTER_DEVICEMAP
        pointer = c_void_p()
        with driver.current():
            code = driver.library.cuMemHostRegister_v2(region.address, region.num_bytes, flags)
            driver.check(code, f"pinning {region.num_bytes} B of host memory")
            driver.check(
                driver.library.cuMemHostGetDevicePointer_v2(byref(pointer), region.address, 0),
                "asking for the device's address of host memory",
            )
        self.device_address = int(pointer.value or 0)

    def close(self) -> None:
        if self._open:
            self._open = False
            with self._driver.current():
                self._driver.check(self._driver.library.cuMemHostUnregister(self.region.address), "unpinning memory")


class CudaKernelCall:
    """A function and the struct that is its only parameter; the driver reads it at each launch."""

    def __init__(self, module: CudaModule, function: int, kernel: str, parameters: ctypes.Structure) -> None:
        self._module = module
        self._driver = module.driver
        self._launch = module.driver.library.cuLaunchKernel
        self._function = c_void_p(function)
        self._kernel = kernel
        self._parameters = parameters
        self._pointers = (c_void_p * 1)(ctypes.addressof(parameters))

    def launch(self, grid: int, block: int, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        code = self._launch(self._function, grid, 1, 1, block, 1, 1, 0, stream.handle, self._pointers, None)
        if code:
            self._driver.check(code, f"launching {self._kernel}")


class CudaModule:
    """A loaded code object, unloaded with this object. Functions are looked up once."""

    def __init__(self, driver: CudaDriver, image: bytes) -> None:
        self.driver = driver
        self._functions: dict[str, int] = {}
        self._lock = threading.Lock()
        module = c_void_p()
        with driver.current():
            driver.check(driver.library.cuModuleLoadData(byref(module), image), "loading a code object")
        self._handle = module.value
        weakref.finalize(self, driver.release, "cuModuleUnload", self._handle)

    def prepare(self, kernel: str, parameters: ctypes.Structure) -> KernelCall:
        with self._lock:
            if kernel not in self._functions:
                self._functions[kernel] = self._find(kernel)
            return CudaKernelCall(self, self._functions[kernel], kernel, parameters)

    def _find(self, kernel: str) -> int:
        function = c_void_p()
        with self.driver.current():
            code = self.driver.library.cuModuleGetFunction(byref(function), self._handle, kernel.encode())
            self.driver.check(code, f"looking up the kernel {kernel}")
        return int(function.value or 0)


class CudaPlatform:
    """One NVIDIA GPU. Uses the device's primary context, which torch uses too. ConfigError where there is none."""

    name: str = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.driver = CudaDriver(device.index)
        self.capabilities = replace(
            CAPABILITIES,
            compute_capability=self.driver.compute_capability,
            multiprocessors=self.driver.num_multiprocessors,
            max_pitch_bytes=self.driver.max_pitch_bytes,
        )
        least, greatest = c_int(), c_int()
        with self.driver.current():
            code = self.driver.library.cuCtxGetStreamPriorityRange(byref(least), byref(greatest))
            self.driver.check(code, "asking for stream priorities")
        self._priorities = {Priority.NORMAL: least.value, Priority.HIGH: greatest.value}
        self._attribute_index, self._failed = c_size_t(0), c_size_t(0)

    def current(self) -> AbstractContextManager[None]:
        return self.driver.current()

    def enter_thread(self) -> None:
        self.driver.adopt_thread()

    def make_stream(self, priority: Priority = Priority.NORMAL) -> Stream:
        handle = c_void_p()
        with self.driver.current():
            code = self.driver.library.cuStreamCreateWithPriority(
                byref(handle), cu.STREAM_NON_BLOCKING, self._priorities[priority]
            )
            self.driver.check(code, "making a stream")
        return CudaStream(self.driver, int(handle.value or 0), priority, owned=True)

    def wrap_stream(self, handle: int) -> Stream:
        return CudaStream(self.driver, handle, Priority.NORMAL, owned=False)

    def make_event(self) -> Event:
        return CudaEvent(self.driver)

    def record(self, stream: Stream) -> Event:
        event = CudaEvent(self.driver)
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
        return CudaRegistration(self.driver, region)

    def allocate(self, num_bytes: int) -> MemoryRegion:
        address = c_void_p()
        with self.driver.current():
            code = self.driver.library.cuMemAlloc_v2(byref(address), num_bytes)
            self.driver.check(code, f"allocating {num_bytes} B on the device")
        owner = _Owner()
        weakref.finalize(owner, self.driver.release, "cuMemFree_v2", address.value)
        return MemoryRegion(int(address.value or 0), num_bytes, self.device, owner)

    def allocation_of(self, address: int) -> int:
        base, num_bytes = c_void_p(), c_size_t()
        with self.driver.current():
            code = self.driver.library.cuMemGetAddressRange_v2(byref(base), byref(num_bytes), address)
            self.driver.check(code, f"asking for the allocation of {address:#x}")
        return int(base.value or 0)

    def write(self, region: MemoryRegion, data: ByteArray) -> None:
        with self.driver.current():
            code = self.driver.library.cuMemcpyHtoD_v2(region.address, data.ctypes.data, data.nbytes)
            self.driver.check(code, f"writing {data.nbytes} B to the device")

    def copy(self, source: int, destination: int, num_bytes: int, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        if code := self.driver.library.cuMemcpyAsync(destination, source, num_bytes, stream.handle):
            self.driver.check(code, f"copying {num_bytes} B")

    def copy_batch(self, sources: IdArray, destinations: IdArray, num_bytes: IdArray, stream: Stream) -> None:
        count = len(sources)
        if not (count == len(destinations) == len(num_bytes)):
            raise ConfigError("a batch of copies whose arrays do not fit together", got=f"{count} sources")
        if count <= _FEW_COPIES or not self.driver.has_batch_copies:
            for src, dst, n in zip(sources.tolist(), destinations.tolist(), num_bytes.tolist(), strict=True):
                self.copy(src, dst, n, stream)
            return
        assert isinstance(stream, CudaStream)
        code = self.driver.library.cuMemcpyBatchAsync(
            _address(destinations),
            _address(sources),
            _address(num_bytes),
            count,
            byref(cu.STREAM_ORDERED),
            byref(self._attribute_index),
            1,
            byref(self._failed),
            stream.handle,
        )
        if code:
            self.driver.check(code, f"copying a batch of {count} (entry {self._failed.value})")

    def copy_batch_2d(self, rects: Rects, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        enqueue_rects(self.driver, rects, stream.handle)

    def load_module(self, image: bytes) -> Module:
        return CudaModule(self.driver, image)


class _Owner:
    __slots__ = ("__weakref__",)


def _address(array: IdArray) -> int:
    """Return where a C-contiguous, writable array lies, in a third of the time that numpy takes to tell."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
