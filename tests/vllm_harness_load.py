"""Seeded random load for SimEngines: conversations, aborts, evictions, resets, restarts, slow and failing copies and
stores, all mixed; outputs, bytes, blocks, books and what is left are checked all along."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_harness import LAYOUTS, SimEngine, prompt_of
from vllm_harness_faults import copy_faults, corrupt_folder, corrupt_host_pages, store_faults
from vllm_harness_kv import HAS_LAYOUTS
from vllm_harness_kvhoist import audit, end, host_bytes, settle, store_in
from vllm_harness_model import MAX_MODEL_LEN

from kvhoist.errors import StorageError
from kvhoist.messages import Job


class Weather:
    """How the data plane does: `calm`, or with delays and failures at the given rates. Copies fail by job and rank."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.delay_s = 0.0
        self.fail_copies = 0.0
        self.fail_storage = 0.0

    def change(self) -> None:
        """Draw new weather; half of the time it is calm."""
        draw = self._draw
        calm = draw.random() < 0.5
        self.delay_s = draw.choice((0.0, 0.0005, 0.003))
        self.fail_copies = 0.0 if calm else draw.choice((0.05, 0.5))
        self.fail_storage = 0.0 if calm else draw.choice((0.1, 1.0))

    def calm(self) -> None:
        self.delay_s = self.fail_copies = self.fail_storage = 0.0

    def copies(self, job: Job, rank: int) -> Sequence[int]:
        self._sleep()
        if self._draw.random() >= self.fail_copies:
            return ()
        if self._draw.random() < 0.2:
            raise OSError("planted")
        return [i for i in range(job.num_pages) if self._draw.random() < 0.5]

    def put(self, keys: Sequence[Any], *_: Any) -> list[bool] | None:
        return [False] * len(keys) if self._storage_fails() else None

    def get(self, keys: Sequence[Any], *_: Any) -> list[None] | None:
        return [None] * len(keys) if self._storage_fails() else None

    def exists(self, keys: Sequence[Any]) -> list[bool] | None:
        return [False] * len(keys) if self._storage_fails() else None

    def _storage_fails(self) -> bool:
        self._sleep()
        if self._draw.random() >= self.fail_storage:
            return False
        if self._draw.random() < 0.3:
            raise StorageError("planted")
        return True

    def _sleep(self) -> None:
        if self.delay_s:
            time.sleep(self._draw.random() * self.delay_s)


