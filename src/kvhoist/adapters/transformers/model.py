"""A causal language model of transformers that generates with prefix reuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from operator import index as as_index
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from kvhoist.adapters.transformers.identity import model_namespace, model_state, weights_fingerprint
from kvhoist.adapters.transformers.loading import chat_tokens, load_model, load_tokenizer, resolve_model
from kvhoist.adapters.transformers.pool import PagedPool
from kvhoist.adapters.transformers.prefix import Prefixes
from kvhoist.adapters.transformers.report import Generation
from kvhoist.adapters.transformers.run import Forward, Row, Run
from kvhoist.adapters.transformers.sampling import GREEDY, Sampling
from kvhoist.adapters.transformers.shape import probe_shape
from kvhoist.adapters.transformers.stream import Stream
from kvhoist.cache import HierarchicalCache
from kvhoist.config import CacheConfig
from kvhoist.errors import ClosedError, ConfigError, TokenError
from kvhoist.storage.base import Store
from kvhoist.units import format_bytes, parse_bytes

DEFAULT_PAGE_TOKENS = 32

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, str]


def _never() -> bool:
    return False


class CachedModel:
    """Wraps `model` (in `eval` mode, all weights on one device) and owns its paged device pool and hierarchical cache.

    The pool has `device_tokens` tokens, or as many pages as `device_bytes` hold; `pool_bytes` says what it takes. The
    host tier has `host_bytes`; `store` is None, a URL such as `"file:/var/cache/kv?capacity=8GiB"`, or a Store.
    `weights_id` replaces the fingerprint of the weights; `tenant` keeps users with other names out of these pages.
    A forward waits for a load layer by layer; without `layerwise` it begins when all of it has arrived.

    Thread-safe: forwards run one at a time, and a stream holds nothing between its steps, so that streams may be
    interleaved in one thread or come from several. A batch's prompts are independent of each other.

    Raises UnsupportedGeometryError for a model whose cache is not served, CapacityError for a pool or host tier that
    does not fit, and ConfigError for sizes that cannot be.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        page_tokens: int = DEFAULT_PAGE_TOKENS,
        device_tokens: int | None = None,
        device_bytes: int | str | None = None,
        host_bytes: int | str = "1GiB",
        store: str | Store | None = None,
        cache_config: CacheConfig | None = None,
        weights_id: str | None = None,
        tenant: str = "",
        layerwise: bool = True,
        checkpoint: Path | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        shape = probe_shape(model, page_tokens=page_tokens)
        self.shape = shape
        num_pages = _num_pages(shape.group.page_bytes, page_tokens, device_tokens, device_bytes)
        self.namespace = model_namespace(
            model.config,
            shape.geometry,
            weights_id=weights_id or weights_fingerprint(model, checkpoint),
            dtype=shape.dtype_name,
            attention=str(model.config._attn_implementation),
            tenant=tenant,
        )
        self._state = model_state(model)
        self.end_tokens = _end_tokens(model, tokenizer)
        self.forward = Forward(model, shape)
        self._num_embeddings = model.get_input_embeddings().num_embeddings
        self._max_tokens = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.pool = PagedPool(shape, num_pages)
        self.cache = HierarchicalCache(
            shape.geometry,
            self.namespace,
            device=self.pool.device_cache,
            host_bytes=host_bytes,
            store=store,
            config=cache_config or CacheConfig(),
            engine_stream=self.pool.current_stream,
        )
        self.prefixes = Prefixes(self.cache, self.pool, layerwise=layerwise)
        self._compute_lock = threading.Lock()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        attention: str | None = None,
        **options: Any,
    ) -> Self:
        """Load a model and its tokenizer from a folder or the hub, and wrap it; `options` are the constructor's. The
        weights are identified by the checkpoint's files."""
        folder = resolve_model(name)
        model = load_model(folder, dtype=dtype, device=device, attention=attention)
        return cls(model, load_tokenizer(folder), checkpoint=folder, **options)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the device pool."""
        return self.pool.pool_bytes

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"{type(self.model).__name__}, {shape.num_layers} layers, {shape.token_bytes} B of {shape.dtype_name} KV a "
            f"token; device pool {self.pool.num_pages} pages of {self.pool.page_tokens} tokens, "
            f"{format_bytes(self.pool_bytes)}"
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text prompt."""
        return [int(token) for token in self._need_tokenizer()(text)["input_ids"]]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation (`role`, `content`) by the model's chat template, up to where the
        assistant's next message begins."""
        return chat_tokens(self._need_tokenizer(), messages)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._need_tokenizer().decode(list(tokens), skip_special_tokens=True))

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = GREEDY,
        *,
        cancelled: Callable[[], bool] = _never,
        salt: bytes = b"",
    ) -> Generation:
        """Generate to the end and return tokens, text and report. `prompt` is text or token ids; `salt` separates
        requests that must not share pages."""
        with self.stream(prompt, sampling, cancelled=cancelled, salt=salt) as stream:
            for _ in stream:
                pass
        return stream.result

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        cancelled: Callable[[], bool] = _never,
        salt: bytes = b"",
    ) -> list[Generation]:
        """Generate for independent prompts in one batch, each from its own cached prefix. The times in a report are the
        batch's."""
        choices = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if not prompts or len(choices) != len(prompts):
            raise ConfigError(
                "prompts and samplings do not pair up", got=f"{len(prompts)} and {len(choices)}", expected="one each"
            )
        run = self._run([self._row(prompt, s, salt) for prompt, s in zip(prompts, choices, strict=True)])
        with closing(run.steps(cancelled)) as steps:
            for _ in steps:
                pass
        return [
            Generation(
                tuple(row.tokens),
                "" if self.tokenizer is None else self.decode(row.tokens),
                row.finish_reason or "cancelled",
                row.report(run.started_at),
            )
            for row in run.rows
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling = GREEDY,
        *,
        cancelled: Callable[[], bool] = _never,
        salt: bytes = b"",
    ) -> Stream:
        """Return an iterator over the pieces of one generation, which starts with the first `next`."""
        return Stream(self._run([self._row(prompt, sampling, salt)]), cancelled, self.tokenizer)

    def chat(self, messages: Sequence[Message], sampling: Sampling = GREEDY, **options: Any) -> Generation:
        """Generate the assistant's next message. `options` are those of `generate`."""
        return self.generate(self.encode_chat(messages), sampling, **options)

    def close(self) -> None:
        """Close the cache: transfers are drained, every page is accounted for. Idempotent."""
        self._closed = True
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("there is no tokenizer", remedy="Pass one to CachedModel, or give prompts as token ids.")
        return self.tokenizer

    def _run(self, rows: Sequence[Row]) -> Run:
        if self._closed:
            raise ClosedError("this CachedModel is closed", remedy="Build a new one; a store keeps its pages.")
        state = model_state(self.model)
        if state != self._state:
            raise ConfigError(
                "the model is not what it was when it was wrapped, and its cached pages would be wrong",
                got=", ".join(f"other {topic}" for topic, value in state.items() if value != self._state[topic]),
                remedy="Undo that, or build a new CachedModel from the model as it is now.",
            )
        return Run(self.forward, self.prefixes, rows, self.end_tokens, self._compute_lock)

    def _row(self, prompt: Prompt, sampling: Sampling, salt: bytes) -> Row:
        tokens = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not tokens:
            raise ConfigError("the prompt is empty", expected="at least one token")
        if min(tokens) < 0 or max(tokens) >= self._num_embeddings:
            wrong = next(i for i, token in enumerate(tokens) if not 0 <= token < self._num_embeddings)
            raise TokenError(
                f"token {wrong} of the prompt is not in the model's vocabulary",
                got=tokens[wrong],
                expected=f"0 to {self._num_embeddings - 1}",
            )
        if self._max_tokens is not None and len(tokens) + sampling.max_new_tokens > self._max_tokens:
            raise ConfigError(
                "the prompt and the new tokens are more than the model's positions",
                got=f"{len(tokens)} + {sampling.max_new_tokens} tokens",
                expected=f"at most {self._max_tokens}",
                remedy="Shorten the prompt or lower max_new_tokens.",
            )
        return Row(tokens, sampling, salt)


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return list(map(as_index, prompt))
    except (TypeError, ValueError) as error:
        raise TokenError(
            "the prompt is neither text nor token ids", got=str(error), expected="a str, or one sequence of ints"
        ) from error


def _num_pages(page_bytes: int, page_tokens: int, tokens: int | None, num_bytes: int | str | None) -> int:
    if (tokens is None) == (num_bytes is None):
        raise ConfigError(
            "the device pool's length is not given once",
            got=f"device_tokens={tokens}, device_bytes={num_bytes}",
            expected="either device_tokens or device_bytes",
        )
    num_pages = parse_bytes(num_bytes, name="device_bytes") // page_bytes if num_bytes is not None else 0
    if tokens is not None:
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            raise ConfigError("device_tokens is no number of tokens", got=repr(tokens), expected="an int")
        num_pages = tokens // page_tokens
    if num_pages < 1:
        raise ConfigError(
            "the device pool does not hold one page",
            got=f"device_tokens={tokens}" if tokens is not None else f"device_bytes={num_bytes}",
            expected=f"at least {page_tokens} tokens, {page_bytes} bytes",
        )
    return num_pages


def _end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if named is None:
        named = model.config.get_text_config(decoder=True).eos_token_id
    if named is None and tokenizer is not None:
        named = tokenizer.eos_token_id
    if named is None:
        return ()
    return tuple(named) if isinstance(named, list | tuple) else (int(named),)
