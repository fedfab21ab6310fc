"""An executor of simulated ranks for vLLM's real EngineCore."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm_harness_batch import Setup, Wrong
from vllm_harness_worker import SimWorker


class KvMismatch(AssertionError):
    """Attention read bytes that are not those of its context."""


class _Late(Future):  # type: ignore[type-arg]
    """A result that is computed when it is asked for, after all that was ordered before it."""

    def __init__(self, compute: Callable[[], None]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._compute()
        return super().result(timeout)


class _Step:
    def __init__(self, output: Any, compute: Callable[[], None]) -> None:
        self.output = output
        self.has_tokens = output.total_num_scheduled_tokens > 0
        self.executed: Future[Any] = _Late(compute)
        self.sampled: Future[Any] = _Late(compute)


class SimExecutor(Executor):
    """Runs each rank's share of a step, one rank after the other, and aggregates their outputs with vLLM's aggregator.

    With `setup.late` a step runs only when its result is asked for, as late as async scheduling and pipelines allow;
    otherwise when it is ordered. Several ranks receive and send pickles, as worker processes do.
    """

    setup: ClassVar[Setup]
    uses_ray = False
    supports_pp = True

    def _init_executor(self) -> None:
        self.workers = [SimWorker(self.vllm_config, self.setup, rank) for rank in range(self.setup.tp * self.setup.pp)]
        self._steps: deque[_Step] = deque()
        self._last: _Step | None = None

    @property
    def max_concurrent_batches(self) -> int:  # asked for by releases before 0.32
        return 2 if self.scheduler_config.async_scheduling and self.setup.pp == 1 else self.setup.pp

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def check_health(self) -> None:
        return

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        answers = []
        for worker in self.workers:
            with worker.as_current():
                call = method if callable(method) else getattr(SimWorker, method)
                answers.append(call(worker, *args, **(kwargs or {})))
        return answers

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        step = _Step(self._sent(scheduler_output), self._run_next)
        self._steps.append(step)
        self._last = step
        if not self.setup.late:
            self._run_all()
        return step.executed if non_block else step.executed.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        assert self._last is not None, "sampling follows a forward"
        step = self._last
        return step.sampled if non_block else step.sampled.result()

    def take_draft_token_ids(self) -> Any:
        return self.collective_rpc("take_draft_token_ids")[-1]

    def shutdown(self) -> None:
        self._run_all()
        self.collective_rpc("shutdown")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _run_all(self) -> None:
        while self._steps:
            self._run_next()

    def _run_next(self) -> None:
        step = self._steps.popleft()
        try:
            output = self._run(step)
        except BaseException as problem:
            step.executed.set_exception(problem)
            step.sampled.set_exception(problem)
            raise
        step.executed.set_result(None if step.has_tokens else output)
        step.sampled.set_result(output)

    def _run(self, step: _Step) -> Any:
        self.setup.num_steps += 1
        outputs = []
        for worker in self.workers:
            received = pickle.loads(step.output) if isinstance(step.output, bytes) else step.output
            with worker.as_current():
                output = worker.execute_model(received)
                if step.has_tokens:
                    output = worker.sample_tokens(None)
            outputs.append(output)
        return self._judge(self._merged(outputs))

    def _sent(self, scheduler_output: Any) -> Any:
        if len(self.workers) == 1 and not self.setup.late:
            return scheduler_output
        return _Pickled(scheduler_output)

    def _merged(self, outputs: list[ModelRunnerOutput]) -> ModelRunnerOutput:
        if len(outputs) == 1 or self.kv_output_aggregator is None:
            return outputs[len(outputs) - self.setup.tp]
        received = [pickle.loads(pickle.dumps(output)) for output in outputs]
        merged = self.kv_output_aggregator.aggregate(received, output_rank=len(outputs) - self.setup.tp)
        assert merged is not None
        return merged

    def _judge(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Raise for what attention read wrongly. What a step computes for requests that read a block of which the
        connector says in this very step that its load failed, vLLM drops."""
        found = output.kv_connector_output
        excused = found.invalid_block_ids if found is not None else set()
        wrong = [one for worker in self.workers for one in worker.batch.wrong if not one.blocks & excused]
        for worker in self.workers:
            worker.batch.wrong.clear()
        if wrong:
            raise KvMismatch("\n".join(self._told(one) for one in wrong[:12]))
        return output

    def _told(self, wrong: Wrong) -> str:
        history = "; ".join(self.workers[wrong.rank].batch.block_history.get(wrong.block, ()))
        return (
            f"step {self.setup.num_steps}, rank {wrong.rank}, {wrong.layer}: {wrong.request_id} read at position "
            f"{wrong.position}, block {wrong.block}: {wrong.text}. Block's history: {history}"
        )


class _Pickled(bytes):
    """A scheduler's output as a worker process receives it."""

    total_num_scheduled_tokens: int

    def __new__(cls, scheduler_output: Any) -> _Pickled:
        self = super().__new__(cls, pickle.dumps(scheduler_output))
        self.total_num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        return self
