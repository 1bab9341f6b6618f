"""`ropepatch.json`, the record of an extension: its keys, and how it is read and written."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, StrictBool

from ropepatch.errors import RopepatchError
from ropepatch.extension.engines import Engine as Engine
from ropepatch.files import read_json, whole_file, write_json
from ropepatch.model.checkpoint import (
    HUB_ID,
    RECORD,
    RECORD_VERSION,
    Keys,
    Number,
    Part,
    Text,
    Tokens,
    Whole,
    validated,
)
from ropepatch.settings import shown

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan

Texts = Text | list[Text]
# Arguments of `plan`, which no parameter may share
TAKEN = {"model", "to", "method", "original", "revision"}
HINT = "copy it again from the original checkpoint, or run `ropepatch extend` again"


class Verdict(Part):
    """The comparison of the written checkpoint, reloaded with stock transformers, with the patched source.

    Args:
        frequencies: `equal` (bit-identical).
        logits: `equal`, `within 3.1e-07`, or why they were not compared.
        compared: Whether logits were compared.
        difference: The largest difference of a logit (after folding: relative to the largest logit); None if
            they were not compared.
    """

    frequencies: Text
    logits: Text
    compared: StrictBool
    difference: Number | None


class Base(Part):
    """The metadata of the base model's card that derived models repeat.

    Args:
        license: The licence's name in the Hub's list, or `other`.
        license_name: The name of a licence that is not in that list.
        license_link: The address of that licence.
        language: The language or languages of the model.
    """

    license: Texts | None = None
    license_name: Texts | None = None
    license_link: Texts | None = None
    language: Texts | None = None


class ShortContextCheck(Part):
    """The short-context check: the loss within the original context length, in nats per token.

    Args:
        base: The loss of the model before training.
        now: The loss of the trained model.
        increase: The relative increase of the loss.
        low: The lower end of its 95 % interval over the texts; None with fewer than three texts.
        high: The upper end.
        most: The largest increase allowed.
        passed: Whether the interval, or else the increase, is not above the allowed one.
    """

    base: Number
    now: Number
    increase: Number
    low: Number | None = None
    high: Number | None = None
    most: Number
    passed: StrictBool

    @classmethod
    def of(
        cls,
        base: float,
        now: float,
        most: float,
        interval: tuple[float, float] | None = None,
    ) -> Self:
        """Compare two losses, with the interval of the relative increase."""
        low, high = interval or (None, None)
        check = cls.model_construct(
            base=base, now=now, increase=now / base - 1, low=low, high=high
        )
        return check.limited(most)

    def limited(self, most: float) -> Self:
        """Return the same comparison with another limit."""
        least = self.increase if self.low is None else self.low
        return self.model_copy(update={"most": most, "passed": least <= most})

    @property
    def rise(self) -> str:
        """The relative increase with its interval."""
        if self.low is None or self.high is None:
            return f"{self.increase:+.2%}"
        return (
            f"{self.increase:+.2%}, 95 % interval {self.low:+.2%} to {self.high:+.2%}"
        )

    @property
    def verdict(self) -> str:
        """How the increase compares with the limit."""
        if self.increase <= self.most:
            return f"within the limit of {self.most:.2%}"
        return f"{'not significantly ' if self.passed else ''}above the limit of {self.most:.2%}"

    def __str__(self) -> str:
        return f"short-context loss {self.base:.4f} -> {self.now:.4f} ({self.rise}), {self.verdict}"


class Training(Part):
    """How the weights were trained.

    Args:
        recipe: All settings of the recipe.
        run: The name of the run, derived from everything that determines the weights.
        steps: The number of optimizer steps.
        tokens: The number of training tokens.
        taught: The kinds of questions that it asked.
        processes: The number of processes.
        device: The device.
        short_context: The short-context check.
        precision: The precision, and how it was chosen.
    """

    recipe: Keys
    run: Text
    steps: Whole
    tokens: Whole
    taught: list[Text] = Field(default_factory=list)
    processes: Whole = 1
    device: Text | None = None
    precision: Keys | None = None
    short_context: ShortContextCheck


class Record(Part):
    """The record of an extension, `ropepatch.json`.

    Args:
        version: The version of this layout.
        model: The base model that the user gave.
        revision: The commit of a base model from the Hub.
        model_type: The architecture, as transformers names it.
        method: The method's name.
        factor: The scaling factor.
        parameters: The method's parameters.
        paper: The paper that proposes the method.
        original_max_position_embeddings, target: The original and the target length, in tokens.
        original: The original length, if the user gave it and config.json has another one.
        rotary_dim: The number of rotated dimensions of a head.
        rope_theta: The RoPE base.
        already_scaled: Whether RoPE was scaled before.
        layer_type: The type of the layers that are scaled, if layers differ.
        attention_factor_before, attention_factor: The factors of cos and sin.
        inv_freq_before, inv_freq: The frequencies in radians per token, one per rotary pair.
        config_before: The previous values of `config_changes`, where set.
        config_changes: The values written into config.json, or into its section for the language model.
        engines: The engines' support.
        warnings: Warnings, one sentence each.
        versions: The versions of the libraries that wrote it.
        weights: The checksum of the weights in the folder; missing for an adapter.
        checksums: The sha256 of each verified weight file; missing if the files are linked.
        code: The sha256 of the position remapping's code file, by file name.
        verified: The comparison after a reload with stock transformers; missing for an adapter and after
            `doctor --fix`.
        folded_attention_factor: The attention factor that `export --fold-attention` folded into the weights.
        training: How it was trained, if it was.
        base_weights: The checksum of the weights that it was trained from.
        base: Metadata of the base model's card.
        earlier: The record of the base model, if ropepatch made it.
        evaluation: The labels of the results in the folder evaluation, by task; empty until all are measured.
        command: The command that made it.
    """

    version: Literal[1]
    model: Text
    revision: Text | None = None
    model_type: Text
    method: Text
    factor: Number
    parameters: Keys
    paper: Text
    original_max_position_embeddings: Tokens
    original: Tokens | None = None
    target: Tokens
    rotary_dim: Whole
    rope_theta: Number
    already_scaled: StrictBool
    layer_type: Text | None = None
    attention_factor_before: Number
    attention_factor: Number
    inv_freq_before: list[Number]
    inv_freq: list[Number]
    config_before: Keys
    config_changes: Keys
    engines: list[Engine]
    warnings: list[Text]
    versions: dict[Text, Text]
    weights: Text | None = None
    checksums: dict[Text, Text] | None = None
    code: dict[Text, Text] | None = None
    verified: Verdict | None = None
    folded_attention_factor: Number | None = None
    training: Training | None = None
    base_weights: Text | None = None
    base: Base = Field(default_factory=Base)
    earlier: Record | None = None
    evaluation: Keys | None = None
    command: Text | None = None

    @classmethod
    def of(cls, plan: Plan, **more: Any) -> Record:
        """Make the record of a plan with the versions of the libraries, and further keys."""
        libraries = "ropepatch", "transformers", "torch"
        versions = {
            library: importlib.metadata.version(library) for library in libraries
        }
        content = {"version": RECORD_VERSION, "versions": versions, **plan.to_dict()}
        return cls.parse(without_paths(content | more))

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Record:
        """Parse and validate the content of a record."""
        if "needs_ropepatch" in content:
            raise RopepatchError(
                f"{RECORD} belongs to a checkpoint with a swapped position encoding, not to an extension",
                hint="load it with `ropepatch.load`",
            )
        record = validated(cls, content, HINT)
        for name in record.parameters:
            # Model cards print it as Python
            if not name.isidentifier() or iskeyword(name) or name in TAKEN:
                raise RopepatchError(
                    f"{RECORD} has a parameter {name[:60]!r}, expected a plain name",
                    hint=HINT,
                )
        stated = record.config_changes.get("rope_parameters", {})
        if not isinstance(stated, dict):
            raise RopepatchError(
                f"{RECORD} has invalid rope_parameters, got {shown(stated)}", hint=HINT
            )
        return record

    def amended(self, **changes: Any) -> Record:
        """Return the record with other values of some keys; None removes a key."""
        content = self.to_dict() | without_paths(changes)
        return self.parse(
            {
                key: value
                for key, value in content.items()
                if changes.get(key, ...) is not None
            }
        )


def history(folder: Path) -> dict[str, Any]:
    """Return the record's keys about the source in a folder: `base` and `earlier`."""
    base = {"base": stated_by_card(folder)}
    return base | {"earlier": read(folder)} if exists(folder) else base


