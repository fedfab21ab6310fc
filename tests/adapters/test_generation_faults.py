"""Cut short, cancelled or failing: no page leaks, what was computed stays, and the next text is right."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from tiny_models import PAGE_TOKENS, Wrap, prompt_of, push_out

from kvhoist.adapters.transformers import CancelToken, Sampling
from kvhoist.demo.oracles import greedy
from kvhoist.errors import ConfigError, TokenError
from kvhoist.storage import MemoryStore

NINE = Sampling(max_new_tokens=9)


def _expected(model: Any, prompt: list[int], num_new: int = 9) -> tuple[int, ...]:
    return greedy(model, prompt, num_new).tokens


@pytest.mark.parametrize("num_read", [0, 1, 2, 5, 9])
def test_a_stream_closed_at_any_step_keeps_what_was_computed_and_leaks_nothing(
    llama: Any, wrap: Wrap, num_read: int
) -> None:
    cached = wrap(llama)
    prompt = prompt_of(15)
    with cached.stream(prompt, NINE) as stream:
        tokens = tuple(next(stream).token for _ in range(num_read))
    assert stream.result.tokens == tokens == _expected(llama, prompt)[:num_read]
    assert stream.result.finish_reason == ("length" if num_read == 9 else "cancelled")
    cached.cache.flush()
    cached.cache.audit()
    computed = 15 + num_read - 1 if num_read else 0
    report = cached.generate([*prompt, *tokens, 1, 2, 3, 4, 5], NINE).report
    assert report.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS


def test_a_cancel_token_ends_a_generation_from_another_thread(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama)
    cancel = CancelToken()
    stream = cached.stream(prompt_of(15), Sampling(max_new_tokens=900, stop_tokens=()), cancelled=cancel)
    next(stream)
    thread = threading.Thread(target=cancel.cancel)
    thread.start()
    thread.join()
    assert len(list(stream)) <= 1
    assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize("failing_call", [1, 2, 4])
def test_an_error_of_the_model_gives_every_page_back(llama: Any, wrap: Wrap, failing_call: int) -> None:
    cached = wrap(llama)
    forward, calls = cached.forward, []

    class Failing:
        model, shape = forward.model, forward.shape

        def __call__(self, *args: Any) -> Any:
            calls.append(1)
            if len(calls) == failing_call:
                raise RuntimeError("out of memory")
            return forward(*args)

    prompt = prompt_of(30)
    cached.generate(prompt, Sampling(max_new_tokens=1))
    cached.forward = Failing()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        cached.generate(prompt, NINE)
    cached.forward = forward
    cached.cache.flush()
    cached.cache.audit()
    assert cached.generate(prompt, NINE).tokens == _expected(llama, prompt)


def test_an_ended_stream_holds_no_kv(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama)
    forward, seen = cached.forward, []

    class Watching:
        model, shape = forward.model, forward.shape

        def __call__(self, tokens: Any, cache: Any, *rest: Any) -> Any:
            seen.append(weakref.ref(cache))
            return forward(tokens, cache, *rest)

    cached.forward = Watching()  # type: ignore[assignment]
    stream = cached.stream(prompt_of(9), NINE)
    assert len(list(stream)) == 9
    gc.collect()
    assert {reference() for reference in seen} == {None}


def test_an_error_while_storing_abandons_the_reservation(
    llama: Any, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = wrap(llama)

    def fail(*args: object) -> None:
        raise RuntimeError("no scatter")

    with monkeypatch.context() as patch:
        patch.setattr(cached.pool, "scatter", fail)
        with pytest.raises(RuntimeError, match="no scatter"):
            cached.generate(prompt_of(30), NINE)
    cached.cache.audit()
    assert cached.generate(prompt_of(30), NINE).report.cached_tokens == 0


def test_a_store_that_fails_costs_a_recompute_only(llama: Any, wrap: Wrap) -> None:
    class Failing(MemoryStore):
        broken = False

        def get(self, keys: Any, blobs: Any) -> Any:
            if self.broken:
                raise OSError("the disk is gone")
            return super().get(keys, blobs)

    store = Failing("16MiB")
    cached = wrap(llama, store=store)
    prompt = prompt_of(30)
    cached.generate(prompt, NINE)
    push_out(cached, "device", "host")
    store.broken = True
    generation = cached.generate(prompt, NINE)
    assert generation.tokens == _expected(llama, prompt)
    assert generation.report.recomputed_tokens == 30


@pytest.mark.parametrize("prompt", [None, 5, [1.9], ["5"], [[1, 2]], {"input_ids": [1]}, [None], [float("nan")]])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(llama: Any, wrap: Wrap, prompt: Any) -> None:
    with pytest.raises(TokenError, match="a str, or one sequence of ints"):
        wrap(llama).generate(prompt, NINE)


@pytest.mark.parametrize("device_tokens", ["256", 256.5, True])
def test_device_tokens_that_are_no_int_are_refused(llama: Any, wrap: Wrap, device_tokens: Any) -> None:
    with pytest.raises(ConfigError, match="device_tokens is no number of tokens"):
        wrap(llama, device_tokens=device_tokens)


def test_a_stream_that_another_thread_reads_says_so_and_goes_on(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama)
    forward, inside, go_on = cached.forward, threading.Event(), threading.Event()

    class Waiting:
        model, shape = forward.model, forward.shape

        def __call__(self, *args: Any) -> Any:
            inside.set()
            assert go_on.wait(20)
            return forward(*args)

    cached.forward = Waiting()  # type: ignore[assignment]
    stream = cached.stream(prompt_of(15), NINE)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    assert inside.wait(20)
    for act in (stream.close, lambda: next(stream)):
        with pytest.raises(ConfigError, match="Pass a CancelToken"):
            act()
    go_on.set()
    reader.join()
    assert stream.result.tokens == _expected(llama, prompt_of(15))
