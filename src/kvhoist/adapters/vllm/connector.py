"""KvhoistConnector: what vLLM's connector interface asks of either side, handed to that side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvhoist.adapters.vllm import compat, start
from kvhoist.adapters.vllm.metadata import NO_CACHE, ConnectorMetadata, WorkerMetadata, WorkerReport
from kvhoist.adapters.vllm.metrics import CacheMetrics, CachePromMetrics
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.adapters.vllm.room import Room
from kvhoist.adapters.vllm.scheduler import SchedulerSide
from kvhoist.adapters.vllm.served import ServedEngine
from kvhoist.adapters.vllm.worker import WorkerSide
from kvhoist.errors import UnsupportedGeometryError
from kvhoist.runtime import RuntimeServer
from kvhoist.settings import Settings

_log = logging.getLogger("vllm.kvhoist")
_Built = TypeVar("_Built")


class KvhoistConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV cache backed by host memory and storage. Started by vLLM from `--kv-transfer-config`, once in the
    scheduler's process and once in each worker; docs/engines.md has the settings.

    A problem at the start stops the engine with one message, or with `on_error="disable"` leaves the cache off. A model
    whose cache is not served leaves it off, too: everything here then answers as if there were no connector.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._room: Room | None = None
        self._server: RuntimeServer | None = None
        self._block_pool: Any = None
        self._worker: WorkerSide | None = None
        self._report: WorkerReport | None = None
        self._options: ConnectorOptions | None = None
        # vLLM's default would fail a request whose load failed, where recomputing it is all that is needed.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        if Settings.from_env().disabled:
            self._off("KVHOIST_DISABLE is set")
            return
        self._options = self._try(lambda: ConnectorOptions.parse(self._extra_config))
        self._try(self._check)

    @property
    def scheduler_side(self) -> SchedulerSide | None:
        """The scheduler's side: None in a worker, before the handshake, and where the cache is off."""
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide | None:
        """The worker's side: None in the scheduler, before caches are registered, and where the cache is off."""
        return self._worker

    # -- classes and start ---------------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """vLLM asks before it loads a model, where it is to use full CUDA graphs: settings that cannot work are refused
        here already, unless the cache would be off because of them."""
        if extra_config.get("on_error") != "disable":
            ConnectorOptions.parse(extra_config)
        return bool(extra_config.get("layerwise", False))

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        options = self._options
        if options is None:
            return
        built = self._try(lambda: start.start_worker(self._vllm_config, self._kv_cache_config, options, kv_caches))
        if built is not None:
            self._worker, self._report = built

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._report

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._start_scheduler(metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._start_scheduler(metadata)

    def shutdown(self) -> None:
        self._close_worker()
        if self._server is not None:
            self._server.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._scheduler = None

    # -- worker --------------------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        orders = _orders(kv_connector_metadata)
        if orders.is_off:  # another rank could not start, say
            self._close_worker()
        if self._worker is not None:
            self._worker.begin_step(orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(_orders(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are offloaded by the orders of the next step."""

    def wait_for_save(self) -> None:
        """Nothing: what an offload still reads is awaited before it is written again."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._worker.end_step() or None) if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker is not None else None

    # -- scheduler -----------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._block_pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        found, loads = self._scheduler.num_new_matched_tokens(request, num_computed_tokens)
        if found is not None and self._room is not None and not self._room.admits(request, loads=loads):
            return None, False
        return found, loads

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        if self._scheduler is None or not num_external_tokens:
            return {}
        return compat.hit_sources(self._scheduler.hit_tokens_by_tier(request, num_external_tokens))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return NO_CACHE if self._scheduler is None else self._scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._room is not None:
            self._room.arrived(connector_output.finished_recving or ())
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and meta is not None:
            assert isinstance(meta, WorkerMetadata), "only this connector's workers answer it"
            self._scheduler.update_output(meta)
            untrusted = self._scheduler.take_untrusted()
            if untrusted and self._block_pool is not None:
                self._block_pool.evict_blocks(untrusted)

    def has_pending_push_work(self) -> bool:
        """Tell vLLM whether to take a step though no request needs one: an idle engine's store is to change."""
        return self._scheduler is not None and self._scheduler.stores.is_asked and self._scheduler.stores.wants_step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        said = self._scheduler.request_finished(request) if self._scheduler is not None else None
        if self._room is not None:
            self._room.forget(request.request_id)
        return False, said

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return None
        pool = self._block_pool
        in_use = pool is not None and pool.get_num_free_blocks() < pool.num_gpu_blocks - 1  # one is vLLM's null block
        return self._scheduler.reset(blocks_in_use=in_use)

    # -- metrics -------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is None:
            return CacheMetrics() if self._worker is not None and compat.NEEDS_WORKER_STATS else None
        counted = self._scheduler.take_counts()
        return CacheMetrics(counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return CacheMetrics(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return CachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- inside --------------------------------------------------------------------------------------------------

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    @property
    def _extra_config(self) -> dict[str, Any]:
        extra: dict[str, Any] = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        return extra

    def _check(self) -> None:
        if self._options is not None:
            start.served_group(self._kv_cache_config)
            start.check_engine(self._vllm_config, self._kv_cache_config, self._options)

    def _start_scheduler(self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]) -> None:
        options = self._options
        if options is not None:
            reports = [report for report in metadata.values() if isinstance(report, WorkerReport)]
            self._scheduler = self._try(
                lambda: start.start_scheduler(self._vllm_config, self._kv_cache_config, options, reports)
            )
            if self._scheduler is not None:
                self._scheduler.stores.wake = compat.engine_waker() or self._scheduler.stores.wake
                self._server = RuntimeServer.open(ServedEngine(self._scheduler))
            if not compat.KEEPS_ROOM_FOR_LOADS:
                self._room = start.room_for_loads(self._vllm_config, self._kv_cache_config)

    def _try(self, build: Callable[[], _Built]) -> _Built | None:
        """Return what `build` returns; where it raises, the cache is off or the engine does not start."""
        try:
            return build()
        except UnsupportedGeometryError as error:
            self._off(str(error))
        except Exception as error:  # no thread or no memory left, too: the user has said what then
            if self._extra_config.get("on_error") != "disable":
                _log.error("kvhoist cannot start: %s", error)
                raise
            self._off(f"{type(error).__name__}: {error}")
        return None

    def _off(self, reason: str) -> None:
        self._options = None
        if self._role is KVConnectorRole.WORKER:
            rank = self._vllm_config.parallel_config.rank
            self._report = WorkerReport(rank, self._vllm_config.parallel_config.world_size, error=reason)
        if self._role is KVConnectorRole.SCHEDULER or self._report is not None:
            _log.warning("kvhoist is off: %s", reason)


def _orders(metadata: KVConnectorMetadata) -> ConnectorMetadata:
    assert isinstance(metadata, ConnectorMetadata), "only this connector's scheduler orders its workers"
    return metadata
