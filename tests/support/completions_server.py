"""A server of OpenAI's completions API for an `Engine`, with differences and faults of real servers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import listening

Reply = tuple[int, bytes]


@dataclass
class Manners:
    """How a server behaves.

    Args:
        style: The format of tokens: `ids` as in vLLM, `chat` as in llama.cpp, `mlx` as in mlx-lm, `texts` as
            in most.
        takes_ids: Whether a prompt may be token ids.
        most: Most log-probabilities in an answer.
        limit: Most tokens; None for all.
        beyond: For more tokens: `refuse`; `last` drops the others, `told` also reports it.
        ends: Number of tokens before the end of the text, which has no log-probabilities.
        model: The name of its model.
        key: The API key that it requires.
        uncounted: Number of tokens that it does not count, such as the BOS token.
        before: Number of first requests that get `reply`.
        reply: See `before`.
    """

    style: str = "ids"
    takes_ids: bool = True
    most: int = 20
    limit: int | None = None
    beyond: str = "refuse"
    ends: frozenset[int] = frozenset()
    model: str = "m"
    key: str = ""
    uncounted: int = 0
    before: int = 0
    reply: Reply = (503, b"loading")
    asked: list[dict[str, Any]] = field(default_factory=list)


def refusal(manners, body):
    """The error for an invalid request; None for a valid one."""
    if "logprobs" not in body:
        return None
    # mlx-lm requires true, and the number in another key
    if (body["logprobs"] is True) != (manners.style == "mlx"):
        return 400, b'{"error": "logprobs of another type"}'
    everything = manners.most == 20 and manners.style == "chat"  # as llama.cpp lists
    if body.get("top_logprobs", body["logprobs"]) > manners.most and not everything:
        return 400, b'{"error": "too many logprobs"}'
    if isinstance(body["prompt"], list) and not manners.takes_ids:
        return 400, b'{"error": "prompt must be a string"}'
    return None


def read(manners, engine, tokenizer, body):
    if error := refusal(manners, body):
        return error
    prompt = body["prompt"]
    ids = prompt if isinstance(prompt, list) else list(tokenizer(prompt).input_ids)
    count = len(ids)
    if manners.limit is not None and count >= manners.limit:
        if manners.beyond == "refuse":
            return 400, b'{"error": {"message": "maximum context length"}}'
        ids = ids[-manners.limit :]
        count = count if manners.beyond != "told" else len(ids)
    (top,) = engine.tops(
        ids, [len(ids)], body.get("top_logprobs", body.get("logprobs", 1))
    )
    token = max(top, key=top.__getitem__)

    def named(token):
        as_ids = manners.style == "ids" and body.get("return_tokens_as_token_ids")
        return f"token_id:{token}" if as_ids else tokenizer.decode([token])

    logprobs = None
    if manners.style in ("chat", "mlx"):
        most = [
            {"id": number, "token": "?", "logprob": value}
            for number, value in top.items()
        ]
        entries = [{"id": token, "logprob": top[token], "top_logprobs": most}]
        logprobs = {"content": entries}
        if len(ids) in manners.ends:
            logprobs = None if len(ids) % 2 else {"content": []}
    elif "logprobs" in body:
        logprobs = {
            "tokens": [named(token)],
            "token_logprobs": [top[token]],
            "top_logprobs": [{named(number): value for number, value in top.items()}],
        }
    choice = {"text": tokenizer.decode([token]), "logprobs": logprobs}
    usage = {"prompt_tokens": count - manners.uncounted}
    return 200, json.dumps({"choices": [choice], "usage": usage}).encode()


def serving(engine, tokenizer, manners):
    """A server that runs within a block, as its address."""

    def answer(request):
        sent = json.loads(request.body() or "{}")
        sent_key = request.headers.get("Authorization")
        if manners.key and sent_key != f"Bearer {manners.key}":
            return 401, b"no key"
        if manners.before:
            manners.before -= 1
            return manners.reply
        if request.command == "POST":
            manners.asked.append(sent)
            return read(manners, engine, tokenizer, sent)
        if request.path == "/v1/models":
            return 200, json.dumps({"data": [{"id": manners.model}]}).encode()
        return 404, b"none"

    def with_headers(request):
        status, content = answer(request)
        return status, {}, content

    return listening.serving(with_headers)
