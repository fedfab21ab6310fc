"""What `kvhoist bench vllm` says of the scheduler: the real one of vLLM, over workers that only answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvhoist.demo import vllm_scheduler_cost
from kvhoist.demo.vllm_rig import SchedulerRig
from kvhoist.demo.vllm_rig_config import RigOptions
from kvhoist.messages import JobKind


@pytest.fixture(autouse=True)
def lasting_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_what_a_prompt_computes_is_offloaded_page_by_page_and_loaded_once_it_left_the_device(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, RigOptions(device_blocks=512, host_pages=64))
    page_tokens = 16 * rig.page_blocks
    prompt = rig.prompt(4 * page_tokens + 3)
    rig.warm(prompt)
    assert rig.side.plane.directory.stats().tiers["host"].ready_pages == 4
    assert rig.jobs[JobKind.LOAD] == 0
    rig.forget_device()
    rig.warm(prompt)
    assert rig.jobs[JobKind.LOAD] == 1
    rig.side.plane.audit()
    rig.close()


def test_a_step_counts_its_requests_its_new_blocks_and_its_jobs(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, RigOptions(device_blocks=512, host_pages=64))
    for _ in range(3):
        rig.add(rig.prompt(400), max_tokens=40)
    first = rig.step()
    assert (first.num_running, first.new_blocks, first.num_jobs) == (3, 75, 0)
    second = rig.step()
    assert (second.num_running, second.new_blocks) == (3, 3)
    assert second.num_jobs > 0
    assert first.connector_s > 0
    assert first.vllm_s > 0
    assert set(first.calls) >= {"get_num_new_matched_tokens", "build_connector_meta"}
    rig.finish()
    assert rig.step().num_running == 0
    assert rig.side.plane.tracker.num_open == 0
    rig.close()


def test_storage_is_asked_once_a_prompt_and_what_is_offloaded_is_persisted(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, RigOptions(device_blocks=512, host_pages=64, storage=True, num_ranks=2))
    rig.warm(rig.prompt(64 * 4 + 1))
    assert rig.jobs[JobKind.LOOKUP] == 1
    assert rig.jobs[JobKind.PERSIST] == rig.jobs[JobKind.OFFLOAD] > 0
    rig.close()


def test_without_a_connector_the_same_steps_cost_it_nothing(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, RigOptions(device_blocks=512, connector=False))
    rig.add(rig.prompt(100), max_tokens=3)
    assert rig.step().connector_s == 0
    rig.close()


def test_the_worst_step_of_a_block_size_is_the_one_that_decides() -> None:
    cell = {"block_tokens": 16, "kind": "decode", "storage": False, "ranks": 1, "running": 8, "new_blocks": 1, "us": 40}
    cells = [{**cell, "of_target": of_target, "of_vllm": 0.03} for of_target in (0.5, 0.9)]
    other = {**cells[0], "block_tokens": 128, "of_target": 1.01}
    worst = vllm_scheduler_cost._worst(16, [*cells, other])
    assert (worst["of_target"], worst["pass"]) == (0.9, True)
    assert not vllm_scheduler_cost._worst(128, [*cells, other])["pass"]


def test_a_smoke_run_has_every_part_and_one_load_for_64_requests() -> None:
    result: dict[str, Any] = vllm_scheduler_cost.run(smoke=True)
    assert {cell["kind"] for cell in result["cells"]} == {"decode", "prefill", "load"}
    assert all(cell["us"] > 0 and cell["vllm_us"] > 0 for cell in result["cells"])
    assert result["shared_prefix"]["requests"] == 64
    assert result["shared_prefix"]["loads"] == 1
    assert 0 < result["idle"]["us"] < 1000
