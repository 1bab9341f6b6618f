"""`ropepatch.json` beside what was extended: each key with its meaning, and all that reads and writes it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, StrictBool, ValidationError

from ropepatch.errors import RopepatchError
from ropepatch.extension.engines import Engine as Engine
from ropepatch.files import read_json, whole_file, write_json
from ropepatch.model.record_file import FILE as FILE
from ropepatch.model.record_file import VERSION as VERSION
from ropepatch.model.record_file import Keys, Number, Part, Text, Tokens, Whole, refused, validated
from ropepatch.model.source import without_paths

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan

Texts = Text | list[Text]
TAKEN = {
    "model",
    "to",
    "method",
    "original",
    "layers",
    "revision",
}  # arguments of `plan`, which no parameter is called like
HINT = "copy it again from where the checkpoint came from; `ropepatch extend` writes it whole"


class Verdict(Part):
    """What stock transformers computes from the checkpoint, beside what it was written from.

    Args:
        frequencies: `equal`, to the bit.
        logits: `equal`, `within 3.1e-07`, or why they were not compared.
        compared: Whether the logits were.
        difference: The greatest of a logit (folded: as a share of the largest); None where not compared.
    """

    frequencies: Text
    logits: Text
    compared: StrictBool
    difference: Number | None


class Base(Part):
    """Of the card of the base model what whoever builds on it passes on.

    Args:
        license: The licence, of the Hub's list, or `other`.
        license_name: The name of a licence that is not on that list.
        license_link: Where that licence can be read.
        language: The language or languages of the model.
    """

    license: Texts | None = None
    license_name: Texts | None = None
    license_link: Texts | None = None
    language: Texts | None = None


class Gate(Part):
    """The loss within the old context, in nats per token.

    Args:
        base: The loss of the model before it was trained.
        now: The loss of the trained model.
        increase: By how much the loss rose, as a share of `base`.
        most: The greatest increase allowed.
        passed: Whether the increase is within the one allowed.
    """

    base: Number
    now: Number
    increase: Number
    most: Number
    passed: StrictBool

    @classmethod
    def of(cls, base: float, now: float, most: float) -> Self:
        """The gate of two losses; the record that holds it checks that they are numbers."""
        rise = now / base - 1
        return cls.model_construct(base=base, now=now, increase=rise, most=most, passed=rise <= most)

    def __str__(self) -> str:
        loss = f"short-context loss {self.base:.4f} -> {self.now:.4f} ({self.increase:+.2%})"
        return f"{loss}, {'within' if self.passed else 'beyond'} the {self.most:.2%} allowed"


class Adaptation(Part):
    """How the weights were trained.

    Args:
        recipe: All of its settings.
        run: What names all that decides the weights.
        steps: The number of steps of the optimizer.
        tokens: The tokens read in all.
        processes: How many processes shared the work.
        seconds: The time of all steps, over all sessions.
        device: The device on which it ran.
        gate: What it did to the old context.
        precision: In which precision, and how that was chosen.
        found: Of a distillation that asks questions, what the base reads and finds without and with it.
    """

    recipe: Keys
    run: Text
    steps: Whole
    tokens: Whole
    processes: Whole = 1
    seconds: Number | None = None
    device: Text | None = None
    precision: Keys | None = None
    gate: Gate
    found: Keys | None = None


class Record(Part):
    """`ropepatch.json`.

    Args:
        version: The version of this layout.
        model: The base as the user gave it.
        revision: Its commit, of a base from the Hub.
        model_type: Its architecture, in transformers' words.
        method: The scaling.
        factor: By how much it stretches.
        parameters: The method's own.
        paper: The paper that proposes the method.
        original_max_position_embeddings, target: The context before, L, and to reach, in tokens.
        original: L again, where the user stated it and config.json another.
        rotary_dim: How many dimensions of a head rotate.
        rope_theta: The base of the frequencies.
        already_scaled: Whether the rope was scaled before.
        layer_type: Of the layers whose rope it is, where layers differ.
        attention_factor_before, attention_factor: What multiplies cos and sin.
        inv_freq_before, inv_freq: In radians per token, one for each rotating pair.
        config_before: The values of `config_changes` before, of those that were set.
        config_changes: What was written into config.json, or its part for the language model.
        engines: Who reads the rope.
        warnings: What the user should know, a sentence each.
        versions: Of the libraries that wrote it.
        weights: The fingerprint of the weights beside it; none of an adapter.
        checksums: The sha256 of each file of these weights as it was verified; none where they are linked.
        code: That of the file beside the weights that computes with a position remapping, by its name.
        verified: What a reload with stock transformers gave; none of an adapter, or after `doctor --fix`.
        folded_attention_factor: That which `export --fold-attention` put into the query weights.
        adaptation: How it was trained, if it was.
        base_weights: The fingerprint of the weights that it was trained from.
        base: What the base's card says.
        earlier: The record of the base, where ropepatch made that.
        start: What `--method fit` or `auto` was asked (all settings that decide), and what they found.
        fit: How `ropepatch.fit` found the frequencies; see `ropepatch.fitting.fitting`.
        ranking: How `--method auto` chose: the rule, the rows (best first), the advice and its warnings.
        evaluation: What `--eval` measured: each task with its settings, and results by label. Empty until it
            has measured all of it.
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
    adaptation: Adaptation | None = None
    base_weights: Text | None = None
    base: Base = Field(default_factory=Base)
    earlier: Record | None = None
    start: Keys | None = None
    fit: Keys | None = None
    ranking: Keys | None = None
    evaluation: Keys | None = None
    command: Text | None = None

    @classmethod
    def of(cls, plan: Plan, **more: Any) -> Record:
        """The record of a plan and of the libraries that carry it out now, with further keys."""
        libraries = "ropepatch", "transformers", "torch"
        versions = {library: importlib.metadata.version(library) for library in libraries}
        return cls.parse({"version": VERSION} | json.loads(plan.to_json()) | {"versions": versions} | more)

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Record:
        """The record that a file holds."""
        if "needs_ropepatch" in content:
            raise RopepatchError(
                f"{FILE} is of a checkpoint whose position encoding is swapped, not of an extension",
                hint="`ropepatch.load` loads it",
            )
        record = validated(cls, content, HINT)
        for name in record.parameters:
            if not name.isidentifier() or iskeyword(name) or name in TAKEN:  # a card prints it as Python
                raise RopepatchError(
                    f"{FILE} names a parameter {name[:60]!r}, expected a plain name", hint=HINT
                )
        if not isinstance(record.config_changes.get("rope_parameters", {}), dict):
            raise refused(content, ("config_changes", "rope_parameters"), HINT)
        return record

    def amended(self, **changes: Any) -> Record:
        """The record with other values of some keys; None leaves a key out."""
        content = self.to_dict() | changes
        return self.parse({key: value for key, value in content.items() if changes.get(key, ...) is not None})


