"""A server of OpenAI's completions API over one of `engines`, with the manners and the lies of real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import listening
from engines import Engine

Reply = tuple[int, bytes]
KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "logprobs", "stream"}


@dataclass
class Manners:
    """How a server behaves.

    Args:
        style: How it names tokens: `ids` as vLLM, `chat` as llama.cpp, `mlx` as mlx-lm, `texts` as most.
        takes_ids: Whether a prompt may be token ids.
        strict: Whether unknown keys are refused.
        most: The most log-probabilities that it gives.
        limit: The most tokens; None for all.
        beyond: What it does with more: `refuse`; `last` and `first` drop the others, `told` says so, too.
        ends: After so many tokens it draws the end of the text, and gives no log-probabilities of it.
        model: What it calls its model.
        key: The key that it wants.
        before: Answers so many questions by `reply` first.
        reply: See `before`.
    """

    style: str = "ids"
    takes_ids: bool = True
    strict: bool = False
    most: int = 20
    limit: int | None = None
    beyond: str = "refuse"
    ends: frozenset[int] = frozenset()
    model: str = "m"
    key: str = ""
    before: int = 0
    reply: Reply = (503, b"loading")
    asked: list[dict[str, Any]] = field(default_factory=list)


def refusal(manners: Manners, body: dict[str, Any]) -> Reply | None:
    """Why a question is not answered."""
    if (body["logprobs"] is True) != (
        manners.style == "mlx"
    ):  # which wants true, and says how many beside it
        return 400, b'{"error": "logprobs of another type"}'
    if manners.strict and body.keys() - KNOWN:
        return 422, b'{"error": "extra fields"}'
    if body.get("top_logprobs", body["logprobs"]) > manners.most:
        return 400, b'{"error": "too many logprobs"}'
    if isinstance(body["prompt"], list) and not manners.takes_ids:
        return 400, b'{"error": "prompt must be a string"}'
    return None


def read(manners: Manners, engine: Engine, tokenizer: Any, body: dict[str, Any]) -> Reply:
    if refused := refusal(manners, body):
        return refused
    prompt = body["prompt"]
    ids = prompt if isinstance(prompt, list) else list(tokenizer(prompt).input_ids)
    count = len(ids)
    if manners.limit is not None and count >= manners.limit:
        if manners.beyond == "refuse":
            return 400, b'{"error": {"message": "maximum context length"}}'
        ids = ids[: manners.limit] if manners.beyond == "first" else ids[-manners.limit :]
        count = count if manners.beyond != "told" else len(ids)
    (top,) = engine.tops(ids, [len(ids)], body.get("top_logprobs", body["logprobs"]))
    if manners.style in ("chat", "mlx"):
        entries = [{"id": token, "token": "?", "logprob": value} for token, value in top.items()]
        told: Any = {"content": [{"top_logprobs": entries}]}
        if len(ids) in manners.ends:
            told = None if len(ids) % 2 else {"content": []}
    elif manners.style == "ids" and body.get("return_tokens_as_token_ids"):
        told = {"top_logprobs": [{f"token_id:{token}": value for token, value in top.items()}]}
    else:
        told = {"top_logprobs": [{tokenizer.decode([token]): value for token, value in top.items()}]}
    usage = {"prompt_tokens": count}
    return 200, json.dumps({"choices": [{"text": "", "logprobs": told}], "usage": usage}).encode()


@contextmanager
def serving(engine: Engine, tokenizer: Any, manners: Manners) -> Iterator[str]:
    """The address of a server that runs within the block."""

    def answer(request: listening.Request) -> listening.Answer:
        sent = json.loads(request.body() or "{}")
        if manners.key and request.headers.get("Authorization") != f"Bearer {manners.key}":
            return 401, {}, b"no key"
        if manners.before:
            manners.before -= 1
            return manners.reply[0], {}, manners.reply[1]
        if request.command == "POST":
            manners.asked.append(sent)
            status, content = read(manners, engine, tokenizer, sent)
            return status, {}, content
        listed = json.dumps({"data": [{"id": manners.model}]}).encode()
        return (200, {}, listed) if request.path == "/v1/models" else (404, {}, b"none")

    with listening.serving(answer) as address:
        yield address
