"""Findings: their codes, what a rule says of a checkpoint, and the changes of JSON files that repair it."""

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
MEMORY = "in memory"  # in a file's place, of a loaded model

Severity = Literal["error", "warning", "remark"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "remark")

# Every code of a finding by its usual severity, and why it matters.
ERRORS = {
    # One value of config.json
    "key-misspelled": "no reader knows the key: its value has no effect",
    "not-a-number": "readers compute with it and end in a TypeError",
    "impossible-value": "readers stop at it, or silently compute something else",
    "window-not-integer": "transformers 5 and other strict readers refuse the configuration",
    "key-missing": "transformers ends in a KeyError or a TypeError",
    "type-missing": "transformers 5 silently leaves the rope unscaled, older ones refuse to load",
    "type-unknown": "transformers warns, then ends in a KeyError when it builds the model",
    "head-dim-null": "transformers 5 computes with it and ends in a TypeError",
    "transformers-refuses": "the checkpoint does not load",
    # What is stated in several places
    "theta-lost": "without it readers take their own default, mostly 10000, or stop",
    "keys-contradict": "readers follow different keys, so that one checkpoint is two models",
    "original-missing": "transformers silently takes max_position_embeddings, perhaps extended, for it",
    "factor-contradicts-lengths": "transformers scales by the factor, others by the windows: one is wrong",
    # One scaling
    "factor-below-one": "the rope rotates faster than in pretraining; transformers only warns",
    "betas-swapped": "the ramp runs the wrong way: fast pairs are slowed and slow ones not",
    "bands-swapped": "the ramp runs the wrong way: fast pairs are slowed and slow ones not",
    "attention-factor-zero": "queries and keys become 0 and attention uniform",
    "list-length": "transformers only warns, then ends in an error when it builds the model",
    # Files
    "file-unreadable": "the checkpoint does not load, or silently takes defaults in place of the file",
    "weights-damaged": "the checkpoint does not load",
    "shard-missing": "the checkpoint does not load, or takes random tensors in place of missing ones",
    "index-wrong": "the checkpoint does not load, or takes random tensors in place of missing ones",
    "weights-named": "transformers loads the file it names, other programs do not; ropepatch refuses it",
    "weights-pickled": "a pickle can run code when it is loaded; ropepatch and careful servers refuse it",
    "weights-misfit": "the model loads with random tensors in their place, or not at all",
    "weights-not-finite": "the model answers NaN to any text",
    "remapping-code-changed": "loading the checkpoint with trust_remote_code=True runs it",
    # A loaded model
    "rope-garbage": "positions mean nothing to the model, as if the words were shuffled",
    "rope-zeros": "the model cannot tell one position from another",
    "rope-rescaled": "it computes another rope than config.json will say that it saves",
    "rope-of-other-length": "shorter and longer texts than that are read by the wrong frequencies",
    # Adapters
    "adapter-base-missing": "its rope is unknown",
    "adapter-base-changed": "the adapter's changes are differences to the weights it was trained on",
}
WARNINGS = {
    "scaling-ignored": "the rope is not scaled, whatever the factor says",
    "only-new-keys": "these silently take no scaling and a base of their own, mostly 10000",
    "differs-from-record": "the checkpoint was verified with other values than it now has",
    "factor-rounded": "transformers scales by the factor, vLLM's LongRoPE and mlx-lm by the windows",
    "factor-is-integer": "vLLM stops at it under linear, early transformers 4 refuses to load",
    "tokenizer-behind": "with truncation the tokenizer cuts texts there, without it warns",
    "generation-behind": "generate() stops there, prompt included",
    "attention-factor-inverted": "it flattens attention, where longer contexts need sharper attention",
    "attention-factor-unread": "under longrope they compute it from the two windows alone",
    "mscale-alone": "transformers ignores it; DeepSeek's own code, SGLang and mlx-lm compute with it",
    "truncate-ignored": "llama.cpp, TGI, mlx-lm, by layer type transformers 5, compute other frequencies",
    "switches-against-cache": "keys cached before keep the old rotation, unlike a text that is read at once",
    "tokenizer-missing": "no text can be read: what measures or trains refuses it, and pipeline() fails",
    "reading-of-other-weights": "`ropepatch probe` calls a server wrong that computes the checkpoint rightly",
    "weights-unused": "transformers leaves them out, and what they are for",
    "weights-twice": "other programs may load them, and they may be another model's",
    "rope-rounded": "the error grows with the position: far tokens are read in the wrong place",
    "adapter-base-lacks-rope": "PEFT, vLLM and transformers load the adapter with the rope of its base",
}
REMARKS = {
    "factor-exceeds-window": "some models (Yarn-Mistral, AFM) have a larger factor than needed and load well",
    "window-left-behind": "Qwen documents it so; a program that takes it for its limit never scales",
    "theta-not-as-published": "if it was lost on the way, the model reads nothing rightly",
    "window-with-room": "a factor that is reckoned from all of it is smaller than its makers'",
    "linear-multiplied": "right for Vicuna and LongChat; deepseek-coder's is the extended window already",
    "encoding-swapped": "stock transformers refuses it on purpose: the rope it states is not the model's",
    "position-remapping": "transformers refuses it without that code on purpose; no other engine runs it",
    "not-in-transformers": "only config.json could be checked, not what is computed from it",
    "adapter-without-record": "programs load the adapter onto the base, which is right if it was trained so",
}
CODES: dict[str, tuple[Severity, str]] = {
    **{code: ("error", why) for code, why in ERRORS.items()},
    **{code: ("warning", why) for code, why in WARNINGS.items()},
    **{code: ("remark", why) for code, why in REMARKS.items()},
}