def exists(folder: Path) -> bool:
    """Return whether a folder has a record."""
    return (folder / RECORD).is_file()


def read(folder: Path) -> Record:
    """Read the record of a checkpoint or an adapter."""
    return Record.parse(read_json(folder / RECORD))


def write(folder: Path, record: Record) -> None:
    """Write a record into a folder, completely or not at all, without paths of this machine."""
    with whole_file(folder / RECORD) as partial:
        write_json(partial, record.to_dict())


def amend(folder: Path, **changes: Any) -> Record:
    """Change some keys of a folder's record; None removes a key."""
    record = read(folder).amended(**changes)
    write(folder, record)
    return record


def lineage(folder: Path, weights: str | None) -> list[Record]:
    """Return the record of a checkpoint and those before it, the newest first.

    Empty for any other checkpoint, and if its record is unreadable or belongs to other weights.
    """
    records: list[Record] = []
    with suppress(RopepatchError):
        record = read(folder)
        if record.weights == weights:
            records.append(record)
    while records and records[-1].earlier:
        records.append(records[-1].earlier)
    return records


def context_before(folder: Path, weights: str | None) -> int | None:
    """Return the context length, in tokens, before untrained extensions by ropepatch; None for no such."""
    before = None
    for record in lineage(folder, weights):
        if record.training is not None:
            break
        before = record.original_max_position_embeddings
    return before


