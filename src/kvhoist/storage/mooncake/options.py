"""How to reach a Mooncake master, and how pages are kept there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvhoist.checks import count, seconds
from kvhoist.errors import ConfigError
from kvhoist.units import parse_bytes

PROTOCOLS = ("tcp", "rdma")
_MIN_BOUNCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """The options of a `MooncakeStore`; checked here. Stores of one process with equal options share one client.

    master: `host:port` of the running `mooncake_master`.
    metadata: `P2PHANDSHAKE` (clients tell each other; no further server), or the address of a metadata server such as
        `http://host:8080/metadata`. The same on all machines.
    host: the name or address under which other machines reach this one; "" is the address that reaches the master.
    protocol, devices: `tcp`, or `rdma` with its devices by name (`mlx5_0,mlx5_1`; "" lets the engine choose).
    segment: memory that this process lends to the shared store, 0 for none. Its pages go when the process does.
    bounce: memory through which pages pass that lie outside of registered memory; headers always do. At least 1 MiB.
    replicas: copies of each page, on different segments.
    soft_pin_s: how long a page that was put is kept from eviction where the master can; 0 leaves that to the master.
    timeout_s: what the engine waits for an answer of the master or of a peer; whole seconds, the same for all stores of
        a process (the first one's counts, since the engine reads it once).
    """

    master: str
    metadata: str = "P2PHANDSHAKE"
    host: str = ""
    protocol: str = "tcp"
    devices: str = ""
    segment: int | str = "1GiB"
    bounce: int | str = "64MiB"
    replicas: int = 1
    soft_pin_s: float = 0.0
    timeout_s: int = 5

    def __post_init__(self) -> None:
        self.master_address()
        if self.protocol not in PROTOCOLS:
            raise ConfigError("an unknown protocol of Mooncake", got=repr(self.protocol), choices=PROTOCOLS)
        segment_bytes = 0 if self.segment in (0, "0") else parse_bytes(self.segment, name="segment")
        object.__setattr__(self, "segment", segment_bytes)
        object.__setattr__(self, "bounce", parse_bytes(self.bounce, name="bounce"))
        if int(self.bounce) < _MIN_BOUNCE_BYTES:
            raise ConfigError("bounce is too small", got=f"{self.bounce} bytes", expected="at least 1MiB")
        count("replicas", self.replicas, least=1, most=64)
        count("timeout_s", self.timeout_s, least=1, most=600)
        object.__setattr__(self, "soft_pin_s", seconds("soft_pin_s", self.soft_pin_s))

    @classmethod
    def from_address(cls, master: str, options: Mapping[str, str]) -> MooncakeOptions:
        """Read what stands behind `mooncake:` in a store's address. Raises ConfigError."""
        known = [field.name for field in fields(cls) if field.name != "master"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError("an unknown option of a mooncake store", got=", ".join(unknown), choices=known)
        given: dict[str, int | float | str] = dict(options)
        for name, convert in (("replicas", int), ("timeout_s", int), ("soft_pin_s", float)):
            if name in options:
                try:
                    given[name] = convert(options[name])
                except ValueError:
                    raise ConfigError(f"{name} is not a number", got=repr(options[name])) from None
        return cls(master.removeprefix("//"), **given)  # type: ignore[arg-type]

    def master_address(self) -> tuple[str, int]:
        """Return the master's host and port."""
        host, colon, port = self.master.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                "a mooncake store needs its master's address",
                got=repr(self.master),
                expected="host:port",
                remedy="Write mooncake:host:50051, the address that mooncake_master was started with.",
            )
        return host.removeprefix("[").removesuffix("]"), int(port)
