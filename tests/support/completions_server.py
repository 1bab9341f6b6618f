"""A server of OpenAI's completions API for an `Engine`, with differences and faults of real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import listening
import torch
from engines import Engine
from torch import Tensor

Reply = tuple[int, bytes]
KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "logprobs", "stream", "logit_bias", "echo"}


@dataclass
class Manners:
    """How a server behaves.

    Args:
        style: The format of tokens: `ids` as in vLLM, `chat` as in llama.cpp, `mlx` as in mlx-lm, `texts` as
            in most; `none` for no log-probabilities.
        echoes: Whether it can echo a prompt with log-probabilities, as in vLLM and SGLang.
        biased: Whether log-probabilities include the requested bias, as in mlx-lm and SGLang.
        silent: Generated tokens without log-probabilities, as in llama.cpp for parts of letters.
        takes_ids: Whether a prompt may be token ids.
        strict: Whether unknown keys are errors.
        most: Most log-probabilities in an answer.
        limit: Most tokens; None for all.
        beyond: For more tokens: `refuse`; `last` and `first` drop the others, `told` also reports it.
        ends: Number of tokens before the end of the text, which has no log-probabilities.
        states: Whether it lists the limit.
        model: The name of its model.
        key: The API key that it requires.
        before: Number of first requests that get `reply`.
        reply: See `before`.
    """

    style: str = "ids"
    takes_ids: bool = True
    strict: bool = False
    most: int = 20
    limit: int | None = None
    beyond: str = "refuse"
    ends: frozenset[int] = frozenset()
    echoes: bool = False
    biased: bool = False
    silent: frozenset[int] = frozenset()
    states: bool = False
    model: str = "m"
    key: str = ""
    before: int = 0
    reply: Reply = (503, b"loading")
    asked: list[dict[str, Any]] = field(default_factory=list)


def refusal(manners: Manners, body: dict[str, Any]) -> Reply | None:
    """The error for an invalid request; None for a valid one."""
    if "logprobs" not in body:
        return None
    if (body["logprobs"] is True) != (
        manners.style == "mlx"
    ):  # which requires true, and the number in another key
        return 400, b'{"error": "logprobs of another type"}'
    if body.get("echo") and not manners.echoes:
        return 400, b'{"error": "Only no echo is supported"}'
    if manners.strict and body.keys() - KNOWN:
        return 422, b'{"error": "extra fields"}'
    everything = manners.most == 20 and manners.style == "chat"  # as llama.cpp lists
    if body.get("top_logprobs", body["logprobs"]) > manners.most and not everything:
        return 400, b'{"error": "too many logprobs"}'
    if isinstance(body["prompt"], list) and not manners.takes_ids:
        return 400, b'{"error": "prompt must be a string"}'
    return None


def read(manners: Manners, engine: Engine, tokenizer: Any, body: dict[str, Any]) -> Reply:
    if error := refusal(manners, body):
        return error
    prompt = body["prompt"]
    ids = prompt if isinstance(prompt, list) else list(tokenizer(prompt).input_ids)
    count = len(ids)
    if manners.limit is not None and count >= manners.limit:
        if manners.beyond == "refuse":
            return 400, b'{"error": {"message": "maximum context length"}}'
        ids = ids[: manners.limit] if manners.beyond == "first" else ids[-manners.limit :]
        count = count if manners.beyond != "told" else len(ids)
    written = write(manners, engine, ids, body)
    text = tokenizer.decode([token for token, _, _ in written])
    if body.get("echo"):
        written = [*echoed(engine, ids), *written]

    def named(token: int) -> str:
        as_ids = manners.style == "ids" and body.get("return_tokens_as_token_ids")
        return f"token_id:{token}" if as_ids else tokenizer.decode([token])

    logprobs: Any = None
    if manners.style in ("chat", "mlx"):
        entries = [
            {"id": token, "logprob": own}
            | {"top_logprobs": [{"id": n, "token": "?", "logprob": v} for n, v in top.items()]}
            for token, own, top in written
            if token not in manners.silent
        ]
        logprobs = {"content": entries}
        if len(ids) in manners.ends or not entries:
            logprobs = None if len(ids) % 2 else {"content": []}
    elif manners.style != "none" and "logprobs" in body:
        logprobs = {
            "tokens": [named(token) for token, _, _ in written],
            "token_logprobs": [own for _, own, _ in written],
            "top_logprobs": [{named(n): value for n, value in top.items()} or None for _, _, top in written],
        }
    usage = {"prompt_tokens": count}
    return 200, json.dumps({"choices": [{"text": text, "logprobs": logprobs}], "usage": usage}).encode()


Written = tuple[
    int, float | None, dict[int, float]
]  # a token, its log-probability, and the most probable ones


def write(manners: Manners, engine: Engine, ids: list[int], body: dict[str, Any]) -> list[Written]:
    """Generate greedily; a single token without bias comes from the cached `tops`."""
    count = body.get("top_logprobs", body.get("logprobs", 1))
    if body["max_tokens"] == 1 and "logit_bias" not in body:
        (top,) = engine.tops(ids, [len(ids)], count)
        return [(max(top, key=top.__getitem__), max(top.values()), top)]
    written: list[Written] = []
    for _ in range(body["max_tokens"]):
        row = engine.log_probs(ids)[-1]
        biased = row.clone()
        for token, bias in body.get("logit_bias", {}).items():
            biased[int(token)] += bias
        token = int(biased.argmax())
        reported = biased.log_softmax(-1) if manners.biased else row
        written.append((token, reported[token].item(), most_probable(reported, count)))
        ids = [*ids, token]
    return written


def echoed(engine: Engine, ids: list[int]) -> list[Written]:
    """The tokens of a prompt; the first has no log-probability."""
    rows = engine.log_probs(ids)[:-1]
    own = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    tops = [most_probable(row, 1) for row in rows]
    return [(ids[0], None, {}), *zip(ids[1:], own, tops, strict=True)]


def most_probable(row: Tensor, count: int) -> dict[int, float]:
    values, tokens = row.topk(min(count, len(row)))
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


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
        stated = {"max_model_len": manners.limit} if manners.states else {}
        listed = json.dumps({"data": [{"id": manners.model} | stated]}).encode()
        return (200, {}, listed) if request.path == "/v1/models" else (404, {}, b"none")

    with listening.serving(answer) as address:
        yield address
