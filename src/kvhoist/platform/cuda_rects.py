"""Batches of 2-D copies by NVIDIA's driver: in one call where it has one for that, else one by one."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p

import numpy as np

from kvhoist.platform.base import Rects
from kvhoist.platform.gpu_driver import GpuDriver

_POINTER = 1
_UNIFIED = 4
_STREAM_ORDERED = 1

_OPERAND = {
    "names": ("type", "pointer", "row_bytes", "rows", "location"),
    "formats": ("u4", "u8", "u8", "u8", "2i4"),
    "offsets": (0, 8, 16, 24, 32),
    "itemsize": 40,
}

OPERATION = np.dtype([("src", _OPERAND), ("dst", _OPERAND), ("extent", "3u8"), ("order", "i4"), ("flags", "u4")])
"""CUDA_MEMCPY3D_BATCH_OP, with pointers for operands."""


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", c_size_t),
        ("src_y", c_size_t),
        ("src_type", c_int),
        ("src_host", c_void_p),
        ("src", c_size_t),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x", c_size_t),
        ("dst_y", c_size_t),
        ("dst_type", c_int),
        ("dst_host", c_void_p),
        ("dst", c_size_t),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


def enqueue_rects(driver: GpuDriver, rects: Rects, stream: int) -> None:
    """Enqueue the copies. Raises DeviceError."""
    if not hasattr(driver.call, "copy_rects"):
        _one_by_one(driver, rects, stream)
        return
    count = len(rects.sources)
    operations = np.zeros(count, dtype=OPERATION)
    for end, pointers, pitches in (
        ("src", rects.sources, rects.source_pitches),
        ("dst", rects.destinations, rects.destination_pitches),
    ):
        operand = operations[end]
        operand["type"], operand["pointer"], operand["row_bytes"] = _POINTER, pointers, pitches
        operand["rows"] = rects.heights
    extent = operations["extent"]
    extent[:, 0], extent[:, 1], extent[:, 2] = rects.widths, rects.heights, 1
    operations["order"] = _STREAM_ORDERED
    failed = c_size_t(0)
    address = operations.__array_interface__["data"][0]
    if code := driver.call.copy_rects(count, address, byref(failed), 0, stream):
        driver.check(code, f"copying a batch of {count} (entry {failed.value})")


def _one_by_one(driver: GpuDriver, rects: Rects, stream: int) -> None:
    for src, dst, width, height, src_pitch, dst_pitch in zip(*(field.tolist() for field in rects), strict=True):
        one = _Copy2D(
            src_type=_UNIFIED,
            src=src,
            src_pitch=src_pitch,
            dst_type=_UNIFIED,
            dst=dst,
            dst_pitch=dst_pitch,
            width=width,
            height=height,
        )
        if code := driver.call.copy_rect(byref(one), stream):
            driver.check(code, f"copying {height} rows of {width} B")
