from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvhoist.errors import ConfigError
from kvhoist.messages import REPLICATED, WHOLE, Completion, Job, JobKind, PageKey, Shard, StorageKey

NAMESPACE = bytes(32)
BOTH_ENDS = {"host_pages": (4, 5), "device_blocks": (1, 2, 3, 4)}
KEYS = (b"a" * 32, b"b" * 32)


def job(kind: JobKind, **parts: Any) -> Job:
    return Job(7, kind, NAMESPACE, 0, KEYS, **parts)


PARTS: dict[JobKind, dict[str, Any]] = {
    JobKind.OFFLOAD: BOTH_ENDS,
    JobKind.LOAD: BOTH_ENDS,
    JobKind.PERSIST: {"host_pages": (4, 5)},
    JobKind.PREFETCH: {"host_pages": (4, 5)},
    JobKind.LOOKUP: {},
    JobKind.DROP: {},
}


@pytest.mark.parametrize("kind", JobKind)
def test_jobs_survive_a_trip_to_another_process(kind: JobKind) -> None:
    ours = job(kind, **PARTS[kind])
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert ours.num_pages == 2
    assert ours.page_key(1) == PageKey(NAMESPACE, 0, KEYS[1])


@pytest.mark.parametrize("kind", JobKind)
@pytest.mark.parametrize(
    "parts",
    [{"host_pages": (1,)}, {"device_blocks": (1,)}, {"device_blocks": (1, 2, 3)}, {"host_pages": (1, 2, 3)}],
)
def test_a_job_whose_parts_do_not_fit_is_refused(kind: JobKind, parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="parts do not fit together"):
        job(kind, **{**PARTS[kind], **parts})


def test_a_job_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one key"):
        Job(1, JobKind.LOOKUP, NAMESPACE, 0, ())


@pytest.mark.parametrize("kind", [kind for kind in JobKind if PARTS[kind]])
def test_a_job_that_lacks_an_end_is_refused(kind: JobKind) -> None:
    with pytest.raises(ConfigError):
        job(kind)


def test_completions_survive_a_trip_to_another_process() -> None:
    ours = Completion(7, 1, failed_pages=(0,), error="disk full", bytes=10, seconds=0.5)
    assert pickle.loads(pickle.dumps(ours)) == ours


def test_shards_and_storage_keys_print_for_people() -> None:
    assert (str(REPLICATED), str(WHOLE), str(Shard(1, 4))) == ("replicated", "0/1", "1/4")
    key = StorageKey(PageKey(NAMESPACE, 3, b"\xab" * 32), WHOLE)
    assert str(key) == f"{'00' * 8}/3/{'ab' * 32}/0/1"
