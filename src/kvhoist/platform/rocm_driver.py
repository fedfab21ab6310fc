"""AMD's HIP runtime through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

from kvhoist.errors import ConfigError
from kvhoist.platform.base import Rects
from kvhoist.platform.gpu_driver import GpuDriver
from kvhoist.platform.rocm_library import load_hip
from kvhoist.system_files import text_of

_FUNCTIONS = {
    "allocate": "hipMalloc",
    "allocation": "hipMemGetAddressRange",
    "capture_mode": "hipThreadExchangeStreamCaptureMode",
    "copy": "hipMemcpyAsync",
    "copy_batch": "hipMemcpyBatchAsync",
    "copy_rect": "hipMemcpy2DAsync",
    "device_attribute": "hipDeviceGetAttribute",
    "device_name": "hipDeviceGetName",
    "device_properties": "hipGetDevicePropertiesR0600",
    "error_name": "hipGetErrorName",
    "error_text": "hipGetErrorString",
    "event_create": "hipEventCreateWithFlags",
    "event_destroy": "hipEventDestroy",
    "event_elapsed": "hipEventElapsedTime",
    "event_query": "hipEventQuery",
    "event_record": "hipEventRecord",
    "event_synchronize": "hipEventSynchronize",
    "find_device": "hipDeviceGet",
    "free": "hipFree",
    "get_device": "hipGetDevice",
    "host_address": "hipHostGetDevicePointer",
    "host_allocate": "hipHostMalloc",
    "host_free": "hipHostFree",
    "init": "hipInit",
    "last_error": "hipGetLastError",
    "launch": "hipModuleLaunchKernel",
    "module_function": "hipModuleGetFunction",
    "module_load": "hipModuleLoadData",
    "module_unload": "hipModuleUnload",
    "register": "hipHostRegister",
    "set_device": "hipSetDevice",
    "stream_create": "hipStreamCreateWithPriority",
    "stream_destroy": "hipStreamDestroy",
    "stream_priorities": "hipDeviceGetStreamPriorityRange",
    "stream_synchronize": "hipStreamSynchronize",
    "stream_wait": "hipStreamWaitEvent",
    "unregister": "hipHostUnregister",
    "version": "hipRuntimeGetVersion",
    "write": "hipMemcpyHtoD",
}

_OTHERS = {
    "copy": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "copy_rect": (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p),
    "device_properties": (c_void_p, c_int),
    "error_name": (c_int,),
    "error_text": (c_int,),
    "get_device": (c_void_p,),
    "host_allocate": (c_void_p, c_size_t, c_int),
    "host_free": (c_void_p,),
    "last_error": (),
    "set_device": (c_int,),
}

_OPTIONAL = ("copy_batch",)
"""ROCm 7.1 has it."""

_DRIVER_FILE = "/sys/module/amdgpu/version"
"""There where the driver is AMD's own package; the kernel's own has no version."""

_BY_ADDRESS = 4
"""hipMemcpyDefault: the runtime finds out which memory an address is of."""

_NOT_SUPPORTED = 801

_MAX_PITCH, _MULTIPROCESSORS = 58, 63
"""hipDeviceAttribute_t of ROCm 6 and later."""

_ARCH_OFFSET, _ARCH_BYTES, _PROPERTIES_BYTES = 1160, 256, 8192
"""gcnArchName in hipDeviceProp_tR0600; a function's name carries its struct's revision, so the place cannot move."""

_ARCH = re.compile(r"gfx[0-9a-f]+")


class RocmDriver(GpuDriver):
    """The process's HIP runtime and one of its devices.

    gpu_arch: the target that kernels are compiled for, such as "gfx942", without its features.

    Raises as `load_hip` does; ConfigError where the runtime is too old or names no target; DeviceError where there is
    no such device.
    """

    vendor = "HIP"

    def __init__(self, index: int) -> None:
        library = load_hip()
        super().__init__(library, _FUNCTIONS, others=_OTHERS, optional=_OPTIONAL, least="ROCm 6")
        self.call.error_name.restype = self.call.error_text.restype = c_char_p
        device, version = c_int(), c_int()
        self.check(self.call.find_device(byref(device), index), f"finding device {index}")
        self.check(self.call.version(byref(version)), "asking for the runtime's version")
        self._index = index
        self.version = version.value
        self.name = self._device_name(device.value)
        self.has_batch_copies = hasattr(self.call, "copy_batch")
        self.gpu_arch = self._arch()
        self.num_multiprocessors = self._attribute(_MULTIPROCESSORS, index)
        self.max_pitch_bytes = self._attribute(_MAX_PITCH, index)
        self._failed = c_size_t(0)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        before = c_int()
        self.check(self.call.get_device(byref(before)), "asking for the current device")
        if before.value == self._index:
            yield
            return
        self._make_current()
        try:
            yield
        finally:
            self.call.set_device(before.value)

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> int:
        code: int = self.call.copy(destination, source, num_bytes, _BY_ADDRESS, stream)
        return code

    def copy_batch(self, destinations: int, sources: int, lengths: int, count: int, stream: int) -> bool:
        # No attributes: sources are read in stream order.
        code = self.call.copy_batch(destinations, sources, lengths, count, None, None, 0, byref(self._failed), stream)
        if code == _NOT_SUPPORTED:
            self.forget_error()
            self.has_batch_copies = False
            return False
        if code:
            self.check(code, f"copying a batch of {count} (entry {self._failed.value})")
        return True

    def copy_rects(self, rects: Rects, stream: int) -> None:
        for src, dst, width, height, src_pitch, dst_pitch in zip(*(field.tolist() for field in rects), strict=True):
            if code := self.call.copy_rect(dst, dst_pitch, src, src_pitch, width, height, _BY_ADDRESS, stream):
                self.check(code, f"copying {height} rows of {width} B")

    def error_name(self, code: int) -> str:
        name, text = self.call.error_name(code), self.call.error_text(code)
        return f"{(name or b'unknown error').decode()} ({code}): {(text or b'').decode()}"

    def forget_error(self) -> None:
        """HIP keeps a thread's last error for whoever asks next: torch does after each of its launches."""
        self.call.last_error()

    def releases(self) -> str:
        major, minor = divmod(self.version // 100_000, 100)
        return f"amdgpu {text_of(_DRIVER_FILE).strip() or 'of this kernel'}, HIP {major}.{minor}"

    def _make_current(self) -> None:
        self.check(self.call.set_device(self._index), "making the device current")

    def _arch(self) -> str:
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self.check(self.call.device_properties(properties, self._index), "asking for the device's properties")
        text = properties.raw[_ARCH_OFFSET : _ARCH_OFFSET + _ARCH_BYTES].split(b"\0")[0].decode(errors="replace")
        found = _ARCH.match(text)
        if found is None:
            raise ConfigError(
                f"the HIP runtime names no target that kernels could be compiled for, for device {self._index}",
                got=repr(text),
                expected="a name such as gfx942",
            )
        return found[0]
