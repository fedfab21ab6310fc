"""Which pages requests have filled since they were last offered for offloading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from kvhoist.adapters.vllm.fences import Fences
from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.control.offers import Offer

_ENOUGH_PAGES = 16
_MOST_STEPS = 4


class Offering:
    """Follows the blocks of requests from step to step. Not thread-safe.

    Pages of several requests and steps are offered together, hence in one job, which costs the scheduler as much as
    ten pages do: at once where there are _ENOUGH_PAGES or a request has ended, else after _MOST_STEPS steps.
    """

    def __init__(self, shape: PageShape, fences: Fences, *, group_id: int) -> None:
        self._shape = shape
        self._fences = fences
        self._group_id = group_id
        self._due: dict[str, RequestState] = {}
        self._begun: dict[str, RequestState] = {}
        self._ended: list[Offer] = []
        self._ended_keys: set[bytes] = set()
        self._ended_blocks: list[Sequence[int]] = []
        self._num_pages = 0
        self._num_steps = 0

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
                self._num_pages += max(0, num_computed // page_tokens - state.next_page)
        return begun

    def take(self, num_scheduled_tokens: Mapping[str, int]) -> list[Offer]:
        """Return the pages that earlier steps filled, once they are enough, and keep the requests of which this step
        fills one."""
        self._num_steps += 1
        self._ended_blocks.clear()
        if not self._ended and self._num_pages < _ENOUGH_PAGES and self._num_steps < _MOST_STEPS:
            self._begin(num_scheduled_tokens)
            return []
        self._num_pages = self._num_steps = 0
        offers = self.take_ended()
        page_tokens = self._shape.page_tokens
        due, self._due = self._due, {}
        for request_id, state in due.items():
            offers += self._filled(state)
            computed = state.request.num_computed_tokens + num_scheduled_tokens.get(request_id, 0)
            if computed // page_tokens > state.next_page:
                self._due[request_id] = state
                self._num_pages += computed // page_tokens - state.next_page
        self._begin(num_scheduled_tokens)
        return offers

    def end(self, state: RequestState) -> None:
        """Take over the last full pages of a request, whose blocks vLLM may free at once: the next step fences them."""
        request_id = state.request.request_id
        self._due.pop(request_id, None)
        self._begun.pop(request_id, None)
        if state.running:
            for offer in self._filled(state):
                self._ended.append(offer)
                self._ended_keys.update(offer.keys[offer.start : offer.stop])

    def has_ended(self, key: bytes) -> bool:
        """Tell whether the page is one of those that ended requests left to offer."""
        return key in self._ended_keys

    def take_ended(self) -> list[Offer]:
        """Return the pages that ended requests left to offer, before the step that would."""
        offers, self._ended = self._ended, []
        self._ended_keys.clear()
        return offers

    def drop_ended(self, blocks: Set[int]) -> set[int]:
        """Offer nothing of requests that ended since the last step and read one of `blocks`. Returns all blocks that
        they computed over these."""
        offers = [offer for offer in self.take_ended() if blocks.isdisjoint(offer.device_blocks)]
        for offer in offers:
            self._ended.append(offer)
            self._ended_keys.update(offer.keys[offer.start : offer.stop])
        return set().union(*(blocks_over(blocks, held) for held in self._ended_blocks))

    def forget(self) -> None:
        """Offer nothing of what was filled so far."""
        self._due.clear()
        self._begun.clear()
        self.take_ended()

    def _begin(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Let the next step offer what requests bring that began with this one. Their local hits may be blocks that
        another request of this very step computes."""
        if self._begun:
            page_tokens = self._shape.page_tokens
            for request_id, state in self._begun.items():
                computed = state.request.num_computed_tokens + num_scheduled_tokens.get(request_id, 0)
                self._num_pages += computed // page_tokens
            self._due.update(self._begun)
            self._begun.clear()

    def _run(self, state: RequestState, blocks: Sequence[int], num_computed_blocks: int) -> None:
        state.run(blocks)
        self._fences.given += blocks[num_computed_blocks:]
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


def blocks_over(wrong: Set[int], blocks: Sequence[int]) -> Sequence[int]:
    """Return those of a request's blocks that hold what was computed over one of `wrong`, which are among them."""
    first = next((i for i, block in enumerate(blocks) if block in wrong), len(blocks))
    return blocks[first:]
