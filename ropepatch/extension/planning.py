"""What an extension will change, decided from the configuration alone."""

from __future__ import annotations

import copy
import html
import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ropepatch.errors import RopepatchError
from ropepatch.extension.config_changes import changed, find_changes
from ropepatch.extension.engines import EngineSupport, engine_support
from ropepatch.extension.forms import Export
from ropepatch.model.architectures import ARCHITECTURE_NOTES
from ropepatch.model.rotary import RotarySite, base_model, float32_on_cpu
from ropepatch.model.source import find_source
from ropepatch.model.survey import Survey, survey, survey_folder
from ropepatch.scaling import Scaling, make_scaling
from ropepatch.scaling.file import is_scaling_file, read_scaling
from ropepatch.scaling.rope import Frequencies, Rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """One extension, from the command line to the saved checkpoint.

    Args:
        model: The name of the model as the user gave it.
        revision: Its commit, of a model from the Hub.
        model_type: Its architecture, in transformers' words.
        rope: Its rope now.
        scaling: The method and its parameters.
        target: The context to reach, in tokens.
        site: Where the rotary module is.
        section: The part of config.json that describes the language model, of a model with several parts.
        before: The values of `changes` now, of those that are set.
        changes: What changes in config.json (or its section); empty where no stock type holds the method.
        exported: The form chosen for config.json; None where there is none.
        survey: What the plan was made from.
        warnings: What the user should know before going on, a sentence each.
    """

    model: str
    revision: str | None
    model_type: str
    rope: Rope
    scaling: Scaling
    target: int
    site: RotarySite
    section: str | None
    before: dict[str, Any] = field(repr=False)
    changes: dict[str, Any] = field(repr=False)
    exported: Export | None = field(repr=False, compare=False)  # it holds tensors, and follows from the rest
    survey: Survey = field(repr=False, compare=False)
    warnings: tuple[str, ...] = ()

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` to come, of the global layers where they differ by layer type."""
        return self.site.of(self.changes["rope_parameters"])

    @property
    def exportable(self) -> bool:
        """Whether a stock checkpoint can hold the method."""
        return bool(self.changes)

    @property
    def engines(self) -> list[EngineSupport]:
        """Who will read the extended checkpoint, by the engines' sources."""
        return (
            engine_support(self.rope_parameters, self.rope, self.target, self.model_type)
            if self.exportable
            else []
        )

    def export(self, length: int | None = None) -> Export:
        """What a patched model computes and would save: a length-dependent method held at `length` tokens.

        Args:
            length: For length-dependent methods, in tokens; None for the target.
        """
        return self.held(length)[0]

    def held(self, length: int | None = None) -> tuple[Export, dict[str, Any]]:
        """What `export` gives, and what config.json must say for it."""
        if self.exported is not None and not self.scaling.length_dependent:
            return self.exported, self.changes
        reach = length or self.target
        exported, changes = find_changes(self.survey, self.scaling.at(self.rope, reach), reach)
        assert exported is not None  # every static method exports
        return exported, changes

    def apply(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The content of config.json after the extension, from its content before."""
        return changed(raw, self.section, self.changes)

    def frequencies(self, length: int | None = None) -> Frequencies:
        """The frequencies of the patched model, to the bit those of the reloaded checkpoint."""
        return self.export(length).frequencies

    @property
    def rope_parameters_before(self) -> dict[str, Any]:
        """The `rope_parameters` now, of the global layers where they differ by layer type."""
        return self.site.of(self.before["rope_parameters"])

    @float32_on_cpu()
    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data: what `ropepatch.json` holds and `ropepatch plan --json` prints."""
        return {
            "model": self.model,
            "revision": self.revision,
            "model_type": self.model_type,
            "method": self.scaling.name,
            "factor": self.scaling.factor,
            "parameters": self.scaling.parameters(),
            "paper": self.scaling.paper,
            "original_max_position_embeddings": self.rope.original_max_position_embeddings,
            "target": self.target,
            "rotary_dim": self.rope.rotary_dim,
            "rope_theta": self.rope.rope_theta,
            "already_scaled": self.rope.is_scaled,
            "layer_type": self.site.layer_type,
            "attention_factor": self.frequencies().attention_factor,
            "inv_freq_before": self.rope.inv_freq().tolist(),
            "inv_freq": self.frequencies().inv_freq.tolist(),
            "config_before": self.before,
            "config_changes": self.changes,
            "engines": [engine._asdict() for engine in self.engines],
            "warnings": list(self.warnings),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def push(self, repo: str, *, private: bool = False, revision: str | None = None) -> Any:
        """Write the checkpoint of the plan into a temporary folder and push it; see `ropepatch.push`.

        Args:
            repo: `owner/name` on the Hub, or `name` in the user's own namespace.
            private: Make the repository private.
            revision: The branch; None for main.

        Raises:
            RopepatchError: If it cannot be written, or the Hub does not play along.
        """
        import ropepatch  # the one look upward: a plan is what a notebook holds

        return ropepatch.push(self, repo, private=private, revision=revision)

    @float32_on_cpu()
    def __str__(self) -> str:
        from ropepatch.extension.text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan(
    model: str | Path | PreTrainedModel | PreTrainedConfig,
    *,
    to: int | None = None,
    method: str | Path = "yarn",
    revision: str | None = None,
    **parameters: Any,
) -> Plan:
    """Plan an extension. No weights are read; of a Hub model only config.json is downloaded.

    Args:
        model: A checkpoint folder, a Hub id, a loaded model or its configuration.
        to: The target context in tokens; None for that of a scaling file.
        method: A name from `METHODS`, or a scaling file, `fitted.json`; see `ropepatch.scaling.file`.
        revision: Of a Hub id.
        **parameters: The method's own parameters; `factor` replaces target / L.

    Raises:
        RopepatchError: If the model, the target or the method does not allow it.
    """
    method = str(method)
    held = read_scaling(method, beside=parameters) if is_scaling_file(method) else None
    if isinstance(model, str | Path):
        source = find_source(model, revision, weights=False)
        found, name, revision = survey_folder(source.folder), source.name, source.revision
    elif isinstance(model, nn.Module):
        base = base_model(model)
        found = survey(base.config.to_dict(), base)
        name = base.config.name_or_path or type(base).__name__
    else:
        found, name = survey(model.to_dict()), model.name_or_path or type(model).__name__
    window = found.rope.original_max_position_embeddings
    wanted: Any = held.target if held is not None and to is None else to
    try:
        to = operator.index(wanted)
    except TypeError:
        raise RopepatchError(f"to must be a whole number of tokens, got {to!r}", hint="to=32_768") from None
    if held is not None:
        held.check(found.rope, name, to)
    if to <= window:
        stated = getattr(found.config, "max_position_embeddings", None) == window
        source_of = "max_position_embeddings" if stated else "factor x original_max_position_embeddings"
        raise RopepatchError(
            f"{name} already covers {window} tokens ({source_of}); nothing to extend to {to}",
            hint=f"--to is the target context, e.g. --to {4 * window}",
        )
    if held is not None:
        scaling = held.scaling
    else:
        scaling = make_scaling(method, **{"factor": to / window} | parameters)
    return plan_scaling(found, name, revision, scaling, to)


@float32_on_cpu()
def plan_scaling(found: Survey, name: str, revision: str | None, scaling: Scaling, to: int) -> Plan:
    """The plan of one scaling; see `plan`."""
    config = found.config
    exported, changes = find_changes(found, scaling, to)
    return Plan(
        model=name,
        revision=revision,
        model_type=config.model_type,
        rope=found.rope,
        scaling=scaling,
        target=to,
        site=found.site,
        section=found.section,
        before=copy.deepcopy(
            {key: found.stated[key] for key in changes if key in found.stated}
            | {"rope_parameters": config.rope_parameters}
        ),
        changes=changes,
        exported=exported,
        survey=found,
        warnings=tuple(_warnings(found, scaling, to)),
    )


def _warnings(survey: Survey, scaling: Scaling, to: int) -> Iterator[str]:
    config, rope = survey.config, survey.rope
    window = rope.original_max_position_embeddings
    if rope.is_scaled:
        yield (
            f"the model is already scaled: L = {window} is the window it reads now, "
            f"and {scaling.name} is applied on top of the frequencies it carries"
        )
    if scaling.factor * window < to:
        reach = scaling.factor * window
        yield f"factor {scaling.factor:g} reaches {reach:.0f} tokens, not the target of {to}"
    if scaling.length_dependent and scaling.native(rope):
        yield (
            "stock engines change the frequencies as the sequence grows, "
            "which contradicts keys they cached before; a static method does not"
        )
    if scaling.length_dependent and not scaling.native(rope):
        yield "no stock rope type holds this method: it can be patched and measured, not saved"
    if survey.rotates_partly and scaling.frequencies(rope, to).attention_factor != 1:
        yield "only part of each head rotates: the attention factor reaches only that part of the logit"
    if survey.raw.get("auto_map"):
        yield "config.json asks for remote code (auto_map): left out, transformers has this architecture"
    if config.model_type in ARCHITECTURE_NOTES:
        yield ARCHITECTURE_NOTES[config.model_type]
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if sliding and not getattr(config, "layer_types", None):
        yield f"sliding_window = {sliding} stays: tokens farther apart than that never attend to each other"
    if (
        not {"max_position_embeddings", config.attribute_map.get("max_position_embeddings")}
        & survey.stated.keys()
    ):
        yield f"config.json names no max_position_embeddings: transformers' default {window} is taken for L"
    if "rope_theta" not in json.dumps(survey.raw, default=str):
        yield f"config.json names no rope_theta: transformers' default {rope.rope_theta:g} is taken"
