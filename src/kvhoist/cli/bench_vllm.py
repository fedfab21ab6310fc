"""The measurements of `kvhoist bench vllm`: what kvhoist costs vLLM where there is nothing to gain from it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.text import Text

from kvhoist.cli.output import side_console
from kvhoist.cli.vllm_common import OnStep, need, smollm2, tiny_model, told
from kvhoist.errors import ConfigError

PARTS = ("all", "throughput", "scheduler")


def measure(*, part: str, model: Path | None, rounds: int, smoke: bool, as_json: bool) -> dict[str, Any]:
    """Measure `part` and return plain data. Raises ConfigError, MissingDependencyError, ServerFailedError."""
    if part not in PARTS:
        raise ConfigError("unknown --part", got=part, choices=PARTS)
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError("--model is no model's folder", got=str(model), expected="a folder with a config.json")
    need("vllm")
    result: dict[str, Any] = {"bench": "vllm", "smoke": smoke}
    with told(as_json=as_json) as on_step:
        from kvhoist.demo.vllm_machine import describe

        result |= describe()
        if part != "scheduler":
            result["throughput"] = _throughput(model, rounds, smoke, on_step)
        if part != "throughput":
            on_step("measuring the scheduler's calls (some minutes)")
            from kvhoist.demo.vllm_scheduler_cost import run

            result["scheduler"] = run(smoke=smoke)
    result["pass"] = all(result[name]["pass"] for name in PARTS if name in result)
    return result


def _throughput(model: Path | None, rounds: int, smoke: bool, on_step: OnStep) -> dict[str, Any]:
    from kvhoist.demo.child import ServerFailedError
    from kvhoist.demo.fast_dtype import fast_dtype
    from kvhoist.demo.vllm_throughput import ThroughputOptions, run, smaller

    with tempfile.TemporaryDirectory(prefix="kvhoist-bench-") as scratch:
        if model is None:
            model = tiny_model(Path(scratch)) if smoke else smollm2(on_step)
        options = ThroughputOptions(model, "float32" if smoke else fast_dtype(), rounds=rounds)
        try:
            return run(smaller(options) if smoke else options, on_step)
        except ServerFailedError as error:
            side_console().print(Text(error.tail, style="dim"))
            raise
