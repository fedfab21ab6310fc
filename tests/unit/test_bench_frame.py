"""What benchmarks share, facts and processes of their own; and the arithmetic of those that only a GPU measures."""

from __future__ import annotations

import datetime
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhoist.bench import alloc, cold
from kvhoist.bench.alloc_child import GROUP
from kvhoist.bench.facts import command, facts
from kvhoist.bench.plot import check_plot, plot, title_of
from kvhoist.bench.process import run_fresh
from kvhoist.errors import ConfigError, HostMemoryError, KvhoistError, MissingDependencyError
from kvhoist.memory.budget import Budget, Limit
from kvhoist.platform import cuda_driver, rocm_driver
from kvhoist.platform.base import Device
from kvhoist.platform.cuda_driver import CudaDriver
from kvhoist.platform.rocm_driver import RocmDriver

GIB = 1 << 30


@pytest.mark.parametrize(
    ("argv", "module", "expected"),
    [
        (["/opt/venv/bin/kvhoist", "bench", "copy"], None, "kvhoist bench copy"),
        (["kvhoist", "bench", "copy", "--plot", "/tmp/a b/c.png"], None, "kvhoist bench copy --plot c.png"),
        (["kvhoist", "--plot=/tmp/c.png", "--gib", "8"], None, "kvhoist --plot=c.png --gib 8"),
        (["kvhoist", "--storage", "file:/data/kv?capacity=8GiB"], None, "kvhoist --storage 'file:kv?capacity=8GiB'"),
        (["kvhoist", "--storage", "file:///data/kv"], None, "kvhoist --storage file:kv"),
        (["kvhoist", "--model", "~someone/models/x/"], None, "kvhoist --model x/"),
        (["kvhoist", "--model", "meta-llama/Llama-3"], None, "kvhoist --model meta-llama/Llama-3"),
        (["-c", "bench", "copy"], None, "kvhoist bench copy"),
        (["/a/kvhoist/bench/copy.py", "--smoke"], "kvhoist.bench.copy", "python -m kvhoist.bench.copy --smoke"),
        (["/a/pytest/__main__.py", "-q"], "pytest.__main__", "python -m pytest -q"),
    ],
)
def test_a_command_is_told_without_the_folders_of_this_machine(
    argv: list[str], module: str | None, expected: str
) -> None:
    assert command(argv, module) == expected


def test_facts_are_plain_data_and_the_date_is_utc() -> None:
    found = json.loads(json.dumps(facts()))
    assert set(found) == {"date", "command", "machine"}
    assert datetime.datetime.fromisoformat(found["date"]).utcoffset() == datetime.timedelta(0)
    assert set(found["machine"]) == {"cpu", "cpus", "load_average", "system", "python", "numpy"}
    assert found["machine"]["cpus"] >= 1


@pytest.mark.parametrize(
    ("driver", "module", "version", "text", "told"),
    [
        (
            CudaDriver,
            cuda_driver,
            13000,
            "NVRM version: x86_64 Kernel Module  580.159.04  Release",
            "580.159.04, CUDA 13.0",
        ),
        (CudaDriver, cuda_driver, 12080, "", "unknown, CUDA 12.8"),
        (RocmDriver, rocm_driver, 70253211, "6.16.6", "amdgpu 6.16.6, HIP 7.2"),
        (RocmDriver, rocm_driver, 60443482, "", "amdgpu of this kernel, HIP 6.4"),
    ],
)
def test_releases_are_told_of_driver_and_runtime(
    driver: Any, module: Any, version: int, text: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "text_of", lambda path: text)
    assert driver.releases(SimpleNamespace(version=version)) == told


def test_a_process_that_fails_is_an_error_with_its_last_words() -> None:
    with pytest.raises(KvhoistError, match=r"alloc_child gold 1 cpu 0 failed \(exit code 1\); got KeyError: 'gold'"):
        run_fresh("kvhoist.bench.alloc_child", "gold", 1, "cpu", 0)


@pytest.mark.parametrize("arm", ["arena", "numpy"])
def test_an_arm_backs_all_of_its_memory_and_gives_it_back(arm: str) -> None:
    num_bytes = 16 * GROUP.page_bytes
    answer = run_fresh("kvhoist.bench.alloc_child", arm, num_bytes, "cpu", 0)
    assert answer["grown"]["VmRSS"] >= num_bytes * 0.9
    assert answer["left_bytes"] < num_bytes // 2
    if arm == "arena":
        assert answer["parts"].keys() == {"touch_s", "register_s"}
    assert "device" not in answer


def _answer(make_s: float, **grown: int) -> dict[str, Any]:
    return {
        "make_s": make_s,
        "close_s": make_s / 2,
        "parts": {"touch_s": make_s / 4},
        "grown": {"VmLck": 0, "VmPin": 0, "VmRSS": 32 * GIB, **grown},
        "left_bytes": 0,
    }


def test_a_rate_is_of_the_median_time() -> None:
    row = alloc.row_of(32 * GIB, "arena", [_answer(2.0), _answer(100.0), _answer(1.0)])
    assert (row["gib_s"], row["make_s"], row["close_s"], row["touch_s"]) == (16.0, 2.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("grown", "exact"),
    [
        ({}, None),
        ({"VmLck": 32 * GIB}, True),
        ({"VmPin": 32 * GIB}, True),
        ({"VmPin": 64 * GIB}, False),
        ({"VmLck": 32 * GIB - 4096}, False),
    ],
)
def test_exact_is_judged_on_what_the_kernel_counts(grown: dict[str, int], exact: bool | None) -> None:
    row = alloc.row_of(32 * GIB, "arena", [_answer(1.0, **grown)])
    assert (row["exact"], row["pass"]) == (exact, exact)
    assert alloc.row_of(32 * GIB, "torch", [_answer(1.0, **grown)])["pass"] is None


