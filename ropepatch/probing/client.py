"""The completions API of OpenAI, as vLLM, SGLang, llama.cpp, mlx-lm, TGI and others serve it."""

from __future__ import annotations

import importlib
import math
import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its httpx's

from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.files import parse_json

KEY = "ROPEPATCH_API_KEY"  # environment variable
TRIES = 4
PAUSE = 1.0  # seconds before the second try; twice as long before each further one
UNREACHABLE = 0  # in place of an HTTP status
BUSY = (UNREACHABLE, 429, 502, 503, 504)
COUNTS = (20, 10, 5)  # of most probable tokens; servers limit this number
AS_ID = "token_id:"  # vLLM's, before the id of a token
# Httpx, or its successor
HTTPX: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])


class RefusedError(RopepatchError):
    """The server answers, but rejects this request."""


class Form(NamedTuple):
    """A form of request for log-probabilities.

    Args:
        by_ids: Whether the prompt is token ids, as for vLLM, SGLang and llama.cpp; or text, as for mlx-lm.
        keys: The keys of the request.
    """

    by_ids: bool
    keys: dict[str, Any]


FORMS = [  # the key of token ids is vLLM's
    *(Form(True, {"logprobs": n, "return_tokens_as_token_ids": True}) for n in COUNTS),
    *(Form(False, {"logprobs": True, "top_logprobs": n}) for n in COUNTS),
]


class Answer(NamedTuple):
    """A server's prediction of the next token.

    Args:
        log_probs: The log-probabilities of the most probable tokens, by id, or by text if it returns no ids.
        tokens: The number of prompt tokens that the server reports; None if it reports none.
    """

    log_probs: dict[int | str, float]
    tokens: int | None


class Server:
    """One model of a server.

    Args:
        url: The base address, with or without `/v1`.
        model: The model's name on the server; empty for the first that the server lists.
        timeout: Seconds for one answer, including the prefill of a long prompt.

    Attributes:
        form: The form of a request that works.
        client: The connections, to be closed.
    """

    form: Form | None = None

    def __init__(self, url: str, model: str, timeout: float) -> None:
        address = _address(url)
        path = address.path.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self.model, self.timeout = model, timeout
        self.base = address.copy_with(path=f"{path}/v1", query=None)
        # Without a password
        self.shown = f"{address.scheme}://{address.netloc.decode()}"
        self.key = os.environ.get(KEY, "")
        self.client = HTTPX.Client(
            timeout=HTTPX.Timeout(timeout, connect=10.0),
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
        )

    def look(self) -> None:
        """Look up the name of the model on the server, if it was not given."""
        if self.model:
            return
        with suppress(RefusedError, LookupError, TypeError, AttributeError):
            self.model = str(self._ask("GET", "models")["data"][0].get("id") or "")

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
        if text is None and not form.by_ids:
            return Answer({}, None)
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
            tokens = None
            with suppress(KeyError, TypeError, ValueError):
                tokens = int(content["usage"]["prompt_tokens"]) or None
            if form.by_ids and tokens is not None and tokens > len(ids) + 1:
                raise RefusedError(
                    f"{self.shown} reports {tokens} prompt tokens, {len(ids)} were sent"
                )
            answer = Answer(_log_probs(content, self.shown), tokens)
            if answer.log_probs:
                return answer
        if self.form is None:
            raise RefusedError(f"{self.shown} returned no logprobs")
        return answer

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            status, content = self._try(method, path, body)
            if status not in BUSY:
                break
        said = " ".join(content.decode(errors="replace").split())
        said = printable(said.replace(self.key, "***") if self.key else said)[:300]
        if status in BUSY:
            raise RopepatchError(
                f"no answer from {self.shown}: {said or f'HTTP {status}'}",
                hint="check that it runs, that the port is right, and that it is not busy",
            )
        if status in (401, 403):
            raise RopepatchError(
                f"{self.shown} needs an API key (HTTP {status})", hint=f"set {KEY}"
            )
        if status == 200:
            with suppress(ValueError):
                parsed = parse_json(content.decode())
                if isinstance(parsed, dict):
                    return parsed
        raise RefusedError(
            f"{self.shown} returned HTTP {status} and no JSON object for /v1/{path}: {said}"
        )

    def _try(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, bytes]:
        """Send a request once: the HTTP status and the answer, or the kind of error."""
        try:
            response = self.client.request(method, f"{self.base}/{path}", json=body)
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
        except HTTPError as error:
            return UNREACHABLE, type(error).__name__.encode()
        return response.status_code, response.content


def _address(url: str) -> Any:
    """Parse the address of a server."""
    with suppress(HTTPX.InvalidURL):
        address = HTTPX.URL(url)
        if address.host and address.scheme in ("http", "https"):
            return address
    raise RopepatchError(
        f"{printable(url)} is not a server address",
        hint="start the engine's server, and give its address, e.g. http://localhost:8000",
    )


def _log_probs(content: dict[str, Any], name: str) -> dict[int | str, float]:
    """Parse the most probable first tokens, in OpenAI's completions or chat format."""
    log_probs: dict[int | str, float] = {}
    try:
        told = content["choices"][0]["logprobs"] or {}
        if "content" in told:
            first = told["content"][0]["top_logprobs"] if told["content"] else []
            pairs = [(one.get("id", one["token"]), one["logprob"]) for one in first]
        else:
            (first,) = (told.get("top_logprobs") or [None])[:1]
            pairs = list((first or {}).items())
        for token, value in pairs:
            if value is None:
                continue
            log_prob = float(value)
            if math.isnan(log_prob) or log_prob > 1e-3:
                raise ValueError(log_prob)
            if str(token).startswith(AS_ID):
                token = int(token.removeprefix(AS_ID))
            if log_prob > -1e4:  # not an impossible token
                log_probs[token] = log_prob
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"{name} returned no usable logprobs") from error
    return log_probs
