"""What a page is: components, cache groups, and the byte counts that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvhoist.errors import GeometryError, UnsupportedGeometryError
from kvhoist.model_config import ModelCache, read_model_config
from kvhoist.units import format_bytes, round_up

HOST_PAGE_ALIGNMENT = 4096
"""Host pages start at multiples of this many bytes: the unit of O_DIRECT and of the kernel's own pages."""

_MAX_LAYERS = 4096
_MAX_ROW_BYTES = 1 << 30
_MAX_PAGE_TOKENS = 1 << 20
_MAX_PAGE_BYTES = 1 << 34


@dataclass(frozen=True, slots=True)
class Reuse:
    """When a page may serve another request: `prefix` (all tokens before it are the same), `window(n)` (only the last
    `n` tokens are needed), `snapshot` (a state after all tokens before it). Only `prefix` is served today."""

    kind: str = "prefix"
    window_tokens: int | None = None

    def __str__(self) -> str:
        return f"window({self.window_tokens})" if self.kind == "window" else self.kind


PREFIX = Reuse("prefix")
SNAPSHOT = Reuse("snapshot")


def window(num_tokens: int) -> Reuse:
    """Return the reuse rule of sliding-window attention over `num_tokens`."""
    return Reuse("window", num_tokens)


@dataclass(frozen=True, slots=True)
class Component:
    """One family of rows: `row_bytes` contiguous bytes hold `tokens_per_row` tokens of one layer, for each of `layers`.

    K and V are two components, MLA is one (`latent`), an opaque block is one whose row is the engine's whole block.
    Raises GeometryError for an empty name, no or repeated layers, and sizes that are not positive or absurd.
    """

    name: str
    layers: tuple[int, ...]
    row_bytes: int
    tokens_per_row: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise GeometryError("a component without a name", expected="a name such as 'k', 'v', 'latent', 'block'")
        _check_int(f"{self.name}.row_bytes", self.row_bytes, _MAX_ROW_BYTES)
        _check_int(f"{self.name}.tokens_per_row", self.tokens_per_row, _MAX_PAGE_TOKENS)
        object.__setattr__(self, "layers", tuple(self.layers))
        ordered = all(isinstance(layer, int) for layer in self.layers) and list(self.layers) == sorted(set(self.layers))
        if not self.layers or not ordered or self.layers[0] < 0 or len(self.layers) > _MAX_LAYERS:
            raise GeometryError(
                f"component {self.name!r} does not list its layers",
                got=self.layers,
                expected=f"1 to {_MAX_LAYERS} layer indices, ascending, each once",
            )


@dataclass(frozen=True)
class CacheGroup:
    """Components that share page ids and one reuse rule. A page is `page_tokens` tokens of all of them, and lies on the
    device in `blocks_per_page` blocks whose ids need not be adjacent.

    Raises GeometryError for sizes that do not divide, UnsupportedGeometryError for a reuse rule other than `prefix`.
    """

    components: tuple[Component, ...]
    page_tokens: int
    blocks_per_page: int = 1
    reuse: Reuse = PREFIX

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", tuple(self.components))
        _check_int("page_tokens", self.page_tokens, _MAX_PAGE_TOKENS)
        _check_int("blocks_per_page", self.blocks_per_page, self.page_tokens)
        names = [component.name for component in self.components]
        if not names or len(set(names)) != len(names):
            raise GeometryError(
                "a cache group needs components", got=names, expected="at least one, of different names"
            )
        if self.reuse.kind != PREFIX.kind:
            raise UnsupportedGeometryError(
                "this cache group's reuse rule is not served yet",
                got=self.reuse,
                choices=[PREFIX],
                remedy="Leave window and state layers to the engine and describe only its full-attention layers.",
            )
        if self.page_tokens % self.blocks_per_page:
            raise GeometryError(
                "a page is not a whole number of tokens a block",
                got=f"page_tokens={self.page_tokens}, blocks_per_page={self.blocks_per_page}",
                expected="page_tokens to be a multiple of blocks_per_page",
            )
        for component in self.components:
            if self.block_tokens % component.tokens_per_row:
                raise GeometryError(
                    f"a block is not a whole number of rows of {component.name!r}",
                    got=f"block of {self.block_tokens} tokens, tokens_per_row={component.tokens_per_row}",
                    expected="the tokens of a block to be a multiple of tokens_per_row",
                )
        if self.page_bytes > _MAX_PAGE_BYTES:
            raise GeometryError(
                "a page is too large",
                got=format_bytes(self.page_bytes),
                expected=f"at most {format_bytes(_MAX_PAGE_BYTES)}",
                remedy="Use a smaller page_tokens.",
            )

    @property
    def block_tokens(self) -> int:
        """Tokens in one device block."""
        return self.page_tokens // self.blocks_per_page

    def rows_per_block(self, component: Component) -> int:
        return self.block_tokens // component.tokens_per_row

    def rows_per_page(self, component: Component) -> int:
        return self.page_tokens // component.tokens_per_row

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """All layers that have a component here, ascending."""
        return tuple(sorted({layer for component in self.components for layer in component.layers}))

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page: all components, layers and rows, without padding. This is a blob's length."""
        return sum(len(c.layers) * self.rows_per_page(c) * c.row_bytes for c in self.components)

    @property
    def page_pitch_bytes(self) -> int:
        """Bytes from one host page to the next: `page_bytes` rounded up to HOST_PAGE_ALIGNMENT."""
        return round_up(self.page_bytes, HOST_PAGE_ALIGNMENT)

    def component(self, name: str) -> Component:
        """Return the component called `name`. Raises GeometryError for an unknown one."""
        for component in self.components:
            if component.name == name:
                return component
        raise GeometryError("no such component", got=repr(name), choices=[c.name for c in self.components])

    def describe(self) -> dict[str, Any]:
        """Return plain data that determines the order and number of a page's bytes; part of the namespace."""
        return {
            "page_tokens": self.page_tokens,
            "reuse": str(self.reuse),
            "components": [[c.name, list(c.layers), c.row_bytes, c.tokens_per_row] for c in self.components],
        }


