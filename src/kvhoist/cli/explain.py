"""`kvhoist explain`: which pages of a prompt a store holds, and why the first miss is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhoist.cli.output import JsonOption, console, print_json, working
from kvhoist.cli.store import store_path
from kvhoist.errors import ConfigError
from kvhoist.settings import Settings
from kvhoist.storage import Store

_WITH_OWN_HASHES = {
    "sglang": ("SGLang", "SGLang's log says at its start in which fields the folder's pages are another engine's."),
    "vllm": (
        "vLLM",
        "Start vLLM with VLLM_LOGGING_LEVEL=DEBUG: it logs for each request what is cached, and why not.",
    ),
}
"""Engines by whose own hashes pages are named: how they are called, and where they say why a page is no hit."""


def explain(
    store: Annotated[str, typer.Option("--store", metavar="DIR", help="The store's folder.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Model folder or hub name; default: the packaged SmolLM2.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="The prompt as plain text.")] = None,
    chat: Annotated[
        Path | None, typer.Option("--chat", metavar="FILE", help="The prompt as a JSON list of role and content.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE", help="The prompt as token ids, JSON or separated by space."),
    ] = None,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, help="Tokens a page.")] = 32,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="What the model ran in; default: the checkpoint's dtype.")
    ] = None,
    attention: Annotated[str, typer.Option("--attention", help="Attention implementation it ran with.")] = "sdpa",
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant it ran for.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Say page by page what the store holds of a prompt, and why the first page that it lacks is not there."""
    given = [value for value in (text, chat, tokens) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "the prompt is not given once", got=f"{len(given)} of them", choices=["--text", "--chat", "--tokens"]
        )
    folder = store_path(store)
    if not folder.is_dir():
        raise ConfigError("there is no such store folder", got=str(folder), expected="a folder made by a file: store")
    with working("reading the checkpoint", as_json=as_json):
        data, shown = _explain(folder, model, text, chat, tokens, page_tokens, dtype, attention, tenant)
    if as_json:
        print_json(data)
    else:
        console().print(shown, soft_wrap=True, markup=False)


def _explain(
    folder: Path,
    model: str | None,
    text: str | None,
    chat: Path | None,
    tokens: Path | None,
    page_tokens: int,
    dtype: str | None,
    attention: str,
    tenant: str,
) -> tuple[dict[str, Any], str]:
    from kvhoist.adapters.transformers.loading import chat_tokens, load_tokenizer, quiet_transformers, resolve_model
    from kvhoist.adapters.transformers.stored import explain_stored, namespace_of_checkpoint
    from kvhoist.demo.packaged_model import packaged_model
    from kvhoist.storage import FileStore

    quiet_transformers()
    checkpoint = packaged_model(Settings.from_env().cache_dir) if model is None else resolve_model(model)
    namespace = namespace_of_checkpoint(
        checkpoint, page_tokens=page_tokens, dtype=dtype, attention=attention, tenant=tenant
    )
    if tokens is not None:
        prompt = _read_tokens(tokens)
    elif chat is not None:
        prompt = chat_tokens(load_tokenizer(checkpoint), _read_chat(chat))
    else:
        prompt = [int(token) for token in load_tokenizer(checkpoint)(text)["input_ids"]]
    opened = FileStore(folder, read_only=True)
    try:
        _refuse_engines(opened, folder)
        found = explain_stored(opened, namespace, prompt, page_tokens=page_tokens)
    finally:
        opened.close()
    data = {"store": str(folder), "model": str(checkpoint), "namespace": namespace.digest.hex(), **found.to_dict()}
    return data, f"{found}\nNamespace {namespace} of {folder}."


def _refuse_engines(store: Store, folder: Path) -> None:
    """Raise ConfigError for a folder that only vLLM or SGLang wrote to: their keys cannot be computed from tokens."""
    engines = [fields.get("compute.engine", "").strip('"') for fields in store.namespaces().values()]
    names = sorted({engine.partition(" ")[0] for engine in engines})
    if names and all(name in _WITH_OWN_HASHES for name in names):
        raise ConfigError(
            f"the pages in {folder} were written by {' and '.join(_WITH_OWN_HASHES[name][0] for name in names)}, "
            "whose block hashes this command cannot compute",
            remedy=" ".join(_WITH_OWN_HASHES[name][1] for name in names),
        )


def _read_tokens(path: Path) -> list[int]:
    text = _read(path)
    try:
        ids = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(word) for word in text.replace(",", " ").split()]
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} holds no token ids", got=str(error), expected="ints, as JSON or by space") from error
    return list(ids)


def _read_chat(path: Path) -> list[dict[str, str]]:
    text = _read(path)
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON", got=str(error)) from error
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        for message in messages
    ):
        raise ConfigError(f"{path} is no chat", expected='a JSON list of {"role": ..., "content": ...}')
    return messages


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read", got=str(error)) from error
