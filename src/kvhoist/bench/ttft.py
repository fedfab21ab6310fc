"""Time to the first token of a prompt whose prefix is in host memory: recomputed, loaded as a whole before the forward,
and loaded layer by layer while the forward runs. Through the transformers adapter, with a Llama of random weights.

All arms take turns, and so does one plain copy of as many bytes as the prefix has: the link's time for them. Loaded
prefixes must give the first token and the logits, to the bit, that a prefix kept on the device gives.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvhoist.adapters.transformers import PREFIX_ATTENTION, GenerationReport
from kvhoist.bench.facts import facts
from kvhoist.bench.ttft_link import Link, open_link
from kvhoist.bench.ttft_rig import Answer, LlamaShape, Rig
from kvhoist.copy.choose import LOAD_GROUPS
from kvhoist.errors import ConfigError, KvhoistError
from kvhoist.platform.base import Device
from kvhoist.platform.open import open_platform

PREFIXES = (4096, 16384, 32768)
SUFFIX = 512

SLACK = 1.1
"""A layer-wise load may take this much of the longer of link and suffix, and one layer group's time on the link."""
TIMES_FASTER, TIMES_FASTER_FROM = 12.0, 32768
"""So many times faster than recomputing must it be, from so many tokens on."""

_PAGE_TOKENS = 64
_TINY = LlamaShape(layers=4, hidden=64, heads=4, kv_heads=2, intermediate=96, vocabulary=256, dtype="float32")
_TINY_PREFIXES, _TINY_SUFFIX, _TINY_PAGE_TOKENS = (64, 128), 24, 8

ARMS = ("recompute", "load_whole", "load_layerwise", "suffix_alone")


