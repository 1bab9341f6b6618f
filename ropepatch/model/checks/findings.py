"""Findings: their codes, what they report, and the edits of JSON files that repair them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ropepatch.errors import printable

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
MEMORY = "in memory"  # the "file" of a loaded model

Severity = Literal["error", "warning", "remark"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "remark")

# Every code by its usual severity, and why it matters.
ERRORS = {
    # One value of config.json
    "key-misspelled": "no program supports this key: its value has no effect",
    "not-a-number": "loading raises a TypeError",
    "impossible-value": "programs raise an error, or silently compute something else",
    "window-not-integer": "transformers 5 and other strict programs reject the configuration",
    "key-missing": "transformers raises a KeyError or a TypeError",
    "type-missing": "transformers 5 silently ignores the scaling, older versions raise an error",
    "type-unknown": "transformers warns, then raises a KeyError when it builds the model",
    "head-dim-null": "transformers 5 raises a TypeError",
    "transformers-refuses": "the checkpoint does not load",
    # Values stated in several places
    "theta-lost": "programs use their own default, mostly 10000, or raise an error",
    "keys-contradict": "programs use different keys, so they compute different models",
    "original-missing": "transformers silently uses max_position_embeddings, perhaps the extended length",
    "factor-contradicts-lengths": "transformers uses the factor, others the lengths: one result is wrong",
    # One scaling
    "factor-below-one": "RoPE rotates faster than in pretraining; transformers only warns",
    "betas-swapped": "the ramp is reversed: it slows high frequencies instead of low ones",
    "bands-swapped": "the ramp is reversed: it slows high frequencies instead of low ones",
    "attention-factor-zero": "queries and keys become 0, and attention becomes uniform",
    "list-length": "transformers warns, then raises an error when it builds the model",
    # Files
    "file-unreadable": "the checkpoint does not load, or silently uses defaults instead of the file",
    "weights-damaged": "the checkpoint does not load",
    "shard-missing": "the checkpoint does not load, or loads with random tensors for the missing ones",
    "index-wrong": "the checkpoint does not load, or loads with random tensors for the missing ones",
    "weights-named": "transformers loads the named file, other programs do not; ropepatch rejects it",
    "weights-pickled": "loading a pickle can run code; ropepatch and some servers reject it",
    "weights-misfit": "the model loads with random tensors, or not at all",
    "weights-not-finite": "the model returns NaN for any text",
    "remapping-code-changed": "loading the checkpoint with trust_remote_code=True runs this code",
    # A loaded model
    "rope-garbage": "positions are meaningless to the model, as if the words were shuffled",
    "rope-zeros": "the model cannot distinguish positions",
    "rope-rescaled": "the model computes other frequencies than the config.json that it saves",
    "rope-of-other-length": "the frequencies are wrong for shorter and longer texts",
    # Adapters
    "adapter-base-missing": "the RoPE of its base is unknown",
    "adapter-base-changed": "an adapter only fits the weights it was trained on",
}
WARNINGS = {
    "scaling-ignored": "RoPE is not scaled, and the factor has no effect",
    "only-new-keys": "these programs silently apply no scaling and a default base, mostly 10000",
    "differs-from-record": "the checkpoint was verified with other values",
    "scaled-twice": "the second scaling is applied to frequencies that are already scaled",
    "factor-rounded": "transformers uses the factor, vLLM's LongRoPE and mlx-lm the ratio of the lengths",
    "factor-is-integer": "vLLM raises an error for linear, early transformers 4 does not load it",
    "tokenizer-behind": "the tokenizer truncates texts there if truncation is on, and else warns",
    "generation-behind": "generate() stops there, including the prompt",
    "attention-factor-inverted": "it flattens attention, but longer contexts need sharper attention",
    "attention-factor-unread": "for longrope these engines compute it from the two lengths only",
    "mscale-alone": "transformers ignores it; DeepSeek's own code, SGLang and mlx-lm use it",
    "truncate-ignored": "llama.cpp, TGI, mlx-lm, and transformers 5 by layer type, use other frequencies",
    "switches-against-cache": "keys cached before the switch keep the old rotation",
    "tokenizer-missing": "measuring and training need a tokenizer, and pipeline() fails without one",
    "reading-of-other-weights": "`ropepatch probe` reports a correct server as wrong",
    "weights-unused": "transformers does not load these tensors",
    "weights-twice": "other programs may load the other set, which may belong to another model",
    "rope-rounded": "the position error grows with the distance",
    "adapter-base-lacks-rope": "PEFT, vLLM and transformers load the adapter with the RoPE of its base",
}
REMARKS = {
    "factor-exceeds-window": "some models (Yarn-Mistral, AFM) have a larger factor than needed and work well",
    "window-left-behind": "Qwen documents it so; a program that uses it as limit never scales",
    "theta-not-as-published": "if the published base was lost, the model produces garbage",
    "window-with-room": "a factor computed from all of it is smaller than the authors' factor",
    "linear-multiplied": "right for Vicuna and LongChat; deepseek-coder states the extended length",
    "chat-template-missing": "chat APIs fail, or format messages differently than in training",
    "encoding-swapped": "stock transformers rejects it on purpose: the stated RoPE is not the model's",
    "position-remapping": "transformers rejects it without that code on purpose; no other engine runs it",
    "no-language-model": "ropepatch extends causal language models",
    "not-in-transformers": "only config.json could be checked, not the frequencies",
    "adapter-without-record": "programs load it onto the unchanged base, which may be what it was trained on",
}
CODES: dict[str, tuple[Severity, str]] = {
    **{code: ("error", why) for code, why in ERRORS.items()},
    **{code: ("warning", why) for code, why in WARNINGS.items()},
    **{code: ("remark", why) for code, why in REMARKS.items()},
}

Keys = tuple[str, ...]  # path of a value in a JSON file


class DROP:
    """The value of a key to remove."""


@dataclass(frozen=True)
class Edit:
    """A new value at `path` of a JSON file; DROP removes the key.

    In a loaded model the path is the module's, followed by the name of its buffer or attribute.
    """

    file: str
    path: Keys
    value: Any


@dataclass(frozen=True)
class Finding:
    """One problem of a checkpoint.

    Args:
        code: Its short name, a key of `CODES`.
        severity: `error` if the model loads or computes something wrong, `warning` if only some programs or
            lengths are affected, `remark` for information.
        problem: What is wrong.
        remedy: What to do.
        file: The file, or the folder's name; `in memory` for a loaded model.
        key: The key in the file, with dots; empty for the whole file.
        value: The value in the file.
        edits: The edits that repair it; empty if only a person can decide.
    """

    code: str
    severity: Severity
    problem: str
    remedy: str
    file: str = CONFIG
    key: str = ""
    value: str = ""
    edits: tuple[Edit, ...] = field(default=(), repr=False)

    @property
    def why(self) -> str:
        """Why it matters."""
        return CODES[self.code][1]

    @property
    def fixable(self) -> bool:
        """Whether `--fix` or `repair=True` repairs it."""
        return bool(self.edits)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        names = ("code", "severity", "file", "key", "value", "problem", "why", "remedy")
        return {name: getattr(self, name) for name in names} | {"fixable": self.fixable}

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.file, self.key))) + (f" = {self.value}" if self.value else "")
        lines = {
            "where": where,
            "what": self.problem,
            "why": self.why,
            "remedy": self.remedy,
        }
        if self.file == MEMORY:
            lines["repair"] = "repair=True restores the frequencies of the config"
        else:
            lines["--fix"] = (
                "repairs it" if self.fixable else "does not repair it" * (self.severity != "remark")
            )
        body = "".join(f"\n  {name:<8}{printable(line)}" for name, line in lines.items() if line)
        return f"{self.severity}: {self.code}{body}"


@dataclass(frozen=True)
class Key:
    """A key of a JSON file, or a whole file.

    Args:
        file: The file.
        path: The path of the key; empty for the whole file.
        value: Its value; None if missing.
        twins: Other paths that state the same value.
    """

    file: str
    path: Keys
    value: Any = None
    twins: tuple[Keys, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path[-1]

    def __str__(self) -> str:
        return ".".join(self.path)

    def set(self, value: Any) -> tuple[Edit, ...]:
        """Return the edits that set its value at every path."""
        return tuple(Edit(self.file, path, value) for path in (self.path, *self.twins))

    def finding(
        self,
        code: str,
        problem: str,
        remedy: str,
        *,
        fix: tuple[Edit, ...] = (),
        severity: Severity | None = None,
        value: str | None = None,
    ) -> Finding:
        """Make a finding about this key, with the usual severity unless given."""
        if value is None:
            value = "" if self.value is None else shown(self.value)
        return Finding(
            *(code, severity or CODES[code][0], problem, remedy, self.file, str(self), value),
            edits=fix,
        )


def set_all(keys: Iterable[Key], value: Any) -> tuple[Edit, ...]:
    """Return the edits that set several keys to one value."""
    return tuple(edit for key in keys for edit in key.set(value))


def shown(value: Any) -> str:
    """Return a value as JSON text of at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "…"
    return text if len(text) <= 60 else f"{text[:57]}…"


def edited(content: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return a JSON object with one value changed, sharing the unchanged parts."""
    key, *rest = path
    if rest:
        inner = content.get(key)
        value = edited(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    elif value is DROP:
        return {name: other for name, other in content.items() if name != key}
    return content | {key: value}
