"""`ropepatch.json` beside what was extended: each key with its meaning, and all that reads and writes it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, StrictBool, ValidationError

from ropepatch.errors import RopepatchError
from ropepatch.extension.old_records import upgraded
from ropepatch.extension.record_parts import (
    Adaptation,
    Base,
    Engine,
    Evaluation,
    Gate,
    Ranking,
    Start,
    Transfer,
    Verdict,
)
from ropepatch.files import read_json, whole_file, write_json
from ropepatch.model.record_file import FILE, VERSION, Number, Part, Text, Tokens, Whole, refused, validated

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan

__all__ = [
    "FILE",
    "VERSION",
    "Engine",
    "Gate",
    "Record",
    "Verdict",
    "amend",
    "exists",
    "read",
    "sound_keys",
    "write",
]

TAKEN = {"model", "to", "method", "revision"}  # arguments of `plan`, which no parameter is called like
HINT = "copy it again from where the checkpoint came from; `ropepatch extend` writes it whole"


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
        rotary_dim: How many dimensions of a head rotate.
        rope_theta: The base of the frequencies.
        already_scaled: Whether the rope was scaled before.
        layer_type: Of the layers whose rope it is, where layers differ.
        attention_factor_before, attention_factor: What multiplies cos and sin; older records lack the first.
        inv_freq_before, inv_freq: In radians per token, one for each rotating pair.
        config_before: The values of `config_changes` before, of those that were set.
        config_changes: What was written into config.json, or its part for the language model.
        engines: Who reads the rope.
        warnings: What the user should know, a sentence each.
        versions: Of the libraries that wrote it.
        weights: The fingerprint of the weights beside it; none of an adapter.
        checksums: The sha256 of each file of these weights as it was verified; older records lack it.
        code: That of the file beside the weights that computes with an attention map, by its name.
        verified: What a reload with stock transformers gave; none of an adapter, or after `doctor --fix`.
        folded_attention_factor: That which `export --fold-attention` put into the query weights.
        adaptation: How it was trained, if it was.
        base_weights: The fingerprint of the weights that it was trained from, or the adaptation put onto.
        transfer: Whose adaptation that is, where it is another model's.
        base: What the base's card says.
        earlier: The record of the base, where ropepatch made that.
        start: What `--method fit` or `auto` was asked, and found.
        fit: How `ropepatch.fit` found the frequencies; see `ropepatch.fitting.fitting`.
        ranking: How `--method auto` chose.
        evaluation: What `--eval` measured.
        command: The command that made it.
    """

    version: Literal[1]
    model: Text
    revision: Text | None = None
    model_type: Text
    method: Text
    factor: Number
    parameters: dict[Text, Any]
    paper: Text
    original_max_position_embeddings: Tokens
    target: Tokens
    rotary_dim: Whole
    rope_theta: Number
    already_scaled: StrictBool
    layer_type: Text | None = None
    attention_factor_before: Number = 1.0
    attention_factor: Number
    inv_freq_before: list[Number]
    inv_freq: list[Number]
    config_before: dict[Text, Any]
    config_changes: dict[Text, Any]
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
    transfer: Transfer | None = None
    base: Base = Field(default_factory=Base)
    earlier: Record | None = None
    start: Start | None = None
    fit: dict[Text, Any] | None = None
    ranking: Ranking | None = None
    evaluation: Evaluation | None = None
    command: Text | None = None

    @classmethod
    def of(cls, plan: Plan, **more: Any) -> Record:
        """The record of a plan and of the libraries that carry it out now, with further keys."""
        libraries = "ropepatch", "transformers", "torch"
        versions = {library: importlib.metadata.version(library) for library in libraries}
        return cls.parse({"version": VERSION} | json.loads(plan.to_json()) | {"versions": versions} | more)

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Record:
        """The record that a file holds; of one from before records had versions what it means today.

        Raises:
            RopepatchError: With the first key that is missing, or holds something else.
        """
        if "needs_ropepatch" in content:
            raise RopepatchError(
                f"{FILE} is of a checkpoint whose position encoding is swapped, not of an extension",
                hint="`ropepatch.load` loads it",
            )
        content = upgraded(content)
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
    """The record of a checkpoint or an adapter.

    Raises:
        RopepatchError: If there is none, or it is damaged; with the key.
    """
    return Record.parse(read_json(folder / FILE))


def write(folder: Path, record: Record) -> None:
    """Put the record into a folder, whole or not at all."""
    with whole_file(folder / FILE) as partial:
        write_json(partial, record.to_dict())


def amend(folder: Path, **changes: Any) -> Record:
    """Change some keys of the record of a folder, or leave those out that are None; the others stay.

    Raises:
        RopepatchError: If there is no record, it is damaged, or a value is not what the key must hold; the
            file is as it was then.
    """
    record = read(folder).amended(**changes)
    write(folder, record)
    return record


def sound_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Of the content of a record, which may be damaged, the keys that hold what they must."""
    try:
        Record.model_validate(content := upgraded(content))
    except ValidationError as error:
        damaged = {detail["loc"][0] for detail in error.errors(include_url=False)}
        return {key: value for key, value in content.items() if key not in damaged}
    return dict(content)
