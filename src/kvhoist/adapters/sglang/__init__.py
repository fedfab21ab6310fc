"""kvhoist as the storage tier of SGLang's HiCache: name this module as a `dynamic` backend.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvhoist",
    "module_path": "kvhoist.adapters.sglang", "class_name": "KvhoistStorage", "interface_v1": 1,
    "storage": "file:/var/cache/kv?capacity=500GiB"}'
"""

from kvhoist.adapters.sglang.storage import KvhoistStorage

__all__ = ["KvhoistStorage"]
