"""A running cache asked from outside: a private socket, its server in the engine's process and its client."""

from kvhoist.runtime.client import Running, ask, running
from kvhoist.runtime.server import RuntimeServer, Served

__all__ = ["Running", "RuntimeServer", "Served", "ask", "running"]
