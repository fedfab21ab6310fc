"""vLLM's real EngineCore, scheduler and connector hooks over simulated ranks: hundreds of requests in seconds.

`SimEngine` is one engine. Nothing of vLLM is replaced but the workers (and its garbage collections at start and end):
requests enter through `EngineCore`, steps are its `step` or `step_with_batch_queue`, and the handshake, aborts and
resets are its own. Outputs are compared with `vllm_harness_model.generate`, and every slot that attention reads with
what must be in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import core as engine_core
from vllm_harness_batch import Setup
from vllm_harness_config import engine_config
from vllm_harness_executor import SimExecutor
from vllm_harness_kv import LAYOUTS
from vllm_harness_model import generate, prompt_of

__all__ = ["KVHOIST", "LAYOUTS", "SimEngine", "Told", "generate", "prompt_of"]

KVHOIST = {"kv_connector": "KvhoistConnector", "kv_connector_module_path": "kvhoist.adapters.vllm"}


@dataclass(slots=True)
class Told:
    """What the engine has said of one request."""

    prompt: list[int]
    max_tokens: int
    salt: str
    weights: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_local: int | None = None
    num_external: int | None = None
    aborted: bool = False
    hand_over: dict[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.aborted


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Leave out the collections (0.3 s each) and the freezing of the heap with which EngineCore starts and ends."""
    with contextlib.ExitStack() as stack:
        for name in ("freeze_gc_heap", "cleanup_dist_env_and_memory"):
            if name in vars(engine_core):
                stack.enter_context(mock.patch.object(engine_core, name))
        yield


class SimEngine:
    """One engine. `extra` is kvhoist's `kv_connector_extra_config`; None runs without a connector, and `connector`
    replaces other parts of the `kv_transfer_config`.

    `late` runs a step as late as its result is needed, which only async scheduling and pipelines make different.
    """

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any] | None = None,
        *,
        connector: dict[str, Any] | None = None,
        blocks: int = 32,
        block_tokens: int = 4,
        tp: int = 1,
        pp: int = 1,
        layout: str = LAYOUTS[0],
        async_scheduling: bool = False,
        num_spec: int = 0,
        late: bool = False,
        v2: bool = False,
        max_batched: int = 64,
        max_seqs: int = 16,
        prefix_caching: bool = True,
        policy: str = "fcfs",
    ) -> None:
        self.setup = Setup(layout, tp=tp, pp=pp, late=late, v2=v2)
        config = engine_config(
            model,
            self.setup,
            blocks=blocks,
            block_tokens=block_tokens,
            async_scheduling=async_scheduling,
            num_spec=num_spec,
            max_batched=max_batched,
            max_seqs=max_seqs,
            prefix_caching=prefix_caching,
            policy=policy,
        )
        if extra is not None:
            config.kv_transfer_config = KVTransferConfig(
                **{"kv_role": "kv_both", "kv_connector_extra_config": extra, **KVHOIST, **(connector or {})}
            )
        executor = type("Executor", (SimExecutor,), {"setup": self.setup})
        with _no_collections():
            self.core = engine_core.EngineCore(config, executor, log_stats=True)
        self.told: dict[str, Told] = {}
        self.num_blocks: int = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self._next_id = 0
        self.is_closed = False

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's side of the connector."""
        return self.scheduler.connector

    @property
    def workers(self) -> list[Any]:
        workers: list[Any] = self.core.model_executor.workers
        return workers

    # -- requests --------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        salt: str = "",
        name: str | None = None,
        priority: int = 0,
        transfer: dict[str, Any] | None = None,
    ) -> str:
        if name is None:
            name = f"r{self._next_id}"
            self._next_id += 1
        self.told[name] = Told(list(prompt), max_tokens, salt, self.setup.weights)
        self.setup.salts[name] = salt
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args={"kv_transfer_params": transfer}
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt or None,
            data_parallel_rank=None,
            priority=priority,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))
        return name

    def abort(self, *names: str, during_step: bool = False) -> None:
        """Abort between steps, or (`during_step`) between the forward and the output of the next one."""
        for name in names:
            self.told[name].aborted = True
        if during_step:
            self.core.aborts_queue.put_nowait(list(names))
        else:
            self.core.abort_requests(list(names))

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def step(self) -> bool:
        """One turn of the engine's loop; False where there was nothing to do."""
        if not self.has_work:
            return False
        outputs, executed = self.core.step_fn()
        for group in (outputs or {}).values():
            for output in group.outputs:
                self._take(output)
        self.core.post_step(executed)
        if not executed and self.scheduler.has_requests():
            time.sleep(0.0002)  # as EngineCore's loop does, to let transfers run; five times as fast
        return True

    def run(self, until: Callable[[], bool] | None = None, *, timeout_s: float = 60.0) -> None:
        """Step until `until()` (None: until nothing is left to do). Raises AssertionError when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while not (until() if until is not None else not self.has_work):
            if not self.step():
                time.sleep(0.0005)
            if time.monotonic() > deadline:
                raise AssertionError(f"not there after {timeout_s} s: {self.describe()}")

    def ask(self, prompt: list[int], max_tokens: int = 4, **options: Any) -> Told:
        """Run one request to its end, check its output, and return what was told of it."""
        name = self.add(prompt, max_tokens, **options)
        self.run(lambda: self.told[name].is_over)
        self.check([name])
        return self.told[name]

    def check(self, names: Iterable[str] | None = None) -> None:
        """Assert that each request said what the model says, as far as it came."""
        for name in self.told if names is None else names:
            told = self.told[name]
            expected = generate(told.prompt, told.max_tokens, told.weights + told.salt)
            if told.aborted:
                expected = expected[: len(told.tokens)]
            assert told.tokens == expected, f"{name} ({told.finish_reason}): {told.tokens} is not {expected}"

    def reset(self, *, connector: bool = False, running: bool = False) -> bool:
        """reset_prefix_cache: the device's prefixes are forgotten (and the connector's pages, and running requests)."""
        return bool(self.core.reset_prefix_cache(running, connector))

    def describe(self) -> str:
        scheduler = self.scheduler
        states = {name: request.status.name for name, request in scheduler.requests.items()}
        pool = scheduler.kv_cache_manager.block_pool
        return f"requests {states}, {pool.get_num_free_blocks()} of {self.num_blocks} blocks free"

    # -- end -------------------------------------------------------------------------------------------------------

    def leaked_blocks(self) -> list[int]:
        """The blocks that are neither free nor the null block; empty where no request is left."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]

    def finish(self) -> None:
        """Run to the end, then assert that outputs are right and no block is leaked."""
        self.run()
        self.check()
        assert not self.scheduler.requests, self.describe()
        assert self.leaked_blocks() == []
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.num_blocks - 1

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            with _no_collections():
                self.core.shutdown()

    def __enter__(self) -> SimEngine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _take(self, output: Any) -> None:
        told = self.told[output.request_id]
        told.tokens.extend(output.new_token_ids)
        if output.finish_reason is not None:
            told.finish_reason = str(output.finish_reason)
            told.hand_over = output.kv_transfer_params
        if output.prefill_stats is not None and told.num_local is None:
            told.num_local = output.prefill_stats.num_local_cached_tokens
            told.num_external = output.prefill_stats.num_external_cached_tokens