@dataclass(frozen=True)
class CacheGeometry:
    """The cache groups of one model on one rank."""

    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise GeometryError("a cache geometry needs cache groups", got="none", expected="at least one")

    @classmethod
    def from_config(
        cls,
        config: object | Mapping[str, Any],
        *,
        page_tokens: int,
        blocks_per_page: int = 1,
        kv_dtype: str | None = None,
    ) -> CacheGeometry:
        """Describe the cache of a Hugging Face model from its config (an object or the mapping of config.json).

        MHA, MQA and GQA give `k` and `v` rows of `kv_heads * head_dim` elements; MLA gives one `latent` row of
        `kv_lora_rank + qk_rope_head_dim` elements; DSA adds `index_k`; a model that derives V from K gives `k` alone.
        `kv_dtype` (such as `"bfloat16"`, `"float8_e4m3"`) defaults to the config's own dtype.
        Raises UnsupportedGeometryError for sliding-window or state layers, GeometryError for a missing size.
        """
        model = read_model_config(config, kv_dtype=kv_dtype)
        return cls((CacheGroup(_components_of(model), page_tokens, blocks_per_page),))

    @classmethod
    def attention(
        cls,
        layers: int | Sequence[int],
        *,
        k_row_bytes: int,
        v_row_bytes: int,
        page_tokens: int,
        blocks_per_page: int = 1,
        scale_row_bytes: int = 0,
    ) -> CacheGeometry:
        """K and V rows of the given bytes a token; `v_row_bytes=0` is K-only; with `scale_row_bytes`, each has
        a component of scales beside it (`k_scale`, `v_scale`), as quantized caches do."""
        rows = {"k": k_row_bytes, "v": v_row_bytes}
        components = [Component(n, _layers(layers), b) for n, b in rows.items() if n == "k" or b != 0]
        if scale_row_bytes:
            components += [Component(f"{c.name}_scale", c.layers, scale_row_bytes) for c in tuple(components)]
        return cls((CacheGroup(tuple(components), page_tokens, blocks_per_page),))

    @classmethod
    def latent(
        cls,
        layers: int | Sequence[int],
        *,
        row_bytes: int,
        page_tokens: int,
        blocks_per_page: int = 1,
        index_row_bytes: int = 0,
        scale_row_bytes: int = 0,
    ) -> CacheGeometry:
        """MLA: one `latent` row a token; with `index_row_bytes` DSA's `index_k`; with `scale_row_bytes` fp8 scales."""
        extra = {"index_k": index_row_bytes, "scale": scale_row_bytes}
        components = [Component("latent", _layers(layers), row_bytes)]
        components += [Component(n, _layers(layers), b) for n, b in extra.items() if b]
        return cls((CacheGroup(tuple(components), page_tokens, blocks_per_page),))

    @classmethod
    def opaque(
        cls, layers: int | Sequence[int], *, block_bytes: int, block_tokens: int, blocks_per_page: int = 1
    ) -> CacheGeometry:
        """Blocks whose inner order only the engine knows: `block_bytes` for `block_tokens` tokens of one layer."""
        component = Component("block", _layers(layers), block_bytes, tokens_per_row=block_tokens)
        return cls((CacheGroup((component,), block_tokens * blocks_per_page, blocks_per_page),))

    @property
    def page_bytes(self) -> int:
        return sum(group.page_bytes for group in self.groups)

    def describe(self) -> list[dict[str, Any]]:
        """Return plain data that determines the bytes of every group's pages; part of the namespace."""
        return [group.describe() for group in self.groups]


def _components_of(model: ModelCache) -> tuple[Component, ...]:
    return tuple(Component(row.name, row.layers, row.row_bytes) for row in model.rows)


def _layers(layers: int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(layers, int):
        _check_int("layers", layers, _MAX_LAYERS)
        return tuple(range(layers))
    return tuple(layers)


def _check_int(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise GeometryError(f"{name} is out of range", got=repr(value), expected=f"an int from 1 to {most}")
