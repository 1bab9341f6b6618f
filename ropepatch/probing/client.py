"""The completions API of OpenAI, as vLLM, SGLang, llama.cpp, mlx-lm, TGI and others serve it."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX, Event, Timer
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # that of its httpx

from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.files import parse_json

KEY = "ROPEPATCH_API_KEY"  # of the environment
TIMEOUT = 600.0  # seconds for one answer: a long text is read in it
TRIES = 4
PAUSE = 1.0  # seconds before the second try; twice as long before each further one
LARGEST = 16 << 20  # bytes of an answer
BUSY = (429, 502, 503, 504)
BROKEN = 500  # of a form that was answered before; a server may say so of a field that it does not know
COUNTS = (20, 10, 5)  # of most probable tokens, of which servers allow at most so many
AS_IDS = {"return_tokens_as_token_ids": True}  # vLLM's; servers that are strict refuse it
WAYS: tuple[dict[str, Any], ...] = (  # to ask for log-probabilities
    *({"logprobs": count} | AS_IDS for count in COUNTS),
    *({"logprobs": count} for count in COUNTS),
    *({"logprobs": True, "top_logprobs": count} for count in COUNTS),  # mlx-lm's, and that of chats
)
HTTPX: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])  # httpx, or its successor


class RefusedError(RopepatchError):
    """The server answers, but not this question."""


@dataclass(frozen=True)
class Answer:
    """What a server says of the next token.

    Args:
        by_id: The log-probabilities by token id, where it names tokens so.
        by_text: The same by the text of tokens.
        tokens: How many tokens it has read, by its own account; None where it says nothing.
    """

    by_id: dict[int, float]
    by_text: dict[str, float]
    tokens: int | None


@dataclass
class Server:
    """One model of a server, whose connections are closed at the end of a `with` block.

    Args:
        url: Up to `/v1`, with or without it.
        model: Its name there; empty for the first that the server lists.
        timeout: Seconds for one answer.
    """

    url: str
    model: str = ""
    timeout: float = TIMEOUT
    limit: int | None = field(default=None, init=False)  # of tokens, where the server states it
    form: dict[str, Any] | None = field(default=None, init=False)  # of a question that it answers

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna"))
            _ = parts.port
        except ValueError:  # a bracket that does not close, a part of a name beyond 63 letters, no port
            is_address = False
        if not is_address:
            hint = "such as http://localhost:8000; start the engine with its server first"
            raise RopepatchError(f"{printable(self.url)} is no address of a server", hint=hint)
        path = parts.path.rstrip("/").removesuffix("/completions")
        self.base = urlunsplit(parts._replace(path=path if path.endswith("/v1") else f"{path}/v1", query=""))
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # without a password
        self.key = os.environ.get(KEY, "")
        self.client = HTTPX.Client(timeout=HTTPX.Timeout(self.timeout, connect=10.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def look(self) -> None:
        """Find the model and its length, where the server lists them."""
        try:
            listed = self._ask("GET", "models").get("data")
        except RefusedError:
            listed = None
        models = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        own = next((one for one in models if self.model in ("", one.get("id"))), {})
        self.model = self.model or str(own.get("id") or "")
        limit = own.get("max_model_len")
        self.limit = limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None

    def next_token(self, ids: list[int], text: str | None) -> Answer:
        """The most probable next tokens after a prompt, as token ids or, where it takes none, as text."""
        if self.form is not None:
            return self._said_something(self.form, ids, text)
        refusal = RefusedError("")
        for by_ids, way in itertools.product((True, False), WAYS):
            form = {"by_ids": by_ids, "way": way}
            if not by_ids and text is None:
                continue
            try:
                answer = self._said_something(form, ids, text)
            except RefusedError as error:
                refusal = error
            else:
                self.form = form
                return answer
        raise RefusedError(str(refusal), hint="it must answer /v1/completions with logprobs: see the guide")

    def _said_something(self, form: dict[str, Any], ids: list[int], text: str | None) -> Answer:
        """An answer; one without log-probabilities is asked for again.

        llama.cpp gives none where it draws the end of the text, or a part of a letter.
        """
        for _ in range(TRIES):
            answer = self._answer(form, ids, text)
            if answer.by_id or answer.by_text:
                return answer
        if self.form is None:
            raise RefusedError(f"{self.shown} answers without logprobs")
        return answer

    def _answer(self, form: dict[str, Any], ids: list[int], text: str | None) -> Answer:
        body = ({"model": self.model} if self.model else {}) | {
            "prompt": ids if form["by_ids"] else text,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "stream": False,
        }
        content = self._ask("POST", "completions", body | form["way"])
        usage = content.get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        tokens = tokens if isinstance(tokens, int) and tokens > 0 and tokens is not True else None
        if form["by_ids"] and tokens is not None and tokens > len(ids) + 1:
            raise RefusedError(f"{self.shown} read {tokens} tokens where {len(ids)} were sent")
        return Answer(*_tops(content, self.shown), tokens)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url, status, content = f"{self.base}/{path}", 0, b""
        for attempt in range(TRIES):
            try:
                with self._in_time(), self.client.stream(method, url, json=body, headers=headers) as response:
                    status, content = response.status_code, b""
                    for part in response.iter_bytes():
                        content += part
                        if len(content) > LARGEST:
                            raise RopepatchError(f"{self.shown} answers more than {LARGEST >> 20} MiB")
            except HTTPX.RemoteProtocolError as error:  # it hangs up on what it does not understand
                raise RefusedError(f"{self.shown} hangs up: {type(error).__name__}") from error
            except HTTPX.ReadTimeout as error:  # it reads the prompt; once more would take as long
                raise self._late() from error
            except (HTTPError, HTTPX.InvalidURL) as error:
                status, content = 0, type(error).__name__.encode()
            if status and status not in BUSY and not (status == BROKEN and self.form):
                break
            if attempt < TRIES - 1:
                time.sleep(PAUSE * 2**attempt)
        said = self._said(content)
        if not status:
            raise RopepatchError(
                f"no answer from {self.shown}: {said}", hint="is it running, and on this port?"
            )
        if status in (401, 403):
            raise RopepatchError(f"{self.shown} wants a key ({status})", hint=f"set {KEY}")
        if status != 200:
            raise RefusedError(f"{self.shown} answers {status} to /v1/{path}: {said}")
        try:
            parsed = parse_json(content.decode())
        except ValueError as error:
            raise RefusedError(f"{self.shown} answers no JSON to /v1/{path}: {said}") from error
        if not isinstance(parsed, dict):
            raise RefusedError(f"{self.shown} answers no JSON object to /v1/{path}: {said}")
        return parsed

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Hang up on an answer that is not whole in time, of which the client limits each read alone."""
        late = Event()

        def hang_up() -> None:
            late.set()
            self.client.close()

        timer = Timer(min(self.timeout, TIMEOUT_MAX), hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if late.is_set():
                raise self._late() from error
            raise
        finally:
            timer.cancel()

    def _late(self) -> RopepatchError:
        return RopepatchError(
            f"{self.shown} gave no answer within {self.timeout:g} seconds",
            hint=f"give it more time: {argument('timeout')}",
        )

    def _said(self, content: bytes) -> str:
        text = " ".join(content.decode(errors="replace").split())
        return printable(text.replace(self.key, "***") if self.key else text)[:300]


def _tops(content: dict[str, Any], name: str) -> tuple[dict[int, float], dict[str, float]]:
    """The log-probabilities of an answer, in the older form of OpenAI or that of chats; empty without any."""
    try:
        told = content["choices"][0]["logprobs"]
        tokens = told and told["content" if "content" in told else "top_logprobs"]
        if not tokens:
            return {}, {}
        entries = tokens[0]["top_logprobs"] if "content" in told else tokens[0]
        if isinstance(entries, dict):
            entries = [{"token": token, "logprob": log_prob} for token, log_prob in entries.items()]
        by_id, by_text = dict[int, float](), dict[str, float]()
        for entry in entries:
            log_prob, token = float(entry["logprob"]), str(entry.get("token", ""))
            if not -1e4 < log_prob <= 1e-3:  # what is impossible is not listed
                if math.isnan(log_prob) or log_prob > 0:
                    raise ValueError(log_prob)
                continue
            number = entry.get("id", token.removeprefix("token_id:") if "token_id:" in token else None)
            if number is not None:
                by_id[int(number)] = log_prob
            else:
                by_text[token] = log_prob
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"{name} answers without usable logprobs") from error
    return by_id, by_text