@pytest.mark.parametrize(
    ("num_bytes", "other_s", "on_gpu", "verdict"),
    [
        (32 * GIB, 4.0, True, True),
        (32 * GIB, 3.9, True, False),
        (8 * GIB, 1.0, True, None),
        (32 * GIB, 1.0, False, None),
    ],
)
def test_the_target_is_for_32_gib_on_a_gpu(num_bytes: int, other_s: float, on_gpu: bool, verdict: bool | None) -> None:
    found = alloc.ratio_of(num_bytes, {"make_s": 1.0}, {"make_s": other_s}, on_gpu=on_gpu)
    assert (found["times_as_fast"], found["pass"]) == (other_s, verdict)


def test_sizes_that_do_not_fit_are_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alloc, "host_budget", lambda: Budget((Limit("machine", 40 * GIB, 128 * GIB, "a test"),)))
    monkeypatch.setattr(alloc, "run_fresh", lambda *_: pytest.fail("measured"))
    with pytest.raises(HostMemoryError, match=r"got 48\.0 GiB; expected at most 40\.0 GiB"):
        alloc.run(gib=[1, 48])
    # torch rounds 33 GiB up to 64.
    with pytest.raises(HostMemoryError, match=r"got 64\.0 GiB"):
        alloc.run(Device("cuda"), gib=[33])


def test_the_arms_of_pinning_take_turns_and_results_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[object, object]] = []

    def answer(module: str, arm: str, num_bytes: int, kind: str, index: int) -> dict[str, Any]:
        calls.append((num_bytes // GIB, arm))
        return {**_answer(1.0 if arm == "arena" else 5.0, VmPin=num_bytes), "device": {"name": "a GPU"}}

    monkeypatch.setattr(alloc, "run_fresh", answer)
    monkeypatch.setattr(alloc, "host_budget", lambda: Budget((Limit("machine", 99 * GIB, 128 * GIB, "a test"),)))
    result = alloc.run(Device("cuda"), gib=[32, 1], repeats=2)
    assert calls == [(1, "arena"), (1, "torch"), (32, "arena"), (32, "torch"),
                     (1, "torch"), (1, "arena"), (32, "torch"), (32, "arena")]  # fmt: skip
    assert result["pass"]
    assert title_of(result) == f"kvhoist bench alloc: a GPU, {result['date'][:10]}"
    if importlib.util.find_spec("matplotlib"):
        plot(result, tmp_path / "alloc.svg")
        assert (tmp_path / "alloc.svg").stat().st_size > 1000


@pytest.mark.parametrize(("cold_s", "verdict"), [(0.59, True), (0.61, False)])
def test_cold_starts_are_judged_beside_warm_ones(
    monkeypatch: pytest.MonkeyPatch, cold_s: float, verdict: bool, tmp_path: Path
) -> None:
    seen: list[tuple[bool, bool]] = []

    def answer(*_: object, environment: dict[str, str]) -> dict[str, Any]:
        folder = Path(environment["KVHOIST_CACHE_DIR"])
        kernels = folder / "kernels"
        seen.append((folder.exists(), kernels.is_file()))
        build_s = 0.1 if kernels.is_dir() else cold_s
        if not kernels.is_file():
            kernels.mkdir(parents=True, exist_ok=True)
        return {**dict.fromkeys(cold.PHASES, 0.0), "build_s": build_s, "pages": 8, "bytes": 1, "device": {"name": "x"}}

    monkeypatch.setattr(cold, "run_fresh", answer)
    result = cold.run(Device("cuda"), repeats=2)
    assert seen == [(False, False), *[(False, False), (True, False), (True, True)] * 2]
    assert [row["first_transfer_s"] for row in result["results"]] == [cold_s, 0.1, cold_s]
    assert result["cold_minus_warm_s"] == pytest.approx(cold_s - 0.1)
    assert result["pass"] is verdict
    if importlib.util.find_spec("matplotlib"):
        plot(result, tmp_path / "cold.png")
        assert (tmp_path / "cold.png").read_bytes().startswith(b"\x89PNG")


def test_copies_on_a_gpu_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {
            "shape": shape,
            "arm": arm,
            "mib": mib,
            "pages": 64,
            "chosen": True,
            "share_by_events": 0.9,
            "share_by_wall": 0.8,
        }
        for shape, mib in (("MHA 512 B x 32", 128), ("MLA 576 B x 61", 512))
        for arm in ("offload", "load")
    ]
    targets = {"all": {"events": 0.97, "wall": 0.93}}
    result = {"bench": "copy", "smoke": False, **facts(), "device": {"name": "x"}, "results": rows, "targets": targets}
    plot(result, tmp_path / "copy.svg")
    assert (tmp_path / "copy.svg").stat().st_size > 1000


def test_what_cannot_be_drawn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no picture's name"):
        check_plot(tmp_path / "x.bmp")
    with pytest.raises(ConfigError, match="the folder of --plot is not there"):
        check_plot(tmp_path / "none" / "x.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"kvhoist\[bench\]"):
        check_plot(tmp_path / "x.png")
