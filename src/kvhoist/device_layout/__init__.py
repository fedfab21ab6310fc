"""Where an engine's own tensors keep a cache group: their layout, read off shapes and strides."""

from kvhoist.device_layout.disjoint import check_disjoint
from kvhoist.device_layout.read import DeviceCache, read_device_layout

__all__ = ["DeviceCache", "check_disjoint", "read_device_layout"]
