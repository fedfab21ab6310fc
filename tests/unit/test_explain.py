"""Why was this not a hit? Every reason, in words that a user understands and as plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from directory_model import keys_of, namespace

from kvhoist.control.directory import Directory, Entry, Space
from kvhoist.control.explain import MissKind
from kvhoist.control.history import History, What
from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
A, B = keys_of((0,) * 4), keys_of((1,) * 4)
PAGE_TOKENS = 16


def directory(**options: Any) -> tuple[Directory, Space]:
    made = Directory({HOST: 4, DEVICE: 4}, clock=lambda: 1_000_000.0, **options)
    return made, made.space(namespace(0), 0)


def fill(made: Directory, space: Space, keys: list[bytes], tier: Tier = HOST, for_whom: str = "") -> list[Entry]:
    return made.publish(made.reserve(space, keys, 0, len(keys), tier, for_whom=for_whom), tier)


def explained(made: Directory, space: Space, keys: list[bytes] = A, num_tokens: int = 64) -> Any:
    explanation = made.explain(space, keys, num_tokens, PAGE_TOKENS)
    json.dumps(explanation.to_dict())
    return explanation


def test_each_page_names_the_tiers_that_hold_it() -> None:
    made, space = directory()
    fill(made, space, A[:3], HOST)
    fill(made, space, A[:1], DEVICE)
    made.set_stored(space, A[:2], True)
    found = explained(made, space)
    assert [page.tiers for page in found.pages] == [("device", "host", "storage"), ("host", "storage"), ("host",), ()]
    assert found.num_hit_pages == 3
    assert str(found).splitlines()[:5] == [
        "48 of 64 tokens are cached (3 pages of 16).",
        "  page 0: device, host, storage",
        "  page 1: host, storage",
        "  page 2: host",
        "  page 3: in no tier",
    ]


def test_a_full_hit_has_no_miss() -> None:
    made, space = directory()
    fill(made, space, A)
    found = explained(made, space)
    assert found.miss is None
    assert str(found) == "64 of 64 tokens are cached (4 pages of 16).\n  pages 0-3: host"


def test_a_page_never_seen_says_so_and_how_far_back_that_is_known() -> None:
    made, space = directory(history_pages=100)
    miss = explained(made, space).miss
    assert (miss.kind, miss.page) == (MissKind.NEVER_SEEN, 0)
    assert miss.text == "Page 0 was never seen (or left more than 100 pages of history ago)."


def test_an_evicted_page_says_when_from_where_and_for_whom() -> None:
    made, space = directory()
    fill(made, space, A)
    fill(made, space, B[:2], for_whom="request 7")
    miss = explained(made, space).miss
    assert (miss.kind, miss.page, miss.tier, miss.when, miss.reason) == (MissKind.EVICTED, 2, "host", 1e6, "request 7")
    assert miss.text.startswith("Page 2 was evicted from host at 1970-01-12 ")
    assert miss.text.endswith(", to make room for request 7.")


def test_a_page_not_stored_by_policy_says_why() -> None:
    made, space = directory()
    made.note_skipped(space, A, "write_through_selective waits for 2 hits")
    miss = explained(made, space).miss
    assert miss.kind is MissKind.NOT_STORED
    assert "was not stored at " in miss.text
    assert "write_through_selective waits for 2 hits" in miss.text


def test_a_failed_page_says_why_and_what_happened_last_counts() -> None:
    made, space = directory()
    made.note_skipped(space, A, "selective")
    made.fail(made.reserve(space, A, 0, 4, HOST), HOST, "offload: rank 1 lost")
    miss = explained(made, space).miss
    assert (miss.kind, miss.reason) == (MissKind.FAILED, "offload: rank 1 lost")
    assert "could not be brought to host" in miss.text


def test_a_page_that_left_the_device_also_says_why_the_host_has_none() -> None:
    made, space = directory()
    fill(made, space, A, DEVICE)
    made.fail(made.reserve(space, A, 0, 4, HOST), HOST, "offload: disk on fire")
    made.evict(DEVICE, 4, for_whom="request 9")
    miss = explained(made, space).miss
    assert (miss.kind, miss.tier, miss.reason) == (MissKind.EVICTED, "device", "request 9")
    assert "was evicted from device" in miss.text
    assert "Before that it could not be brought to host" in miss.text
    assert "offload: disk on fire" in miss.text


def test_a_page_being_filled_is_not_yet_a_hit_and_says_so() -> None:
    made, space = directory()
    made.reserve(space, A, 0, 2, HOST)
    found = explained(made, space)
    assert found.miss.kind is MissKind.FILLING
    assert found.pages[0].filling == ("host",)
    assert "pages 0-1: host (being filled)" in str(found)


def test_cleared_and_dropped_pages_say_so() -> None:
    made, space = directory()
    fill(made, space, A[:1])
    made.clear()
    assert explained(made, space).miss.kind is MissKind.CLEARED
    made.set_stored(space, A, True, start=0)
    made.set_stored(space, A, False, "checksum does not match")
    miss = explained(made, space).miss
    assert (miss.kind, miss.tier, miss.reason) == (MissKind.DROPPED, "storage", "checksum does not match")


def test_a_page_of_another_namespace_names_the_fields_that_differ() -> None:
    made, space = directory()
    fill(made, space, A)
    other = made.space(namespace(1), 0)
    miss = explained(made, other).miss
    assert (miss.kind, miss.fields) == (MissKind.OTHER_NAMESPACE, ("tenant",))
    assert miss.text == "Page 0 is cached in another namespace, which differs in: tenant."
    assert explained(made, made.space(namespace(1), 1)).miss.kind is MissKind.NEVER_SEEN


def test_tokens_beyond_the_last_whole_page_are_the_remainder_of_a_page() -> None:
    made, space = directory()
    fill(made, space, A)
    found = explained(made, space, num_tokens=67)
    assert (found.remainder_tokens, found.miss.kind, found.miss.page) == (3, MissKind.REMAINDER, 4)
    assert str(found).endswith(
        "The last 3 tokens are the remainder of a page: only whole pages of 16 tokens are cached."
    )
    assert str(explained(made, made.space(namespace(9), 0), num_tokens=65)).endswith(
        "The last 1 token is the remainder of a page: only whole pages of 16 tokens are cached."
    )


def test_a_prompt_shorter_than_a_page_is_all_remainder() -> None:
    made, space = directory()
    found = explained(made, space, keys=[], num_tokens=5)
    assert (found.num_hit_pages, found.miss.kind) == (0, MissKind.REMAINDER)


def test_the_history_is_bounded_in_pages_and_the_last_event_of_a_page_wins() -> None:
    history = History(5, clock=lambda: 1.0)
    for number in range(10):
        history.note(What.EVICTED, 0, HOST, [bytes([number]), bytes([number + 100])], f"r{number}")
        assert history.num_pages <= 5
    assert history.trail(0, b"\x00") == []
    assert history.trail(1, b"\x09") == []
    history.note(What.FAILED, 0, HOST, [b"\x09"], "torn")
    (last,) = history.trail(0, b"\x09")
    assert last is not None
    assert (last.what, last.text) == (What.FAILED, "torn")
    history.note(What.CLEARED, 0, HOST, [bytes([n]) for n in range(200)], "")
    assert history.num_pages == 5


def test_the_history_does_not_take_the_end_of_one_key_and_the_start_of_the_next_for_a_key() -> None:
    history = History(9)
    history.note(What.EVICTED, 0, HOST, [b"abab", b"cdcd", b"cdab"], "")
    assert [len(history.trail(0, key)) for key in (b"abab", b"cdcd", b"cdab")] == [1, 1, 1]
    assert [history.trail(0, key) for key in (b"abcd", b"dcdc", b"ab", b"ababcdcd", b"none")] == [[]] * 5


def test_a_history_of_nothing_remembers_nothing_and_a_negative_one_is_refused() -> None:
    history = History(0)
    history.note(What.EVICTED, 0, HOST, [b"k"], "")
    assert history.trail(0, b"k") == []
    with pytest.raises(ConfigError, match="history_pages"):
        History(-1)
