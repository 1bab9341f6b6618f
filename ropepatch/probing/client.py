"""The completions API of OpenAI, as vLLM, SGLang, llama.cpp, mlx-lm, TGI and others serve it."""

from __future__ import annotations

import importlib
import math
import os
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit, urlunsplit

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its httpx's

from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.files import parse_json
from ropepatch.settings import number_of, shown

KEY = "ROPEPATCH_API_KEY"  # environment variable
TIMEOUT = 600.0  # seconds for one answer, including the prefill of a long prompt
TRIES = 4
PAUSE = 1.0  # seconds before the second try; twice as long before each further one
# Seconds for all tries of a request that the server is too busy to answer
PATIENCE = 10.0
BUSY = (429, 502, 503, 504)
BROKEN = 500  # retried only for a request form that worked before: some servers use it for unknown fields
COUNTS = (20, 10, 5)  # of most probable tokens; servers limit this number
HTTPX: Any = importlib.import_module(
    HTTPError.__module__.partition(".")[0]
)  # httpx, or its successor


class RefusedError(RopepatchError):
    """The server answers, but rejects this request."""


class Form(NamedTuple):
    """A form of request for log-probabilities.

    Args:
        by_ids: Whether the prompt is token ids, as for vLLM, SGLang and llama.cpp; or text, as for mlx-lm.
        number: The number of most probable tokens.
    """

    by_ids: bool
    number: int

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the request."""
        if self.by_ids:
            return {
                "logprobs": self.number,
                "return_tokens_as_token_ids": True,
            }  # the second is vLLM's
        return {"logprobs": True, "top_logprobs": self.number}


FORMS = [Form(by_ids, number) for by_ids in (True, False) for number in COUNTS]


@dataclass(frozen=True)
class Answer:
    """A server's prediction of the next token.

    Args:
        by_id: The log-probabilities by token id, if the server returns ids.
        by_text: The log-probabilities by token text, if it does not.
        tokens: The number of prompt tokens that the server reports; None if it reports none.
    """

    by_id: dict[int, float]
    by_text: dict[str, float]
    tokens: int | None


@dataclass
class Server:
    """One model of a server; leaving a `with` block closes its connections.

    Args:
        url: The base address, with or without `/v1`.
        model: The model's name on the server; empty for the first that the server lists.
        timeout: Seconds for one answer.
    """

    url: str
    model: str = ""
    timeout: float = TIMEOUT
    limit: int | None = field(
        default=None, init=False
    )  # in tokens, if the server states it
    form: Form | None = field(default=None, init=False)  # of a request that works

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(
                (parts.hostname or "").encode("idna")
            )
            _ = parts.port
        except (
            ValueError
        ):  # an open bracket, a label of more than 63 letters, an invalid port
            is_address = False
        if not is_address:
            hint = "start the engine's server, and give its address, e.g. http://localhost:8000"
            raise RopepatchError(
                f"{printable(self.url)} is not a server address", hint=hint
            )
        path = parts.path.rstrip("/").removesuffix("/completions")
        self.base = urlunsplit(
            parts._replace(
                path=path if path.endswith("/v1") else f"{path}/v1", query=""
            )
        )
        # Without a password
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.key = os.environ.get(KEY, "")
        seconds = number_of(self.timeout)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds < 1e9
        ):
            raise RopepatchError(
                f"{argument('timeout')} must be a number above 0, got {shown(seconds)}",
                hint=f"such as {argument('timeout', 60)}",
            )
        self.client = HTTPX.Client(timeout=HTTPX.Timeout(self.timeout, connect=10.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def look(self) -> None:
        """Look up the model and its context length on the server."""
        try:
            listed = self._ask("GET", "models").get("data")
        except RefusedError:
            listed = None
        models = (
            [one for one in listed if isinstance(one, dict)]
            if isinstance(listed, list)
            else []
        )
        own = next((one for one in models if self.model in ("", one.get("id"))), {})
        self.model = self.model or str(own.get("id") or "")
        meta = own.get("meta")  # llama.cpp's
        stated = (
            own.get("max_model_len"),
            meta.get("n_ctx") if isinstance(meta, dict) else None,
        )
        self.limit = next(
            (n for n in stated if isinstance(n, int) and n is not True and n > 0), None
        )

    def next_token(self, ids: list[int], text: str | None) -> Answer:
        """Return the most probable next tokens after a prompt, sent as token ids or else as text."""
        if self.form is not None:
            return self._said_something(self.form, ids, text)
        refusal = RefusedError("")
        for form in FORMS:
            if not form.by_ids and text is None:
                continue
            try:
                answer = self._said_something(form, ids, text)
            except RefusedError as error:
                refusal = error
            else:
                self.form = form
                return answer
        raise RefusedError(
            str(refusal), hint="use a server whose /v1/completions returns logprobs"
        )

    def _said_something(self, form: Form, ids: list[int], text: str | None) -> Answer:
        """Request an answer, again if it has no log-probabilities.

        llama.cpp returns none after sampling the end of the text or an incomplete UTF-8 character.
        """
        for _ in range(TRIES):
            answer = self._answer(form, ids, text)
            if answer.by_id or answer.by_text:
                return answer
        if self.form is None:
            raise RefusedError(f"{self.shown} returned no logprobs")
        return answer

    def _answer(self, form: Form, ids: list[int], text: str | None) -> Answer:
        named = {"model": self.model} if self.model else {}
        body = named | {
            "prompt": ids if form.by_ids else text,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "stream": False,
        }
        content = self._ask("POST", "completions", body | form.keys)
        tokens = _tokens_read(content)
        if form.by_ids and tokens is not None and tokens > len(ids) + 1:
            raise RefusedError(
                f"{self.shown} reports {tokens} prompt tokens, {len(ids)} were sent"
            )
        by_id, by_text = _log_probs(content, self.shown)
        return Answer(by_id, by_text, tokens)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url, status, content = f"{self.base}/{path}", 0, b""
        last = time.monotonic() + min(PATIENCE, self.timeout)  # no try begins later
        for attempt in range(TRIES):
            try:
                response = self.client.request(method, url, json=body, headers=headers)
                status, content = response.status_code, response.content
            except (
                HTTPX.RemoteProtocolError
            ) as error:  # some servers do so on requests they cannot parse
                raise RefusedError(
                    f"{self.shown} closed the connection: {type(error).__name__}"
                ) from error
            except (
                HTTPX.ReadTimeout
            ) as error:  # a retry of a long prefill would take as long
                raise self._late() from error
            except (HTTPError, HTTPX.InvalidURL) as error:
                status, content = 0, type(error).__name__.encode()
            if status and status not in BUSY and not (status == BROKEN and self.form):
                break
            pause = PAUSE * 2**attempt
            if attempt == TRIES - 1 or time.monotonic() + pause > last:
                break
            time.sleep(pause)
        said = self._said(content)
        if not status:
            raise RopepatchError(
                f"no answer from {self.shown}: {said}",
                hint="check that it runs and that the port is right",
            )
        if status in BUSY:
            raise RopepatchError(
                f"{self.shown} is busy (HTTP {status}): {said}",
                hint="wait until it answers other requests",
            )
        if status in (401, 403):
            raise RopepatchError(
                f"{self.shown} needs an API key (HTTP {status})", hint=f"set {KEY}"
            )
        if status != 200:
            raise RefusedError(
                f"{self.shown} returned HTTP {status} for /v1/{path}: {said}"
            )
        try:
            parsed = parse_json(content.decode())
        except ValueError as error:
            raise RefusedError(
                f"{self.shown} returned no JSON for /v1/{path}: {said}"
            ) from error
        if not isinstance(parsed, dict):
            raise RefusedError(
                f"{self.shown} returned no JSON object for /v1/{path}: {said}"
            )
        return parsed

    def _late(self) -> RopepatchError:
        return RopepatchError(
            f"{self.shown} gave no answer within {self.timeout:g} seconds",
            hint=f"raise {argument('timeout')}",
        )

    def _said(self, content: bytes) -> str:
        text = " ".join(content.decode(errors="replace").split())
        return printable(text.replace(self.key, "***") if self.key else text)[:300]


def _tokens_read(content: dict[str, Any]) -> int | None:
    """Return the number of prompt tokens that the server reports."""
    usage = content.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return (
        tokens
        if isinstance(tokens, int) and tokens > 0 and tokens is not True
        else None
    )


def _log_probs(
    content: dict[str, Any], name: str
) -> tuple[dict[int, float], dict[str, float]]:
    """Parse the most probable first tokens, by id and by text, in OpenAI's completions or chat format."""
    by_id, by_text = dict[int, float](), dict[str, float]()
    try:
        told = content["choices"][0]["logprobs"] or {}
        if "content" in told:
            first = [entry["top_logprobs"] for entry in told["content"] or ()][:1]
        else:
            first = [_listed(top) for top in told.get("top_logprobs") or ()][:1]
        for entry in first[0] if first else ():
            log_prob = _log_prob(entry["logprob"])
            if log_prob is None:
                continue
            number = _number(entry)
            if number is None:
                by_text[str(entry.get("token", ""))] = log_prob
            else:
                by_id[number] = log_prob
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"{name} returned no usable logprobs") from error
    return by_id, by_text


def _listed(top: Any) -> list[dict[str, Any]]:
    if isinstance(top, dict):
        return [
            {"token": token, "logprob": log_prob} for token, log_prob in top.items()
        ]
    return list(top or ())


def _log_prob(value: Any) -> float | None:
    """Parse a log-probability; None for an impossible token or a missing value."""
    if value is None:
        return None
    log_prob = float(value)
    if math.isnan(log_prob) or log_prob > 1e-3:
        raise ValueError(log_prob)
    return log_prob if log_prob > -1e4 else None


def _number(entry: dict[str, Any]) -> int | None:
    token = str(entry.get("token", ""))
    number = entry.get(
        "id", token.removeprefix("token_id:") if "token_id:" in token else None
    )
    return None if number is None else int(number)
