"""The completions API of OpenAI, as vLLM, SGLang, llama.cpp, mlx-lm, TGI and others serve it."""

from __future__ import annotations

import importlib
import math
import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from urllib.parse import SplitResult, urlsplit, urlunsplit

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
# Httpx, or its successor
HTTPX: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])


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
        if self.by_ids:  # the second key is vLLM's
            return {"logprobs": self.number, "return_tokens_as_token_ids": True}
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


class Server:
    """One model of a server; leaving a `with` block closes its connections.

    Args:
        url: The base address, with or without `/v1`.
        model: The model's name on the server; empty for the first that the server lists.
        timeout: Seconds for one answer.

    Attributes:
        limit: The context length in tokens, if the server states it.
        form: The form of a request that works.
    """

    limit: int | None = None
    form: Form | None = None

    def __init__(self, url: str, model: str = "", timeout: float = TIMEOUT) -> None:
        seconds = number_of(timeout)
        if type(seconds) not in (int, float) or not 0 < seconds < 1e9:
            raise RopepatchError(
                f"{argument('timeout')} must be a number above 0, got {shown(seconds)}",
                hint=f"such as {argument('timeout', 60)}",
            )
        address = _address(url)
        path = address.path.rstrip("/").removesuffix("/completions")
        if not path.endswith("/v1"):
            path += "/v1"
        self.model, self.timeout = model, timeout
        self.base = urlunsplit(address._replace(path=path, query=""))
        # Without a password
        self.shown = f"{address.scheme}://{address.netloc.rpartition('@')[2]}"
        self.key = os.environ.get(KEY, "")
        self.client = HTTPX.Client(timeout=HTTPX.Timeout(timeout, connect=10.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def look(self) -> None:
        """Look up the model and its context length on the server."""
        try:
            listed = self._ask("GET", "models").get("data")
        except RefusedError:
            return
        for one in listed if isinstance(listed, list) else ():
            if isinstance(one, dict) and self.model in ("", one.get("id")):
                self.model = self.model or str(one.get("id") or "")
                meta = one.get("meta")  # llama.cpp's
                of_meta = meta.get("n_ctx") if isinstance(meta, dict) else None
                self.limit = _count(one.get("max_model_len")) or _count(of_meta)
                return

    def next_token(self, ids: list[int], text: str | None) -> Answer:
        """Return the most probable next tokens after a prompt, sent as token ids or else as text."""
        if self.form is not None:
            return self._answer(self.form, ids, text)
        refusal = RefusedError("")
        for form in FORMS:
            if not form.by_ids and text is None:
                continue
            try:
                answer = self._answer(form, ids, text)
            except RefusedError as error:
                refusal = error
            else:
                self.form = form
                return answer
        raise RefusedError(
            str(refusal), hint="use a server whose /v1/completions returns logprobs"
        )

    def _answer(self, form: Form, ids: list[int], text: str | None) -> Answer:
        """Request an answer, again if it has no log-probabilities.

        llama.cpp returns none after sampling the end of the text or an incomplete UTF-8 character.
        """
        body = {
            "prompt": ids if form.by_ids else text,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "stream": False,
        }
        if self.model:
            body["model"] = self.model
        for _ in range(TRIES):
            content = self._ask("POST", "completions", body | form.keys)
            usage = content.get("usage")
            tokens = _count(
                usage.get("prompt_tokens") if isinstance(usage, dict) else 0
            )
            if form.by_ids and tokens is not None and tokens > len(ids) + 1:
                raise RefusedError(
                    f"{self.shown} reports {tokens} prompt tokens, {len(ids)} were sent"
                )
            answer = Answer(*_log_probs(content, self.shown), tokens)
            if answer.by_id or answer.by_text:
                return answer
        if self.form is None:
            raise RefusedError(f"{self.shown} returned no logprobs")
        return answer

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        last = time.monotonic() + min(PATIENCE, self.timeout)  # no try begins later
        for attempt in range(TRIES):
            status, content = self._try(method, path, body)
            may_pass = status in (0, *BUSY) or (status == BROKEN and self.form)
            pause = PAUSE * 2**attempt
            is_late = attempt == TRIES - 1 or time.monotonic() + pause > last
            if is_late or not may_pass:
                break
            time.sleep(pause)
        said = " ".join(content.decode(errors="replace").split())
        said = printable(said.replace(self.key, "***") if self.key else said)[:300]
        if status != 200:
            raise self._refusal(status, path, said)
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

    def _try(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, bytes]:
        """Send a request once: the HTTP status and the answer, or 0 and the kind of error."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            response = self.client.request(
                method, f"{self.base}/{path}", json=body, headers=headers
            )
        except HTTPX.RemoteProtocolError as error:
            # some servers close the connection on requests that they cannot parse
            raise RefusedError(
                f"{self.shown} closed the connection: {type(error).__name__}"
            ) from error
        except HTTPX.ReadTimeout as error:
            # a retry of a long prefill would take as long
            raise RopepatchError(
                f"{self.shown} gave no answer within {self.timeout:g} seconds",
                hint=f"raise {argument('timeout')}",
            ) from error
        except (HTTPError, HTTPX.InvalidURL) as error:
            return 0, type(error).__name__.encode()
        return response.status_code, response.content

    def _refusal(self, status: int, path: str, said: str) -> RopepatchError:
        """Make the error of a request that failed."""
        if not status:
            return RopepatchError(
                f"no answer from {self.shown}: {said}",
                hint="check that it runs and that the port is right",
            )
        if status in BUSY:
            return RopepatchError(
                f"{self.shown} is busy (HTTP {status}): {said}",
                hint="wait until it answers other requests",
            )
        if status in (401, 403):
            return RopepatchError(
                f"{self.shown} needs an API key (HTTP {status})", hint=f"set {KEY}"
            )
        return RefusedError(
            f"{self.shown} returned HTTP {status} for /v1/{path}: {said}"
        )


def _address(url: str) -> SplitResult:
    """Parse the address of a server."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        _ = parts.port
    except ValueError:
        # an open bracket, a label of more than 63 letters, an invalid port
        host = b""
    if not host or parts.scheme not in ("http", "https"):
        raise RopepatchError(
            f"{printable(url)} is not a server address",
            hint="start the engine's server, and give its address, e.g. http://localhost:8000",
        )
    return parts


def _count(value: Any) -> int | None:
    """Parse a number of tokens; None for anything else."""
    return value if type(value) is int and value > 0 else None


def _log_probs(
    content: dict[str, Any], name: str
) -> tuple[dict[int, float], dict[str, float]]:
    """Parse the most probable first tokens, by id and by text, in OpenAI's completions or chat format."""
    by_id: dict[int, float] = {}
    by_text: dict[str, float] = {}
    try:
        told = content["choices"][0]["logprobs"] or {}
        is_chat = "content" in told
        places = (told["content"] if is_chat else told.get("top_logprobs")) or [None]
        first = places[0]["top_logprobs"] if is_chat and places[0] else places[0]
        if isinstance(first, dict):
            first = [{"token": token, "logprob": one} for token, one in first.items()]
        for entry in first or ():
            log_prob = _log_prob(entry["logprob"])
            token = str(entry.get("token", ""))
            number = entry.get("id")
            if number is None and "token_id:" in token:  # vLLM's
                number = token.removeprefix("token_id:")
            if log_prob is None:
                continue
            if number is None:
                by_text[token] = log_prob
            else:
                by_id[int(number)] = log_prob
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"{name} returned no usable logprobs") from error
    return by_id, by_text


def _log_prob(value: Any) -> float | None:
    """Parse a log-probability; None for an impossible token or a missing value."""
    if value is None:
        return None
    log_prob = float(value)
    if math.isnan(log_prob) or log_prob > 1e-3:
        raise ValueError(log_prob)
    return log_prob if log_prob > -1e4 else None