class Episode:
    """One engine's life (or two: it may restart on its folder), drawn from `seed`. `counts` says what happened."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._draw = draw = random.Random(seed)
        self._model = model
        self._folder = folder
        self._weather = Weather(seed)
        self.options = draw_options(draw)
        self.settings = draw_settings(draw, folder, self.options)
        self._longest = min(MAX_MODEL_LEN, (self.options["blocks"] - 1) * self.options["block_tokens"]) - 14
        self._talks = [self._begin(i) for i in range(6)]
        self._asked: dict[str, int] = {}
        self._number = 0
        self.engine = SimEngine(model, self.settings, **self.options)

    def run(self, num_acts: int, deadline: float) -> None:
        """Do `num_acts` random things between steps, or as many as fit before `deadline`; then run dry and check."""
        weather, draw = self._weather, self._draw
        with ExitStack() as stack:
            stack.callback(self.engine.close)
            stack.enter_context(copy_faults(weather.copies))
            for method in ("put", "get", "exists"):
                stack.enter_context(store_faults(method, getattr(weather, method)))
            for act in range(num_acts):
                self._act()
                for _ in range(draw.choice((0, 1, 1, 2, 5))):
                    self.engine.step()
                if act % 50 == 0:
                    audit(self.engine)
                    self._take()
                if time.monotonic() > deadline:
                    break
            weather.calm()
            end(self.engine)
            self._take()
            stack.callback(self.engine.close)

    # -- what may happen -------------------------------------------------------------------------------------------

    def _act(self) -> None:
        dice = self._draw.random()
        chances: tuple[tuple[float, Callable[[], None]], ...] = (
            (0.55, self._arrive),
            (0.08, self._abort),
            (0.08, self._forget_device),
            (0.02, self._forget_all),
            (0.02, self._preempt_all),
            (0.01, self._new_weights),
            (0.01, self._restart),
            (0.03, self._weather.change),
            (0.02, self._corrupt),
        )
        for chance, what in chances:
            if dice < chance:
                what()
                return
            dice -= chance

    def _begin(self, i: int) -> list[int]:
        shared = prompt_of(f"shared {self._draw.randrange(3)}", self._draw.randrange(0, self._longest // 2 + 1))
        return [*shared, *prompt_of(f"own {i} {self._draw.random()}", self._draw.randrange(1, self._longest // 3 + 2))]

    def _arrive(self) -> None:
        if len(self.engine.scheduler.requests) >= 24:
            return
        talk = self._draw.randrange(len(self._talks))
        if len(self._talks[talk]) > self._longest or self._draw.random() < 0.1:
            self._talks[talk] = self._begin(talk)
        self._number += 1
        name = f"q{self._number}"
        salt = "secret" if talk == 5 else ""
        self.engine.add(
            self._talks[talk], self._draw.randrange(1, 14), salt=salt, name=name, priority=self._draw.randrange(3)
        )
        self._asked[name] = talk
        self.counts["asked"] += 1

    def _abort(self) -> None:
        alive = [name for name, one in self.engine.scheduler.requests.items() if not one.is_finished()]
        if alive:
            names = self._draw.sample(alive, min(len(alive), self._draw.choice((1, 1, 3))))
            for name in names:
                self.counts[f"aborted {self.engine.scheduler.requests[name].status.name}"] += 1
            self.engine.abort(*names, during_step=self._draw.random() < 0.4)

    def _forget_device(self) -> None:
        self.counts["device forgotten"] += self.engine.reset()

    def _forget_all(self) -> None:
        self.counts["all forgotten"] += self.engine.reset(connector=True)

    def _preempt_all(self) -> None:
        """Reset running requests, where vLLM can: no step under way, and nobody else holds blocks. Releases before 0.32
        drop a token that they should not where they schedule asynchronously."""
        if not HAS_LAYOUTS and self.options.get("async_scheduling"):
            return
        others = [one for one in self.engine.scheduler.requests.values() if one.status.name != "RUNNING"]
        free = all(one.status.name in ("WAITING", "PREEMPTED") and not one.num_computed_tokens for one in others)
        if free and not self.engine.core.batch_queue:
            self.counts["preempted by a reset"] += self.engine.reset(running=True, connector=self._draw.random() < 0.5)

    def _new_weights(self) -> None:
        self.engine.run()
        self._take()
        for _ in range(50):  # an aborted request's load may still be under way: vLLM says so, and is asked again
            if self.engine.reset(connector=True):
                break
            settle(self.engine)
        else:
            raise AssertionError(f"vLLM cannot be reset: {self.engine.describe()}")
        self.engine.setup.weights = f"weights {self._draw.random()}"
        self._talks = [self._begin(i) for i in range(6)]
        self.counts["new weights"] += 1

    def _restart(self) -> None:
        if self._draw.random() < 0.5:
            self._weather.calm()
            end(self.engine)
        else:  # in the middle of everything
            self.engine.close()
        self._take(all_of_them=True)
        if "storage" in self.settings and self._draw.random() < 0.3:
            corrupt_folder(self._folder)
            self.counts["corrupted folders"] += 1
        self.engine = SimEngine(self._model, self.settings, **self.options)
        self.counts["restarts"] += 1

    def _corrupt(self) -> None:
        if self.settings.get("debug_verify") and not self.settings.get("storage"):
            settle(self.engine)
            corrupt_host_pages(self.engine, rank=self._draw.randrange(len(self.engine.workers)))
            self.counts["corrupted host tiers"] += 1

    def _take(self, *, all_of_them: bool = False) -> None:
        """Check what is over, let its conversation go on, and forget it."""
        engine = self.engine
        over = [name for name, told in engine.told.items() if told.is_over or all_of_them]
        engine.check([name for name in over if engine.told[name].is_over])
        for name in over:
            told = engine.told[name]
            if name in engine.scheduler.requests and not all_of_them:
                continue
            self.counts["external tokens"] += told.num_external or 0
            self.counts["local tokens"] += told.num_local or 0
            self.counts["finished"] += not told.aborted
            talk = self._asked.pop(name, None)
            if talk is not None and told.finish_reason and len(self._talks[talk]) <= len(told.prompt):
                self._talks[talk] = [*told.prompt, *told.tokens, *prompt_of(name, self._draw.randrange(1, 9))]
            for table in (engine.told, engine.setup.salts, engine.setup.contexts):
                table.pop(name, None)


def draw_options(draw: random.Random) -> dict[str, Any]:
    """Draw an engine."""
    ranks: list[dict[str, Any]] = [{}, {}, {"tp": 2}, *([{"pp": 2}, {"tp": 2, "pp": 2}] if HAS_LAYOUTS else [])]
    options: dict[str, Any] = {
        "blocks": draw.choice((16, 24, 32, 48)),
        "block_tokens": draw.choice((4, 4, 8)),
        "max_batched": draw.choice((16, 32, 64)),
        "max_seqs": draw.choice((3, 8, 16)),
        "layout": draw.choice(LAYOUTS),
        "late": draw.random() < 0.5,
        "policy": draw.choice(("fcfs", "fcfs", "priority")),
        **draw.choice(ranks),
    }
    if draw.random() < 0.5 and options.get("pp", 1) == 1:
        options["async_scheduling"] = True
    if draw.random() < 0.3 and options.get("pp", 1) == 1:
        options["num_spec"] = draw.choice((1, 3))
    elif draw.random() < 0.3 and HAS_LAYOUTS:
        options["v2"] = True
    return options


def draw_settings(draw: random.Random, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Draw kvhoist's settings for an engine."""
    ranks = options.get("tp", 1) * options.get("pp", 1)
    per_page = draw.choice((1, 2, 2, 3))
    pitches = -(-per_page * options["block_tokens"] // 16)
    settings: dict[str, Any] = {
        "host_bytes": host_bytes(draw.choice((3, 12, 40, 120)) * pitches, ranks),
        "blocks_per_page": per_page,
        "eviction": draw.choice(("lru", "slru", "lfu", "arc")),
        "debug_verify": draw.random() < 0.3,
        "layerwise": draw.random() < 0.25,
        "lookup_timeout_s": draw.choice((0.01, 1.0)),
        "prefetch_timeout_s": draw.choice((0.01, 5.0)),
        "history_pages": 200,
    }
    if draw.random() < 0.2:
        settings |= {"write_policy": "write_through_selective", "min_hits": 1}
    if draw.random() < 0.6:
        settings |= {"storage": store_in(folder, draw.choice(("1MiB", "32MiB"))), "io_threads": draw.choice((1, 4))}
    return settings
