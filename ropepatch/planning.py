"""What an extension will change, decided from the configuration alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ropepatch.adapters import (
    RotarySite,
    blueprint,
    find_rotary,
    load_config,
    read_rope,
    stock_table,
)
from ropepatch.engines import EngineSupport, engine_support
from ropepatch.errors import RopepatchError
from ropepatch.export import Export, export, frozen
from ropepatch.legacy import check_agreement, legacy_keys
from ropepatch.rope import Frequencies, Rope
from ropepatch.scaling import Scaling, make_scaling
from ropepatch.source import find_source, read_json

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
        before: The values of `changes` now, of those that are set.
        changes: What changes in config.json; empty where no stock rope type can hold the method.
        warnings: What the user should know before going on, a sentence each.
    """

    model: str
    revision: str | None
    model_type: str
    rope: Rope
    scaling: Scaling
    target: int
    site: RotarySite
    before: dict[str, Any] = field(repr=False)
    changes: dict[str, Any] = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` to come, of the global layers where they differ by layer type."""
        parameters: dict[str, Any] = self.changes["rope_parameters"]
        return parameters if self.site.layer_type is None else parameters[self.site.layer_type]

    @property
    def exportable(self) -> bool:
        """Whether a stock checkpoint can hold the method."""
        return bool(self.changes)

    @property
    def engines(self) -> list[EngineSupport]:
        """Who will read the extended checkpoint, by the engines' sources."""
        return engine_support(self.rope_parameters, self.rope, self.target) if self.exportable else []

    def export(self, length: int | None = None) -> Export:
        """What a patched model computes and would save: a length-dependent method held at `length` tokens.

        Args:
            length: For length-dependent methods, in tokens; None for the target.
        """
        current = self.rope_parameters_before
        if self.scaling.length_dependent:
            return frozen(self.scaling, self.rope, current, length or self.target)
        per_layer_type = self.site.layer_type is not None
        exported = export(self.scaling, self.rope, current, per_layer_type=per_layer_type)
        assert exported is not None  # every static method exports
        return exported

    def frequencies(self, length: int | None = None) -> Frequencies:
        """The frequencies of the patched model, to the bit those of the reloaded checkpoint."""
        return self.export(length).frequencies

    @property
    def rope_parameters_before(self) -> dict[str, Any]:
        """The `rope_parameters` now, of the global layers where they differ by layer type."""
        parameters: dict[str, Any] = self.before["rope_parameters"]
        return parameters if self.site.layer_type is None else parameters[self.site.layer_type]

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

    def __str__(self) -> str:
        from ropepatch.plan_text import plan_text

        return plan_text(self)


def plan(
    model: str | Path | PreTrainedModel | PreTrainedConfig,
    *,
    to: int,
    method: str = "yarn",
    revision: str | None = None,
    **parameters: Any,
) -> Plan:
    """Plan an extension. No weights are read; of a Hub model only config.json is downloaded.

    Args:
        model: A checkpoint folder, a Hub id, a loaded model or its configuration.
        to: The target context in tokens.
        method: A name from `METHODS`.
        revision: Of a Hub id.
        **parameters: The method's own parameters; `factor` replaces target / L.

    Raises:
        RopepatchError: If the model, the target or the method does not allow it.
    """
    if isinstance(model, str | Path):
        source = find_source(model, revision, weights=False)
        found = survey(read_json(source.folder / "config.json"))
        return plan_extension(
            found, source.name, source.revision, to=to, method=method, parameters=parameters
        )
    config = getattr(model, "config", model)
    found = survey_config(config, model if isinstance(model, nn.Module) else None)
    name = config.name_or_path or type(model).__name__
    return plan_extension(found, name, None, to=to, method=method, parameters=parameters)


@dataclass(frozen=True)
class Survey:
    """What a configuration says of a model's rope.

    Args:
        raw: The content of config.json.
        config: The same as transformers reads it.
        site: Where the rotary module is.
        rope: The rope now.
    """

    raw: dict[str, Any]
    config: PreTrainedConfig
    site: RotarySite
    rope: Rope


def survey(raw: dict[str, Any], model: nn.Module | None = None) -> Survey:
    """Survey a config.json, through its model where that is loaded.

    Raises:
        RopepatchError: If the configuration contradicts itself, or its architecture is not supported.
    """
    check_agreement(raw)
    config = load_config(raw)
    site = find_rotary(model or blueprint(config))
    return Survey(raw, config, site, read_rope(config, site))


def survey_config(config: PreTrainedConfig, model: nn.Module | None = None) -> Survey:
    """Survey a configuration in memory; see `survey`."""
    return survey(json.loads(config.to_json_string(use_diff=False)), model)


def plan_extension(
    found: Survey, name: str, revision: str | None, *, to: int, method: str, parameters: dict[str, Any]
) -> Plan:
    """Plan from a survey; see `plan`."""
    window = found.rope.original_max_position_embeddings
    if not isinstance(to, int) or to <= window:
        raise RopepatchError(
            f"{name} already covers {window} tokens (max_position_embeddings); nothing to extend to {to}",
            hint=f"--to is the target context, e.g. --to {4 * window}",
        )
    scaling = make_scaling(method, **{"factor": to / window} | parameters)
    return plan_scaling(found, name, revision, scaling, to)


def plan_scaling(found: Survey, name: str, revision: str | None, scaling: Scaling, to: int) -> Plan:
    """The plan of one scaling; see `plan`."""
    site, config = found.site, found.config
    per_layer_type = site.layer_type is not None
    exported = export(scaling, found.rope, site.parameters(config), per_layer_type=per_layer_type)
    changes = _config_changes(found, exported, to) if exported else {}
    return Plan(
        model=name,
        revision=revision,
        model_type=config.model_type,
        rope=found.rope,
        scaling=scaling,
        target=to,
        site=site,
        before={key: found.raw[key] for key in changes if key in found.raw}
        | {"rope_parameters": config.rope_parameters},
        changes=changes,
        warnings=tuple(_warnings(found, scaling, to)),
    )


def _config_changes(found: Survey, exported: Export, to: int) -> dict[str, Any]:
    """What config.json must say for stock transformers to compute `exported.frequencies`; proven by asking it."""
    raw, config, site, rope = found.raw, found.config, found.site, found.rope
    parameters = exported.rope_parameters
    window = rope.original_max_position_embeddings
    # `dynamic` takes L from max_position_embeddings: the target there would switch it off up to the target.
    reach = window if parameters["rope_type"] == "dynamic" else to
    changes: dict[str, Any] = {
        config.attribute_map.get("max_position_embeddings", "max_position_embeddings"): reach,
        "rope_parameters": site.with_parameters(config, parameters),
    }
    if "original_max_position_embeddings" in parameters or hasattr(
        config, "original_max_position_embeddings"
    ):
        # At the top level it wins over the nested one in transformers 5, and is the only one some engines read.
        changes["original_max_position_embeddings"] = window
    if getattr(config, "head_dim", 0) is None:
        changes["head_dim"] = config.hidden_size // config.num_attention_heads
    for legacy in (legacy_keys(raw, parameters), {"rope_scaling": None}):
        candidate = changes | {key: value for key, value in legacy.items() if value is not None or key in raw}
        table = stock_table(load_config(raw | candidate), site)
        if torch.equal(table.inv_freq, exported.frequencies.inv_freq) and (
            table.attention_factor == exported.frequencies.attention_factor
            or parameters["rope_type"] == "dynamic"
        ):
            return candidate
    difference = (table.inv_freq / exported.frequencies.inv_freq - 1).abs().nan_to_num().max().item()
    raise RopepatchError(
        f"{config.model_type} would not compute these frequencies from any config.json (off by {difference:.1e})",
        hint="please report the model type: stock transformers must agree before anything is written",
    )


def _warnings(survey: Survey, scaling: Scaling, to: int) -> list[str]:
    config, rope = survey.config, survey.rope
    window = rope.original_max_position_embeddings
    found = []
    if rope.is_scaled:
        found.append(
            f"the model is already scaled: L = {window} is the window it reads now, and {scaling.name} is applied "
            "on top of the frequencies it carries"
        )
    if scaling.factor * window < to:
        found.append(
            f"factor {scaling.factor:g} reaches {scaling.factor * window:.0f} tokens, not the target of {to}"
        )
    if scaling.length_dependent and scaling.native(rope):
        found.append(
            "stock engines change the frequencies as the sequence grows, which contradicts keys they cached before; "
            "a static method does not"
        )
    if scaling.length_dependent and not scaling.native(rope):
        found.append("no stock rope type holds this method: it can be patched and measured, not saved")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = rope.rotary_dim < head_dim or hasattr(config, "qk_nope_head_dim")
    if partial and scaling.frequencies(rope, to).attention_factor != 1:
        found.append(
            "only part of each head rotates: the attention factor reaches only that part of the logit"
        )
    sliding = getattr(config, "sliding_window", None)
    if (
        isinstance(sliding, int)
        and getattr(config, "use_sliding_window", True)
        and not getattr(config, "layer_types", None)
    ):
        found.append(
            f"sliding_window = {sliding} stays: tokens farther apart than that never attend to each other"
        )
    if "rope_theta" not in json.dumps(survey.raw):
        found.append(f"config.json names no rope_theta: transformers' default {rope.rope_theta:g} is taken")
    return found