Keys = tuple[str, ...]  # down to a value of a JSON file


class DROP:
    """Stands for the value of a key that is removed."""


@dataclass(frozen=True)
class Edit:
    """A change: the value at `path` of a JSON file becomes another; DROP removes the key.

    Of a loaded model the path is that of the module, and the name of its buffer or attribute.
    """

    file: str
    path: Keys
    value: Any


@dataclass(frozen=True)
class Finding:
    """One thing to know about a checkpoint.

    Args:
        code: Its short name, a key of `CODES`.
        severity: An error computes or loads something wrong, a warning does so for some readers or lengths,
            and a remark is only to be known.
        problem: What is wrong.
        remedy: What to do.
        file: The file it is in, or the folder's name; `in memory` of a loaded model.
        key: The key in it, with dots; empty where it is about the whole file.
        value: The value found, as it is written there.
        edits: The changes that repair it; none where only a person can decide.
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
        """Whether `--fix` repairs it, or `repair=True`."""
        return bool(self.edits)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
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
            lines["repair"] = "repair=True writes what the config computes"
        else:
            lines["--fix"] = (
                "repairs it" if self.fixable else "leaves it to you" * (self.severity != "remark")
            )
        body = "".join(f"\n  {name:<8}{printable(line)}" for name, line in lines.items() if line)
        return f"{self.severity}: {self.code}{body}"


@dataclass(frozen=True)
class Key:
    """A key of a JSON file, or the whole of a file.

    Args:
        file: The file.
        path: The key, after those of the objects that hold it; nothing for the whole file.
        value: Its value; None where it is missing.
        twins: The paths at which the same is stated again.
    """

    file: str
    path: Keys
    value: Any = None
    twins: tuple[Keys, ...] = ()

    @property
    def name(self) -> str:
        """The key itself."""
        return self.path[-1]

    def __str__(self) -> str:
        return ".".join(self.path)

    def set(self, value: Any) -> tuple[Edit, ...]:
        """The changes that give it another value wherever it is stated."""
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
        """A finding about this key, of the usual severity."""
        if value is None:
            value = "" if self.value is None else shown(self.value)
        return Finding(
            *(code, severity or CODES[code][0], problem, remedy, self.file, str(self), value),
            edits=fix,
        )


def set_all(keys: Iterable[Key], value: Any) -> tuple[Edit, ...]:
    """The changes that give several keys one value."""
    return tuple(edit for key in keys for edit in key.set(value))


def shown(value: Any) -> str:
    """A JSON value as a file has it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "…"
    return text if len(text) <= 60 else f"{text[:57]}…"


def edited(content: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """A JSON object with one value changed; what does not change is shared."""
    key, *rest = path
    if rest:
        inner = content.get(key)
        value = edited(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    elif value is DROP:
        return {name: other for name, other in content.items() if name != key}
    return content | {key: value}
