"""The side of one worker: takes the scheduler's orders, moves the bytes, reports what became of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping

from kvhoist.adapters.vllm import compat
from kvhoist.adapters.vllm.caches import RegisteredCaches
from kvhoist.adapters.vllm.metadata import ConnectorMetadata, LoadOrder, StoreAct, StoreAnswer, WorkerMetadata
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.adapters.vllm.ranks import Place
from kvhoist.adapters.vllm.worker_stores import WorkerStores
from kvhoist.affinity import start
from kvhoist.attached_store import AttachedStore
from kvhoist.control.namespace import Namespace, nearest_difference
from kvhoist.errors import KvhoistError, TransferError
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import touch_threads
from kvhoist.messages import LEFT_OUT, Completion, Job, JobKind
from kvhoist.mover import Mover
from kvhoist.platform.base import Event, Stream
from kvhoist.platform.open import open_platform
from kvhoist.transfer import Transfer

_log = logging.getLogger("vllm.kvhoist")


class WorkerSide:
    """The data plane of one rank. Called from the thread that runs the model; the copies run in the mover's threads.

    Owns the host arena, the mover and the stores. `close` gives them back.
    """

    def __init__(self, caches: RegisteredCaches, options: ConnectorOptions, place: Place, host_bytes: int) -> None:
        """Map `host_bytes` of host memory and open the store. Raises HostMemoryError, ConfigError and what opening a
        store raises, having kept nothing."""
        self._group = caches.group
        self._layer_of = caches.layer_of
        self._options = options
        self._rank = place.rank
        self._platform = open_platform(caches.device.device)
        self._done: deque[Completion] = deque()
        self._offloads: dict[int, Transfer] = {}
        self._loads: dict[int, LoadOrder] = {}
        self._sync: dict[int, Transfer] = {}
        self._waited: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._unreported: list[Completion] = []
        self._store_answers: tuple[StoreAnswer, ...] = ()
        self._fields: Mapping[str, str] = {}
        self._num_mismatches = 0
        self._closing = False
        with contextlib.ExitStack() as undo:
            self.arena = HostArena(
                caches.group,
                host_bytes=host_bytes,
                first_touch_threads=touch_threads(self._platform),
                allocate=self._platform.allocate_host,
            )
            undo.callback(self.arena.close)
            self.stores = WorkerStores(options, self.arena, place.rank)
            undo.callback(self.stores.close, drain=False, timeout_s=options.drain_timeout_s)
            self._mover = Mover(
                caches.group,
                caches.device,
                self.arena,
                platform=self._platform,
                on_complete=self._done.append,
                rank=place.rank,
                shard=place.shard,
                io_backend=options.io_backend,
                staging_bytes=options.staging_bytes,
                block_quota=options.block_quota,
                debug_verify=options.debug_verify,
                persists=place.persists,
                early_persist=True,
            )
            attached = self.stores.current
            if attached is not None:
                self._mover.attach(attached.io, early=attached.persists)
            undo.pop_all()

    # -- in the order of a step ----------------------------------------------------------------------------------

    def begin_step(self, meta: ConnectorMetadata) -> None:
        """Before anything of the step is written: start what does not depend on it, and wait for offloads that read
        blocks which the step gives away."""
        if meta.namespace is not None:
            self._fields = meta.namespace
            self._note()
        if meta.jobs:
            after = self._engine_point()
            for job in meta.jobs:
                self._submit(job, after)
        for job_id in meta.cancels:
            self._mover.cancel(job_id)
        if meta.store is not None:
            self.stores.obey(meta.store, self._mover)
            if meta.store.act is StoreAct.USE:
                self._note()
        for job_id in meta.fences:
            transfer = self._offloads.get(job_id)
            if transfer is not None:
                self._await_read(transfer)

    def start_loads(self, meta: ConnectorMetadata) -> None:
        """Start the step's loads, after all that the engine has put into its stream so far."""
        if not meta.loads:
            return
        after = self._engine_point()
        for order in meta.loads:
            self._loads[order.job.id] = order
            transfer = self._submit(order.job, after)
            if order.sync and transfer is not None:
                self._sync[order.job.id] = transfer

    def wait_for_layer(self, layer_name: str) -> None:
        """Block until the loads that this step needs have brought a layer. A failure shows at the step's end."""
        if not self._sync:
            return
        self._waited.add(layer_name)
        layer = self._layer_of.get(layer_name)
        stream = self._engine_stream()
        for transfer in self._sync.values():
            with contextlib.suppress(TransferError):
                transfer.wait(layer, stream=stream)

    def end_step(self) -> set[str]:
        """Take note of what is done; returns the requests whose loads outside of the batch are over."""
        self._end_sync_loads()
        self._store_answers += self.stores.take_answers()  # first: jobs of a store are answered before it is given up
        arrived = set()
        while self._done:
            completion = self._done.popleft()
            self._unreported.append(completion)
            self._offloads.pop(completion.id, None)
            order = self._loads.pop(completion.id, None)
            if order is None:
                continue
            per_page = self._group.blocks_per_page
            for page in completion.failed_pages:
                blocks = order.job.device_blocks[page * per_page : (page + 1) * per_page]
                self._failed_blocks.update(block for block in blocks if block != LEFT_OUT)
            if not order.sync:
                arrived.add(order.request_id)
        return arrived

    def take_failed_blocks(self) -> set[int]:
        """Return the device blocks that loads did not bring, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerMetadata | None:
        """Return what is to be told to the scheduler, None for nothing."""
        counts = {}
        if self._mover.num_mismatches > self._num_mismatches:
            counts["mismatched_pages"] = float(self._mover.num_mismatches - self._num_mismatches)
            self._num_mismatches = self._mover.num_mismatches
        if not self._unreported and not counts and not self._store_answers:
            return None
        completions, self._unreported = tuple(self._unreported), []
        answers, self._store_answers = self._store_answers, ()
        return WorkerMetadata(completions, counts, answers)

    def close(self) -> None:
        """Let what is on its way to storage arrive, for `drain_timeout_s`, and release everything."""
        self._closing = True
        timeout_s = self._options.drain_timeout_s
        deadline = time.monotonic() + timeout_s
        ended = self._mover.close(drain=True, timeout_s=timeout_s)
        ended = self.stores.close(drain=ended, timeout_s=max(0.0, deadline - time.monotonic())) and ended
        if ended:
            self.arena.close()
        else:
            _log.warning("kvhoist: pages were still under way after %.1f s at shutdown and are lost", timeout_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _submit(self, job: Job, after: Event | None) -> Transfer | None:
        try:
            transfer = self._mover.submit(job, after=after)
        except KvhoistError as error:
            self._done.append(Completion.failed(job, self._mover.rank, f"{type(error).__name__}: {error}"))
            return None
        if job.kind is JobKind.OFFLOAD:
            self._offloads[job.id] = transfer
        return transfer

    def _end_sync_loads(self) -> None:
        """Wait for the loads of this step. Where a layer never waited, it may have read too early: they failed then."""
        if not self._sync:
            return
        for transfer in self._sync.values():
            transfer.result()
        unwaited = set(self._layer_of) - self._waited
        if unwaited:
            _log.error("kvhoist: layerwise loads need vLLM's hook in every layer; %s called none", sorted(unwaited)[0])
            for job_id in self._sync:
                self._failed_blocks.update(block for block in self._loads[job_id].job.device_blocks if block >= 0)
        self._sync.clear()
        self._waited.clear()

    def _engine_point(self) -> Event | None:
        """Return the point that the engine's stream has reached; None where work is done when its call returns."""
        stream = self._engine_stream()
        return None if stream is None else self._platform.record(stream)

    def _engine_stream(self) -> Stream | None:
        """Return the stream that the model runs in; None where work is done when its call returns."""
        if not self._platform.capabilities.asynchronous:
            return None
        return self._platform.wrap_stream(compat.current_stream_handle())

    def _await_read(self, transfer: Transfer) -> None:
        """Let what the engine writes from now on come after an offload that reads the same blocks."""
        stream = self._engine_stream()
        if stream is None:
            transfer.result()
        else:
            transfer.wait_read(stream)

    def _note(self) -> None:
        """Let one rank note in the store what the namespace stands for, and say where the store has only others."""
        attached = self.stores.current
        if attached is None or self._rank != 0:
            return
        arguments = dict(self._fields), attached
        start(threading.Thread(target=self._tell_namespace, args=arguments, name="kvhoist-namespace", daemon=True))

    def _tell_namespace(self, fields: Mapping[str, str], attached: AttachedStore) -> None:
        try:
            known = attached.store.namespaces()
            attached.io.note_namespace(Namespace.from_fields(fields).digest, fields)
        except Exception:
            if self._closing or attached is not self.stores.current:
                return
            _log.warning("kvhoist: the store cannot say which namespaces it holds", exc_info=True)
            return
        differing = None if "reset" in fields else nearest_difference(fields, known.values())
        if differing is not None:
            _log.warning(
                "kvhoist: the store holds pages of other namespaces only: no hits from it; the nearest differs in %s",
                differing,
            )
