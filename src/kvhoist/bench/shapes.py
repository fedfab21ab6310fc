"""The caches that copies are measured on."""

from __future__ import annotations

from dataclasses import dataclass

from kvhoist.geometry import CacheGeometry, CacheGroup

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """K and V rows, or latent ones, in blocks of `block_tokens`, pages of 64 tokens."""

    latent: bool
    row_bytes: int
    layers: int
    block_tokens: int = PAGE_TOKENS

    def __str__(self) -> str:
        blocks = "" if self.block_tokens == PAGE_TOKENS else f", blocks of {self.block_tokens}"
        return f"{'MLA' if self.latent else 'MHA'} {self.row_bytes} B x {self.layers}{blocks}"

    @property
    def group(self) -> CacheGroup:
        blocks = PAGE_TOKENS // self.block_tokens
        if self.latent:
            made = CacheGeometry.latent(
                self.layers, row_bytes=self.row_bytes, page_tokens=PAGE_TOKENS, blocks_per_page=blocks
            )
        else:
            rows = {"k_row_bytes": self.row_bytes, "v_row_bytes": self.row_bytes}
            made = CacheGeometry.attention(self.layers, **rows, page_tokens=PAGE_TOKENS, blocks_per_page=blocks)
        return made.groups[0]


SMOKE = (Shape(False, 512, 4), Shape(True, 576, 4, 16))

HEADLINE = Shape(False, 1024, 32)
"""What single measurements use: 8 KV heads of 64 in bf16, 32 layers, 4 MiB a page."""


def table_shapes() -> list[Shape]:
    """Return the shapes of the incumbents' tables, whole pages and vLLM's blocks of 16 tokens."""
    whole = [(False, (512, 1024, 2048, 4096)), (True, (512, 576, 1024, 1152, 2048, 4096))]
    found = [Shape(kind, row, n) for kind, rows in whole for row in rows for n in (16, 32, 61, 80)]
    blocks = [(False, 512, 32), (False, 1024, 32), (False, 2048, 32), (True, 576, 61), (True, 1152, 61)]
    return found + [Shape(*shape, 16) for shape in blocks]
