"""`kvhoist explain-plan`: how pages of a cache get to the host and back, by which engine, and why by that one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvhoist.bench.device_cache import device_cache
from kvhoist.cli.output import JsonOption, console, print_json
from kvhoist.config import DEFAULT_STAGING_BYTES
from kvhoist.copy.choose import AUTO, choose_engines
from kvhoist.copy.plan import CopyPlan
from kvhoist.errors import ConfigError
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.layout import HostOrder, host_layout
from kvhoist.platform import cuda, rocm
from kvhoist.platform.base import CPU, Capabilities, Device
from kvhoist.platform.cpu import CpuPlatform
from kvhoist.units import parse_bytes

_PAGES = 2


@dataclass(frozen=True, slots=True)
class _Described:
    """A platform as far as the choice looks at it: the device need not be here."""

    name: str
    device: Device
    capabilities: Capabilities


_PLATFORMS = {
    "cpu": _Described("cpu", CPU, CpuPlatform.capabilities),
    "cuda": _Described("cuda", Device("cuda"), cuda.CAPABILITIES),
    "rocm": _Described("rocm", Device("cuda"), rocm.CAPABILITIES),
}


def explain_plan(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    k_row_bytes: Annotated[int, typer.Option(min=0, help="Bytes of one token's K in a layer.")] = 0,
    v_row_bytes: Annotated[int, typer.Option(min=0, help="Bytes of one token's V in a layer.")] = 0,
    latent_row_bytes: Annotated[int, typer.Option(min=0, help="MLA: bytes of one token's latent in a layer.")] = 0,
    page_tokens: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an engine's block.")] = 16,
    order: Annotated[HostOrder, typer.Option(help="Order of the bytes in a host page.")] = HostOrder.PAGE_FIRST_DIRECT,
    device: Annotated[str, typer.Option(help="cpu, cuda or rocm; a GPU need not be there.")] = "cuda",
    io_backend: Annotated[str, typer.Option(help="auto, or a copy engine by name.")] = AUTO,
    staging_bytes: Annotated[str, typer.Option(help="Device memory that copies pass through.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print the copy plans of a cache with a tensor a layer and component: runs, the rounds in which kernels move them,
    loops, engines by number of pages, and why those. A log at INFO level says the same of a cache that runs."""
    if device not in _PLATFORMS:
        raise ConfigError("--device is no platform", got=repr(device), choices=sorted(_PLATFORMS))
    group = _group(layers, k_row_bytes, v_row_bytes, latent_row_bytes, page_tokens, block_tokens)
    staging = parse_bytes(staging_bytes or DEFAULT_STAGING_BYTES, name="staging_bytes")
    cache, host = device_cache(CpuPlatform(), group, _PAGES).layout, host_layout(group, _PAGES, order)
    plans: dict[str, CopyPlan] = {}
    for name, ends, loads in (("offload", (cache, host), False), ("load", (host, cache), True)):
        plan = CopyPlan.make(*ends)
        choices = choose_engines(plan, _PLATFORMS[device], io_backend, loads=loads, staging_bytes=staging)
        plans[name] = plan.with_choices(choices)
    quota = _PLATFORMS[device].capabilities.block_quota
    if as_json:
        data: dict[str, Any] = {name: {**plan.to_dict(), "block_quota": quota} for name, plan in plans.items()}
        print_json(data)
    else:
        blocks = f"\n  quota   {quota} blocks for mapped, unless block_quota says otherwise" if quota else ""
        shown = "\n\n".join(f"{name}: {plan}{blocks}" for name, plan in plans.items())
        console().print(shown, soft_wrap=True, markup=False, highlight=False)


def _group(layers: int, k_row: int, v_row: int, latent_row: int, page_tokens: int, block_tokens: int) -> CacheGroup:
    """Return the group that the options describe. Raises ConfigError where they describe none."""
    blocks, rest = divmod(page_tokens, block_tokens)
    if rest:
        raise ConfigError("a page is not whole blocks", got=f"{page_tokens} tokens in blocks of {block_tokens}")
    if bool(latent_row) == bool(k_row) or (v_row and not k_row):
        raise ConfigError(
            "the rows are not given",
            got=f"K of {k_row} B, V of {v_row} B, latent of {latent_row} B",
            choices=["--k-row-bytes and --v-row-bytes", "--k-row-bytes", "--latent-row-bytes"],
        )
    pages = {"page_tokens": page_tokens, "blocks_per_page": blocks}
    if latent_row:
        return CacheGeometry.latent(layers, row_bytes=latent_row, **pages).groups[0]
    return CacheGeometry.attention(layers, k_row_bytes=k_row, v_row_bytes=v_row, **pages).groups[0]
