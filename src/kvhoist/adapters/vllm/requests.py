"""What the scheduler's side remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhoist.control.pins import Pins
from kvhoist.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PageShape:
    """How vLLM's blocks and hashes make pages: tokens of a block, blocks of a page, block hashes of a page."""

    block_tokens: int
    blocks_per_page: int
    hashes_per_page: int

    @classmethod
    def of(
        cls, block_tokens: int, hash_tokens: int, blocks_per_page: int | None, *, least_tokens: int = 64
    ) -> PageShape:
        """Return the shape with `blocks_per_page`, or with the fewest blocks that hold `least_tokens`. A page hash is
        the last of its block hashes, which vLLM makes every `hash_tokens` tokens. Raises ConfigError where a block is
        no whole number of hashes."""
        if block_tokens % hash_tokens:
            raise ConfigError(
                "a block is no whole number of block hashes",
                got=f"blocks of {block_tokens} tokens, a hash every {hash_tokens}",
            )
        blocks = blocks_per_page or -(-least_tokens // block_tokens)
        return cls(block_tokens, blocks, blocks * (block_tokens // hash_tokens))

    @property
    def page_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_page

    def pages_of(self, num_blocks: int) -> int:
        """Return how many pages `num_blocks` blocks reach into."""
        return -(-num_blocks // self.blocks_per_page)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request of vLLM, from its first look-up to its end.

    `keys` are the chain hashes of its whole pages so far, `blocks` its device blocks while it runs, `next_page` the
    first page not offered for offloading since it last began to run; `offers` tells whether its blocks hold KV of the
    namespace in use, so that pages may be offered at all. `found_blocks` is the range of blocks that the
    last look-up promised, `missed` why and how many tokens it did not find. `pins` hold the host pages that came while
    it waited for them. A request that `load_job` brings a prefix for does not run.

    Another engine is bringing its first `announced_tokens` tokens to storage, which was asked for the pages from
    `asked_page` on, and may be asked again from `asks_at` to `patient_until`.
    """

    request: Any
    announced_tokens: int = 0
    keys: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    next_page: int = 0
    running: bool = False
    offers: bool = True
    loads: bool = True
    found_blocks: range = range(0)
    load_job: int | None = None
    waits_for: int | None = None
    deadline: float | None = None
    asked_storage: bool = False
    asked_page: int = 0
    asks_at: float = 0.0
    patient_until: float = 0.0
    late: bool = False
    pins: Pins | None = None
    prefetched: range = range(0)
    missed: tuple[str, int] | None = None
    told: bool = False

    @property
    def holds_blocks(self) -> bool:
        """Whether vLLM keeps blocks for the request: it runs, or is loading, or waits with a part of it computed."""
        return self.load_job is not None or self.request.num_computed_tokens > 0

    def update_keys(self, hashes_per_page: int) -> list[bytes]:
        """Add the keys of pages that became whole, and return all keys."""
        hashes, keys = self.request.block_hashes, self.keys
        known = len(keys) * hashes_per_page
        if known and (len(hashes) < known or hashes[known - 1] != keys[-1]):
            keys.clear()  # a streaming session that went on from other tokens
            known = 0
        if len(hashes) >= known + hashes_per_page:
            keys += hashes[known + hashes_per_page - 1 :: hashes_per_page]
        return keys

    def run(self, blocks: Sequence[int]) -> None:
        """Begin to run on `blocks`, whose pages are all to be offered (again)."""
        self.blocks = list(blocks)
        self.next_page = 0
        self.running = True
        self.load_job = None
        self.asked_storage, self.late, self.prefetched = False, False, range(0)
        self.announced_tokens = 0

    def stop(self) -> None:
        """Own no blocks that may be read."""
        self.blocks = []
        self.running = False

    def num_computed_pages(self, page_tokens: int) -> int:
        """Count the whole pages whose KV earlier steps computed, of confirmed tokens. Tokens that were only speculated
        are beyond `num_tokens`; what earlier steps wrote below it was written last with the confirmed tokens."""
        request = self.request
        return int(min(request.num_computed_tokens, request.num_tokens)) // page_tokens