def run(
    device: Device,
    *,
    prefixes: Sequence[int] = (),
    attention: str = PREFIX_ATTENTION,
    smoke: bool = False,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measure prefixes of so many tokens (none: 4k, 16k and 32k) on `device` and return plain data. `attention` is one
    of transformers' implementations; `smoke` takes a tiny model and prefixes of its own. Raises ConfigError for a
    device that is not there and for prefixes that are not whole pages, KvhoistError where a bit is wrong."""
    open_platform(device)
    shape, suffix, page_tokens = (
        (_TINY, _TINY_SUFFIX, _TINY_PAGE_TOKENS) if smoke else (LlamaShape(), SUFFIX, _PAGE_TOKENS)
    )
    lengths = sorted(set(prefixes)) or list(_TINY_PREFIXES if smoke else PREFIXES)
    if any(length < page_tokens or length % page_tokens for length in lengths):
        raise ConfigError(
            "a prefix is not of whole pages", got=f"{lengths} tokens", expected=f"multiples of {page_tokens}"
        )
    with (
        Rig(shape, device, page_tokens=page_tokens, longest=lengths[-1] + suffix, attention=attention) as rig,
        open_link(device, rig.cached.shape.group, lengths[-1] // page_tokens) as link,
    ):
        rows = [_Prefix(rig, link, length, suffix).measure(2 if smoke else repeats) for length in lengths]
    return {
        "bench": "ttft",
        "smoke": smoke,
        **facts(device),
        "model": str(shape),
        "attention": attention,
        "suffix_tokens": suffix,
        "page_tokens": page_tokens,
        "repeats": 2 if smoke else repeats,
        "link": "one pinned memcpy of the same number of bytes, in the same run",
        "targets": {
            "layerwise_slack": SLACK,
            "layer_groups": LOAD_GROUPS,
            "times_faster": TIMES_FASTER,
            "times_faster_from_tokens": TIMES_FASTER_FROM,
        },
        "results": rows,
        "pass": all(row["pass"] for row in rows),
    }


class _Prefix:
    """The arms over one prefix, kept in the host tier."""

    def __init__(self, rig: Rig, link: Link, num_tokens: int, suffix: int) -> None:
        self._rig, self._link, self._num_tokens = rig, link, num_tokens
        self._prefix = rig.tokens(num_tokens, f"prefix {num_tokens}")
        self._prompt = [*self._prefix, *rig.tokens(suffix, f"suffix {num_tokens}")]
        self._num_bytes = num_tokens * rig.cached.shape.token_bytes
        rig.keep(self._prefix)

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return one row: medians of `repeats` rounds, after one that warms up."""
        rounds = [self._round(number) for number in range(repeats + 1)]
        seconds = {name: statistics.median(answers[name].seconds for answers, _ in rounds[1:]) for name in ARMS}
        link = statistics.median(taken for _, taken in rounds[1:])
        computed, loaded = rounds[0][0]["recompute"], rounds[0][0]["load_layerwise"]
        return self._row(seconds, link, loaded.largest_difference(computed))

    def _round(self, number: int) -> tuple[dict[str, Answer], float]:
        """Return every arm's answer, and the seconds of the link beside them."""
        rig, prompt = self._rig, self._prompt
        link = self._link(self._num_bytes)
        answers = {"recompute": rig.first_token(prompt, salt=b"round %d" % number)}
        for arm in ("load_whole", "load_layerwise"):
            rig.only_in_host()
            answers[arm] = rig.first_token(prompt, layerwise=arm == "load_layerwise")
        rig.only_in_host()
        rig.first_token([*self._prefix, 0])  # brings the prefix back, and nothing of the suffix
        answers["suffix_alone"] = rig.first_token(prompt)
        self._check(answers)
        return answers, link

    def _check(self, answers: dict[str, Answer]) -> None:
        """Raise KvhoistError unless prefixes came from where they should, and loaded ones changed no bit."""
        places = {"recompute": (0, 0), "load_whole": (0, self._num_tokens), "load_layerwise": (0, self._num_tokens)}
        for arm, answer in answers.items():
            expected = places.get(arm, (self._num_tokens, 0))
            if _places(answer.report) != expected:
                raise KvhoistError(
                    f"{arm}: the prefix was not where this arm wants it",
                    got=_said(_places(answer.report)),
                    expected=_said(expected),
                )
        for arm in ("load_whole", "load_layerwise"):
            if not answers[arm].same_bits(answers["suffix_alone"]):
                raise KvhoistError(
                    f"{arm}: the first token or its logits are not those of a prefix kept on the device",
                    got=f"token {answers[arm].token}, a logit off by up to "
                    f"{answers[arm].largest_difference(answers['suffix_alone']):.3g} deviations",
                    expected=f"token {answers['suffix_alone'].token}, and the same bits",
                )

    def _row(self, seconds: dict[str, float], link: float, difference: float) -> dict[str, Any]:
        limit = SLACK * max(link, seconds["suffix_alone"]) + link / LOAD_GROUPS
        faster = {arm: seconds["recompute"] / seconds[arm] for arm in ("load_whole", "load_layerwise")}
        fast_enough = self._num_tokens < TIMES_FASTER_FROM or faster["load_layerwise"] >= TIMES_FASTER
        return {
            "prefix_tokens": self._num_tokens,
            "bytes": self._num_bytes,
            **{f"{name}_ms": round(seconds[name] * 1e3, 2) for name in ARMS},
            "link_ms": round(link * 1e3, 2),
            "link_gib_s": round(self._num_bytes / link / (1 << 30), 2),
            "layerwise_limit_ms": round(limit * 1e3, 2),
            "times_faster_whole": round(faster["load_whole"], 2),
            "times_faster_layerwise": round(faster["load_layerwise"], 2),
            "same_bits": True,
            "off_recompute": round(difference, 4),
            "pass": seconds["load_layerwise"] <= limit and fast_enough,
        }


def _places(report: GenerationReport) -> tuple[int, int]:
    return report.device_tokens, report.host_tokens


def _said(places: tuple[int, int]) -> str:
    return "{} tokens on the device, {} in host memory".format(*places)