def taught_kinds(folder: Path, weights: str | None) -> list[str]:
    """Return the kinds of questions that the trainings of a checkpoint asked."""
    trainings = [one.training for one in lineage(folder, weights) if one.training]
    return sorted({kind for training in trainings for kind in training.taught})


# A dataset may have a config
SHARED = re.compile(rf"{HUB_ID.pattern}(:[\w.+-]+)?", re.ASCII)

ADDRESS = re.compile(r"(https?://)(?:[^/]*@)?([^/]+).*")


def stated_by_card(folder: Path) -> dict[str, Any]:
    """Read the licence and language from the model card (README.md), for derived models."""
    from huggingface_hub import metadata_load

    # No card, or invalid metadata: PyYAML passes on errors of int() and others
    with suppress(Exception):
        stated = metadata_load(folder / "README.md") or {}
        return Base.model_validate(stated).model_dump(
            include={*Base.model_fields}, exclude_none=True
        )
    return {}


def shown_name(name: str) -> str:
    """Return a model's or text's name for publication: a Hub id, a path's last part, a URL's host.

    `owner/name` is kept even if it is a relative path.
    """
    if address := ADDRESS.fullmatch(name):
        return address[1] + address[2]
    if SHARED.fullmatch(name):
        return name
    return re.split(r"[/\\]+", name.rstrip("/\\"))[-1] or "/"


def shown_command(command: str) -> str:
    """Shorten every path in a command line to its last part."""
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that do not close
        words = command.split()
    return shlex.join(map(_shown_word, words))


def _shown_word(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and not re.search(r"[/\\]", option):
        return f"{option}={shown_name(value)}"
    return shown_name(word)


# Keys whose values may have paths: commands, models, methods or texts
SHOWN: dict[str, Callable[[str], str]] = {
    "command": shown_command,
    "model": shown_name,
    "name": shown_name,
    "text": shown_name,
}


def without_paths(content: Any) -> Any:
    """Return JSON-ready data with names and commands shortened for publication."""
    if isinstance(content, Part):
        content = content.to_dict()
    if isinstance(content, list | tuple):
        return [without_paths(item) for item in content]
    if not isinstance(content, dict):
        return content
    return {key: _shown(key, without_paths(value)) for key, value in content.items()}


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(key, item) for item in value]
    return SHOWN[key](value) if key in SHOWN and isinstance(value, str) else value