def exists(folder: Path) -> bool:
    """Whether there is a record."""
    return (folder / FILE).is_file()


def read(folder: Path) -> Record:
    """The record of a checkpoint or an adapter."""
    return Record.parse(read_json(folder / FILE))


def write(folder: Path, record: Record) -> None:
    """Put the record into a folder, whole or not at all, without paths of this machine."""
    with whole_file(folder / FILE) as partial:
        write_json(partial, without_paths(record.to_dict()))


def amend(folder: Path, **changes: Any) -> Record:
    """Change some keys of the record of a folder, or leave those out that are None; the others stay."""
    record = read(folder).amended(**changes)
    write(folder, record)
    return record


def sound_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Of the content of a record, which may be damaged, the keys that hold what they must."""
    try:
        Record.model_validate(content)
    except ValidationError as error:
        damaged = {detail["loc"][0] for detail in error.errors(include_url=False)}
        return {key: value for key, value in content.items() if key not in damaged}
    return dict(content)


def context_before(folder: Path, weights: str | None) -> int | None:
    """The context on which a checkpoint was trained that ropepatch extended since, without training it.

    None for any other checkpoint, and where its record cannot be read, or is of other weights than these.
    """
    try:
        record = read(folder) if exists(folder) else None
    except RopepatchError:
        return None
    before = None
    if record is not None and record.weights != weights:
        return None
    while record is not None and record.adaptation is None:
        before, record = record.original_max_position_embeddings, record.earlier
    return before
