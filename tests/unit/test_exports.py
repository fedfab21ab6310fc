"""The public names are these, and each is there."""

import kvhoist


def test_the_public_names_are_pinned():
    assert kvhoist.__all__ == [
        "CacheConfig", "CacheGeometry", "CacheGroup", "Component", "DeviceCache", "FileStore", "HierarchicalCache",
        "KvhoistError", "Lease", "Match", "MemoryStore", "Namespace", "ParallelLayout", "Reservation", "TokenChain",
        "Transfer", "__version__",
        "fingerprint_checkpoint", "fingerprint_tensors", "open_store", "read_device_layout",
    ]  # fmt: skip
    assert all(hasattr(kvhoist, name) for name in kvhoist.__all__)
