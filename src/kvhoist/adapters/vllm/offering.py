"""Which pages requests have filled since they were last offered for offloading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvhoist.adapters.vllm.fences import Fences
from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.control.offers import Offer


class Offering:
    """Follows the blocks of requests from step to step. Not thread-safe.

    All that became full since the last step makes one list of offers, hence one job: a job costs the scheduler as much
    as ten pages do.
    """

    def __init__(self, shape: PageShape, fences: Fences, *, group_id: int) -> None:
        self._shape = shape
        self._fences = fences
        self._group_id = group_id
        self._due: dict[str, RequestState] = {}
        self._begun: dict[str, RequestState] = {}
        self._ended: list[Offer] = []

    def __len__(self) -> int:
        """Return how many requests have, or may have, something to offer."""
        return len(self._due) + len(self._begun) + len(self._ended)

    def note_scheduled(self, output: Any, states: Mapping[str, RequestState]) -> list[RequestState]:
        """Take over the blocks that requests of this step have been given. Returns those that begin to run."""
        block_tokens, page_tokens, group = self._shape.block_tokens, self._shape.page_tokens, self._group_id
        begun = []
        for new in output.scheduled_new_reqs:
            state = states.get(new.req_id)
            if state is not None:
                self._run(state, new.block_ids[group], new.num_computed_tokens // block_tokens)
                begun.append(state)
        cached = output.scheduled_cached_reqs
        for i in [i for i, new_blocks in enumerate(cached.new_block_ids) if new_blocks is not None]:
            request_id = cached.req_ids[i]
            state = states.get(request_id)
            if state is None:
                continue
            ids, num_computed = cached.new_block_ids[i][group], cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                self._run(state, ids, num_computed // block_tokens)
                begun.append(state)
                continue
            state.blocks += ids
            self._fences.given += ids
            if (num_computed + output.num_scheduled_tokens[request_id]) // page_tokens > state.next_page:
                self._due[request_id] = state
        return begun

    def take(self, num_scheduled_tokens: Mapping[str, int]) -> list[Offer]:
        """Return the pages that earlier steps filled, and keep the requests of which this step fills one."""
        offers, self._ended = self._ended, []
        page_tokens, due = self._shape.page_tokens, self._begun
        for request_id, state in self._due.items():
            offers += self._filled(state)
            computed = state.request.num_computed_tokens + num_scheduled_tokens.get(request_id, 0)
            if computed // page_tokens > state.next_page:
                due[request_id] = state
        self._due, self._begun = due, {}
        return offers

    def end(self, state: RequestState) -> None:
        """Take over the last full pages of a request, whose blocks vLLM may free at once: the next step fences them."""
        request_id = state.request.request_id
        self._due.pop(request_id, None)
        self._begun.pop(request_id, None)
        if state.running:
            self._ended += self._filled(state)

    def forget(self) -> None:
        """Offer nothing of what was filled so far."""
        self._due.clear()
        self._begun.clear()
        self._ended.clear()

    def _run(self, state: RequestState, blocks: Sequence[int], num_computed_blocks: int) -> None:
        state.run(blocks)
        self._fences.given += blocks[num_computed_blocks:]
        # Its local hits may be blocks that another request of this very step computes: they are offered from the next
        # step on.
        self._due.pop(state.request.request_id, None)
        self._begun[state.request.request_id] = state

    def _filled(self, state: RequestState) -> list[Offer]:
        """Return the pages that were filled since the last call, as an offer; none where there are none to offer."""
        shape, first = self._shape, state.next_page
        stop = min(state.num_computed_pages(shape.page_tokens), len(state.blocks) // shape.blocks_per_page)
        state.next_page = max(first, stop)
        if stop <= first or not state.offers:
            return []
        keys = state.update_keys(shape.hashes_per_page)
        if len(keys) < stop:
            return []
        blocks = state.blocks[first * shape.blocks_per_page : stop * shape.blocks_per_page]
        return [Offer(keys, first, stop, blocks, state.request.request_id)]
