"""kvhoist in vLLM: name this module in `--kv-transfer-config`.

--kv-transfer-config '{"kv_connector": "KvhoistConnector", "kv_connector_module_path": "kvhoist.adapters.vllm",
                       "kv_role": "kv_both", "kv_connector_extra_config": {"host_bytes": "64GiB"}}'
"""

from kvhoist.adapters.vllm.connector import KvhoistConnector

__all__ = ["KvhoistConnector"]
