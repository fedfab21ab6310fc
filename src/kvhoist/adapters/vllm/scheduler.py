"""The scheduler's side: what vLLM's scheduler asks and tells, in terms of the control plane."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from kvhoist.adapters.vllm.counts import SchedulerCounts
from kvhoist.adapters.vllm.debug_log import tell
from kvhoist.adapters.vllm.fences import Fences
from kvhoist.adapters.vllm.handover import announced_tokens, announcement, is_to_hand_over
from kvhoist.adapters.vllm.loads import Loads
from kvhoist.adapters.vllm.metadata import NO_ORDERS, ConnectorMetadata, LoadOrder, WorkerMetadata
from kvhoist.adapters.vllm.offering import Offering, blocks_over
from kvhoist.adapters.vllm.prefixes import Prefixes, Waits
from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.adapters.vllm.stores import StoreChanges
from kvhoist.control.jobs import Finished
from kvhoist.control.namespace import Namespace
from kvhoist.control.offers import Offer
from kvhoist.control.plane import ControlPlane
from kvhoist.control.policy import WriteWhen
from kvhoist.control.tiers import Tier
from kvhoist.errors import PageIdError
from kvhoist.messages import LEFT_OUT, JobKind

_log = logging.getLogger("vllm.kvhoist")


class SchedulerSide:
    """Decides for one engine, called from its scheduler only; never blocks.

    vLLM owns the device: pages are offered for offloading by the blocks of running requests, and loads fill blocks that
    vLLM has allocated. `loads` and `offers` say what the engine's role allows; with `sync` loads happen within the
    step that needs them. `group_id` is the index of the served group in vLLM's lists of blocks.
    """

    def __init__(
        self,
        plane: ControlPlane,
        namespace: Namespace,
        shape: PageShape,
        waits: Waits,
        *,
        group_id: int,
        num_held_back: int,
        loads: bool = True,
        offers: bool = True,
        sync: bool = False,
        audit_every_s: float | None = None,
        address: str | None = None,
    ) -> None:
        self.plane = plane
        self.stores = StoreChanges(plane, address)
        self.counts = SchedulerCounts(plane)
        self._shape = shape
        self._group_id = group_id
        self._audit_every_s = audit_every_s
        self._next_audit = time.monotonic()
        self._loads, self._offers, self._sync = loads, offers, sync
        self._prefixes = Prefixes(plane, shape, waits, num_held_back=num_held_back, clock=time.monotonic)
        self._states: dict[str, RequestState] = {}
        self._fences = Fences()
        self._offering = Offering(shape, self._fences, group_id=group_id)
        self._open_loads = Loads()
        self._device_is_stale = False
        self._untrusted: set[int] = set()
        self._namespace = namespace
        self._space = plane.space(namespace)
        self._tell_namespace = True

    @property
    def namespace(self) -> Namespace:
        """The namespace in use: another one after each reset."""
        return self._namespace

    # -- what vLLM asks ------------------------------------------------------------------------------------------

    def num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `num_computed_tokens` can be loaded (None: ask again later), and whether the
        request waits outside of the batch meanwhile."""
        state = self._state(request)
        state.offers = not (self._device_is_stale and num_computed_tokens)  # it begins anew
        if not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        if self._is_brought(state, num_computed_tokens):  # first: many may wait for one load, and ask in each step
            return None, False
        found = self._prefixes.find(self._space, state, num_computed_tokens)
        if found is not None and self._is_held_back(state, found.stop // self._shape.blocks_per_page):
            self._offer(self._offering.take_ended())
            found = self._prefixes.find(self._space, state, num_computed_tokens)
        if found is None or (found and self._is_brought(state, num_computed_tokens)):
            return None, False
        state.found_blocks = found
        self.counts.look_up(self._space, state, self._shape)
        tell(self.plane, self._space, self._shape, state, num_computed_tokens)
        return len(found) * self._shape.block_tokens, bool(found) and not self._sync

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Start the load that was promised, into the blocks that vLLM allocated for it."""
        state = self._states.get(request.request_id)
        if state is None or not num_external_tokens:
            return
        per_page = self._shape.blocks_per_page
        wanted = state.found_blocks[: num_external_tokens // self._shape.block_tokens]
        first, last = wanted.start // per_page, self._shape.pages_of(wanted.stop)
        ids = blocks.get_block_ids()[self._group_id]
        before, after = [LEFT_OUT] * (wanted.start - first * per_page), [LEFT_OUT] * (last * per_page - wanted.stop)
        device_blocks = [*before, *ids[wanted.start : wanted.stop], *after]
        job = self.plane.load(self._space, state.keys, first, last, device_blocks, for_whom=request.request_id)
        assert job is not None, "a range of pages that were found ready is not empty"
        state.stop()
        state.load_job = job.id
        fetched = range(max(state.prefetched.start, first) - first, min(state.prefetched.stop, last) - first)
        self._open_loads.open(LoadOrder(job, request.request_id, self._sync), fetched)
        self._fences.given += ids[wanted.start : wanted.stop]

    def hit_tokens_by_tier(self, request: Any, num_external_tokens: int) -> dict[Tier, int]:
        """Return from which tiers the tokens of the load just started come; they add up to `num_external_tokens`."""
        state, num_blocks = self._states[request.request_id], num_external_tokens // self._shape.block_tokens
        return self.counts.tokens_by_tier(state, state.found_blocks[:num_blocks], self._shape)

    def build_meta(self, output: Any) -> ConnectorMetadata:
        """Return the orders of the step that `output` describes."""
        if output.scheduled_new_reqs or output.scheduled_cached_reqs.req_ids:
            for state in self._offering.note_scheduled(output, self._states):
                self.counts.scheduled(state)
                self._prefixes.release(state)
        if self._offering:
            self._offer(self._offering.take(output.num_scheduled_tokens))
        jobs = self.plane.take_jobs()
        loads = []
        others = []
        for job in jobs:
            if job.kind is JobKind.LOAD:
                loads.append(self._open_loads.order(job.id))
                continue
            others.append(job)
            if job.kind is JobKind.OFFLOAD:
                self._fences.open(job)
        fences = self._fences.take_readers()
        told, self._tell_namespace = self._tell_namespace, False
        store = self.stores.next_order() if self.stores.is_asked else None
        cancels = self.plane.flights.take_cancels()
        if not jobs and not fences and not told and not cancels and store is None:
            return NO_ORDERS
        fields = self._namespace.field_dict() if told else None
        return ConnectorMetadata(tuple(others), tuple(loads), tuple(fences), tuple(cancels), fields, store)

    def update_output(self, meta: WorkerMetadata | None) -> None:
        """Book what the workers have done."""
        if meta is None:
            return
        self.counts.add(meta.counts)
        if meta.stores:
            self.stores.answered(meta.stores)
        for completion in meta.completions:
            finished = self.plane.complete(completion)
            if finished is not None:
                self._settle(finished)
        if self._audit_every_s is not None and time.monotonic() >= self._next_audit:
            self._next_audit = time.monotonic() + self._audit_every_s
            self._audit()

    def take_counts(self) -> dict[str, float]:
        """Return what is to be told to the metrics now: with no request left, all, since a next step may never come."""
        return self.counts.take(idle=not self._states)

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Offer the last full pages of a request with the next step's; vLLM may free its blocks at once. Returns what
        is to be said to the engine that goes on with the request, None where there is none."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        self._prefixes.release(state)
        self._offering.end(state)
        all_go_to_storage = self.plane.persists and self.plane.policy.when is WriteWhen.WRITE_THROUGH
        if not (self._offers and state.offers and all_go_to_storage and is_to_hand_over(request)):
            return None
        return announcement(state.next_page * self._shape.page_tokens)

    def reset(self, *, blocks_in_use: bool = False) -> bool:
        """Forget everything and begin a new namespace: what was cached is of other weights now. False where a load of
        old pages is under way, which cannot be taken back; everything else is done then, too.

        `blocks_in_use`: vLLM could not reset its device, since blocks are in use: maybe only by steps under way, of
        requests that have ended."""
        fields = {**self._namespace.field_dict(), "reset": str(uuid.uuid4())}
        self.plane.lookups.forget()
        self.plane.directory.drop_space(self._space)
        self._namespace = Namespace.from_fields(fields)
        self._space = self.plane.space(self._namespace)
        self._tell_namespace = True
        self._offering.forget()
        held = bool(self._open_loads) or any(state.holds_blocks for state in self._states.values())
        self._device_is_stale = held or blocks_in_use
        for state in self._states.values():
            state.offers = False  # until it begins anew
            self._prefixes.release(state)
            state.asked_storage, state.prefetched = False, range(0)
        return not self._open_loads

    def take_untrusted(self) -> set[int]:
        """Return the device blocks that hold wrong bytes since the last call: vLLM must not find them any more."""
        untrusted, self._untrusted = self._untrusted, set()
        return untrusted

    def close(self) -> None:
        """Check the books and forget the requests. Logs what does not add up."""
        for state in self._states.values():
            self._prefixes.release(state)
        self._audit()
        self.stores.close()
        self._states.clear()
        self._offering.forget()

    # -- inside --------------------------------------------------------------------------------------------------

    def _audit(self) -> None:
        try:
            self.plane.audit()
        except PageIdError:
            self.counts.add({"audit_failures": 1.0})
            _log.exception("kvhoist: the books of the cache do not add up")

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = RequestState(request, announced_tokens(request))
        return state

    def _is_brought(self, state: RequestState, num_computed_tokens: int) -> bool:
        """Tell whether another request's load brings the first page to load, as far as keys are known: its blocks will
        be a local hit."""
        page_tokens = self._shape.page_tokens
        page = num_computed_tokens // page_tokens
        return (
            page < len(state.keys)
            and self._open_loads.brings(state.keys[page])
            and (page + 1) * page_tokens < state.request.num_tokens
            and state.loads
        )

    def _is_held_back(self, state: RequestState, page: int) -> bool:
        """Tell whether a page that the tiers lack is one that a request left which ended since the last step."""
        return page < len(state.keys) and self._offering.has_ended(state.keys[page])

    def _offer(self, offers: Sequence[Offer]) -> None:
        if offers and self._offers:
            self.plane.write_all(self._space, offers)

    def _distrust(self, order: LoadOrder, failed_pages: Iterable[int]) -> None:
        """Offer nothing that a step computed over blocks which its load did not bring, and let vLLM find none of it.
        vLLM computes again what the request itself had; of one that ended meanwhile, or shares these blocks and so goes
        on, it does not, and it leaves all of it in its prefix cache."""
        per_page, blocks = self._shape.blocks_per_page, order.job.device_blocks
        wrong = {block for page in failed_pages for block in blocks[page * per_page : (page + 1) * per_page]}
        self._untrusted |= wrong | self._offering.drop_ended(wrong)
        self._untrusted.discard(LEFT_OUT)
        for name, state in self._states.items():
            over = blocks_over(wrong, state.blocks)
            self._untrusted.update(over)
            if over and name != order.request_id:
                state.offers = False  # until it begins anew

    def _settle(self, finished: Finished) -> None:
        job = finished.job
        if job.kind is JobKind.OFFLOAD:
            self._fences.close(job.id)
        failed = [job.keys[i] for i in finished.failed_pages]
        if job.kind in (JobKind.OFFLOAD, JobKind.PREFETCH):
            self._prefixes.accept(job.keys)
            self.counts.failed(failed if not finished.cancelled else ())
        if job.kind is not JobKind.LOAD:
            return
        order, fetched = self._open_loads.close(job.id)
        self.counts.loaded(job, fetched, finished.failed_pages, self._shape)
        state = self._states.get(order.request_id)
        if state is not None and state.load_job == job.id:
            state.load_job = None
        if failed:
            if order.sync:
                self._distrust(order, finished.failed_pages)
            self._prefixes.refuse(failed)
            self.counts.failed(failed)
            if state is not None:
                state.loads = False
            _log.warning(
                "%d of %d pages could not be loaded for request %s and are recomputed: %s",
                len(failed),
                job.num_pages,
                order.request_id,
                finished.error,
            )
