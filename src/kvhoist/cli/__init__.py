"""The command `kvhoist`."""

from kvhoist.cli.main import app, main

__all__ = ["app", "main"]
