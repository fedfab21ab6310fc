"""vLLM's real scheduler and the connector's scheduler side, over workers that only answer: what one step costs the CPU.

No model runs and no byte moves. A step schedules, samples a token for every request whose prompt is done, and answers
the connector's jobs some steps later, as workers would.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvhoist.adapters.vllm.metadata import ConnectorMetadata, WorkerMetadata, WorkerReport
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.adapters.vllm.requests import PageShape
from kvhoist.demo.vllm_rig_config import VOCABULARY, RigOptions, cache_config_of, settings_of, vllm_config_of
from kvhoist.messages import Completion, Job, JobKind

_ROW_BYTES = 4096
_CALLS = (
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "get_kv_connector_stats",
)
"""What vLLM's scheduler calls of a connector, in and between steps."""


@dataclass(slots=True)
class StepCost:
    """What one step took, in seconds of this thread's CPU time: the connector's calls (by name in `calls`), and all
    else of vLLM's own scheduling. `num_running` requests were in the batch, `new_blocks` device blocks were given out,
    `num_jobs` jobs were ordered of the workers."""

    num_running: int = 0
    new_blocks: int = 0
    num_jobs: int = 0
    num_calls: int = 0
    connector_s: float = 0.0
    vllm_s: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)


class SchedulerRig:
    """A scheduler to step. `folder` gets the config of a model that nobody loads."""

    def __init__(self, folder: Path, options: RigOptions) -> None:
        self.options = options
        self.page_blocks = PageShape.of(options.block_tokens, options.block_tokens, None).blocks_per_page
        self.jobs: Counter[JobKind] = Counter()
        config = vllm_config_of(folder, options)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(options.block_tokens, hash_function)
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=cache_config_of(options),
            structured_output_manager=StructuredOutputManager(config),
            block_size=options.block_tokens,
            hash_block_size=options.block_tokens,
            log_stats=True,
        )
        self._now = StepCost()
        self._answers: deque[list[Job]] = deque([[] for _ in range(options.answer_steps)])
        self._waiting: dict[int, str] = {}
        self._ids = itertools.count()
        self._random = random.Random(0)
        self._empty_call_s = 0.0
        self._inside = False  # of a timed call: a connector's methods may call each other
        if options.connector:
            self._start_connector()

    @property
    def side(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector.scheduler_side

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt that no other begins like."""
        return self._random.choices(range(VOCABULARY), k=num_tokens)

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Let a request arrive; vLLM hashes its blocks here, which is not part of a step."""
        name = f"request-{next(self._ids)}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))
        return name

    def limit(self, step_tokens: int) -> None:
        """Let a step hold no more tokens than this."""
        self.scheduler.max_num_scheduled_tokens = step_tokens

    def step(self) -> StepCost:
        """One turn of the engine: schedule, answer, update."""
        self._now = cost = StepCost()
        began = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time()
        answer = self._answer(output)
        resumed = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        cost.vllm_s = scheduled - began + time.thread_time() - resumed - cost.connector_s
        cost.connector_s -= cost.num_calls * self._empty_call_s
        cost.num_running = len(output.num_scheduled_tokens)
        cost.new_blocks += _given_blocks(output, self.options.block_tokens)
        self._now = StepCost()
        return cost

    def num_prompt_tokens(self) -> int:
        """Count the tokens of prompts that are still to be computed."""
        requests = self.scheduler.requests.values()
        return sum(max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in requests)

    def warm(self, prompt: list[int]) -> None:
        """Compute a prompt, and let it be offloaded."""
        name = self.add(prompt, max_tokens=1)
        while name in self.scheduler.requests:
            self.step()
        for _ in range(2 * self.options.answer_steps + 2):
            self.step()

    def forget_device(self) -> None:
        """Let the device's prefixes be found no more, while requests run on."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})

    def finish(self) -> None:
        """Abort every request and take in what is still under way."""
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)
        for _ in range(4 * self.options.answer_steps + 4):
            self.step()

    def close(self) -> None:
        self.scheduler.shutdown()

    # -- inside --------------------------------------------------------------------------------------------------

    def _start_connector(self) -> None:
        options = self.options
        connector = self.scheduler.connector
        settings = ConnectorOptions.parse(settings_of(options))
        reports = {
            rank: WorkerReport(
                rank,
                options.num_ranks,
                num_host_pages=options.host_pages,
                page_tokens=options.block_tokens * self.page_blocks,
                blocks_per_page=self.page_blocks,
                components=(("block", (0,), _ROW_BYTES, options.block_tokens),),
                block_order="none",
                options=asdict(settings),
            )
            for rank in range(options.num_ranks)
        }
        connector.set_xfer_handshake_metadata(reports)
        for name in _CALLS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))
        self._empty_call_s = self._overhead()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            began = time.thread_time()
            answer = call(*args, **kwargs)
            seconds = time.thread_time() - began
            self._inside = False
            now = self._now
            now.num_calls += 1
            now.connector_s += seconds
            now.calls[name] = now.calls.get(name, 0.0) + seconds
            return answer

        return timed

    def _overhead(self) -> float:
        """Return what the clock itself adds to a timed call."""
        empty = self._timed("", lambda: None)
        least = 1.0
        for _ in range(200):
            self._now = StepCost()
            empty()
            least = min(least, self._now.connector_s)
        self._now = StepCost()
        return least

    def _answer(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self._take_orders(output.kv_connector_metadata) if self.options.connector else None,
        )

    def _take_orders(self, meta: ConnectorMetadata) -> KVConnectorOutput | None:
        self._answers.append([*meta.jobs, *(order.job for order in meta.loads)])
        self._waiting.update((order.job.id, order.request_id) for order in meta.loads)
        self._now.num_jobs = len(self._answers[-1])
        self.jobs.update(job.kind for job in self._answers[-1])
        done = self._answers.popleft()
        if not done:
            return None
        self._now.new_blocks += sum(
            block >= 0 for job in done if job.kind is JobKind.LOAD for block in job.device_blocks
        )
        arrived = {self._waiting.pop(job.id) for job in done if job.kind is JobKind.LOAD}
        ranks = range(self.options.num_ranks)
        completions = tuple(
            Completion(job.id, rank, _missing(job), None, 1 << 20, 1e-3) for job in done for rank in ranks
        )
        return KVConnectorOutput(finished_recving=arrived or None, kv_connector_worker_meta=WorkerMetadata(completions))


def _missing(job: Job) -> tuple[int, ...]:
    """Return which pages of a job fail: storage holds none that is asked for."""
    return tuple(range(job.num_pages)) if job.kind is JobKind.LOOKUP else ()


def _given_blocks(output: Any, block_tokens: int) -> int:
    """Count the device blocks that a step's batch was given to compute into."""
    new = sum(len(one.block_ids[0]) - one.num_computed_tokens // block_tokens for one in output.scheduled_new_reqs)
    more = output.scheduled_cached_reqs.new_block_ids
    return new + sum(len(blocks[0]) for blocks in more if blocks is not None)
