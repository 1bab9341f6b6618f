"""Scale the RoPE of a loaded model, reversibly."""

from __future__ import annotations

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ropepatch.attention import Remapping
from ropepatch.attention.remapped import Remapped, remap_positions
from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.changes import ACROSS_LAYERS
from ropepatch.extension.planning import Plan, check_bare, check_global, plan_method
from ropepatch.model.checkpoint import ADAPTER, Checkpoint, InMemory
from ropepatch.model.config import (
    ORIGINAL,
    SEQUENCE,
    Config,
    find_rotary,
    scaled_twin,
    text_config,
)
from ropepatch.model.in_memory import check_rope
from ropepatch.model.rotary import (
    RotarySubstitute,
    Substitution,
    base_model,
    find_substitute,
    own_configs,
)
from ropepatch.scaling import METHODS, Scaling
from ropepatch.settings import Length

# The keys of a patched model's configuration, which `save_pretrained` writes
KEPT = "rope_parameters", ORIGINAL, "head_dim", SEQUENCE, ACROSS_LAYERS


class ScaledRope(RotarySubstitute):
    """A rotary module whose forward is the stock one with other frequencies.

    It returns cos and sin for x [B, T, H] at position_ids [B, T], in the stock class's layout (half-split,
    interleaved, half-width, complex, per layer type) and precision: float32 positions and angles, cast last.
    """

    state = "this model is already patched"
    way_back = "call remove() on its patch first"
    shows = "table"

    table: nn.Module  # a shallow copy of the stock module with other buffers
    # The softmax scale before the patch, by path of each changed attention
    softmax: dict[str, float]

    def __init__(self, stock: nn.Module, plan: Plan) -> None:
        super().__init__(stock)
        self.plan = plan
        self.frequencies = plan.frequencies()
        self.softmax = {}
        site = self.plan.config.site
        table = scaled_twin(self.stock, site, self.frequencies)
        self.__dict__ |= {  # not registered, as the stock module
            "table": table,
            "forward": MethodType(site.rotary_class.forward, table),
        }
        self.follow(self.device)

    def follow(self, device: torch.device) -> None:
        """Move both tables to the model's device."""
        super().follow(device)
        scaled = self.tables | {
            self.plan.config.site.attribute("inv_freq"): self.frequencies.inv_freq
        }
        self.table._buffers = {name: table.to(device) for name, table in scaled.items()}

    def extra_repr(self) -> str:
        """Return the text in `print(model)`."""
        plan, a = self.plan, self.frequencies.attention_factor
        span = f"{plan.config.window} -> {plan.target} tokens"
        return f"{plan.method.name}, {span}, factor={plan.factor:g}, attention_factor={a:.4g}"


class Patch(Substitution[ScaledRope]):
    """The handle of a patched model; as a context manager it removes the patch on exit.

    Args:
        model: The patched model.
        path: The path of its rotary module.
        substitute: The module that replaces it while the patch is active.
    """

    @property
    def plan(self) -> Plan:
        """The active plan."""
        if not self.in_force:
            raise RopepatchError(
                "this patch was removed", hint="call ropepatch.patch again"
            )
        return self._substitute.plan

    def record(self, folder: str | Path) -> None:
        """Write `ropepatch.json` into the folder of an adapter that another trainer saved.

        An adapter does not contain the RoPE parameters that it was trained with. With this record,
        `ropepatch.load_adapter` applies them. An existing record is replaced.

        Args:
            folder: The folder with adapter_config.json and the adapter's weights.

        Raises:
            RopepatchError: If the folder contains no adapter, the base checkpoint is not where the model was
                loaded from, or the patch has been removed.
        """
        plan, place = self.plan, Path(folder)
        if not (place / ADAPTER).is_file():
            raise RopepatchError(
                f"{place} contains no {ADAPTER}",
                hint="save the adapter there first with save_pretrained",
            )
        source = plan.checkpoint()
        origin = records.history(source.folder)
        made = records.Record.of(plan, base_weights=source.fingerprint, **origin)
        records.write(place, made)

    def _undo(self) -> None:
        _set_softmax(self.model, self._substitute.softmax)


def patch(
    model: nn.Module,
    method: Plan | Scaling | Remapping | str = "yarn",
    *,
    to: Length | None = None,
    original: Length | None = None,
    **parameters: Any,
) -> Patch | Remapped:
    """Apply a RoPE scaling or a position remapping to one loaded model, in memory and reversibly.

    Other models that share its configuration object stay unchanged: this model has a copy until the patch is
    removed.

    Args:
        model: A causal language model, possibly inside a PEFT model.
        method: A plan; a scaling, whose target length is then factor times the original; a position
            remapping; or the name of one.
        to: The target length, as in `plan`, for a method given by its name and for a position remapping.
        original: The original context length, as in `plan`.
        **parameters: The parameters of a method given by its name.

    Returns:
        A `Patch`; for a position remapping a `Remapped`.

    Raises:
        RopepatchError: If the model is already patched, is not the model of the plan, or cannot be scaled.
    """
    base = base_model(model)
    check_rope(base)
    return put(base, _planned(base, method, to, original, parameters))


def _planned(
    base: PreTrainedModel,
    method: Plan | Scaling | Remapping | str,
    to: Length | None,
    original: Length | None,
    parameters: dict[str, Any],
) -> Plan:
    """Return the plan for the arguments of `patch`."""
    if not isinstance(method, Plan):
        made = plan_method(InMemory.of(base, original), method, parameters, to)
        check_global(made)
        return made
    check_bare(to, original, parameters)
    planned, here = method.config, Config.of(base, method.config.original)
    same_class = planned.site.rotary_class is here.site.rotary_class
    if not same_class or planned.rope != here.rope:
        raise RopepatchError(
            f"the plan is for another model: {method.source.name} ({planned.model_type}) has other RoPE "
            "parameters",
            hint="plan this model: ropepatch.plan(model, to=...)",
        )
    return method


def put(model: PreTrainedModel, plan: Plan) -> Patch | Remapped:
    """Apply a plan to a model that was loaded from its source, or that has the same RoPE."""
    if isinstance(plan.method, Remapping):
        original = plan.config.original
        return remap_positions(model, plan.method, to=plan.target, original=original)
    keys, config = plan.patched.keys, plan.config
    if not config.has_rope:
        raise RopepatchError(
            f"the attention of {config.model_type} has no RoPE: there is nothing to patch",
            hint="it runs at any length; ropepatch.extend writes the longer length",
        )
    # Of another class with the same decoder, it differs from the plan's
    path = find_rotary(model).path
    stock = model.get_submodule(path)
    rope = ScaledRope(stock, plan)
    rope.train(stock.training)
    changes = {key: keys[key] for key in KEPT if key in keys} | {
        "max_position_embeddings": plan.target
    }
    # A user's change of the configuration must not change the plan
    changes = copy.deepcopy(changes)
    with own_configs(model, *changes) as rope.configs:
        if config.tied_yarn:
            modules = config.changed(changes).skeleton.named_modules()
            scales = {
                path: module.scaling
                for path, module in modules
                if hasattr(module, "scaling")
            }
            rope.softmax = _set_softmax(model, scales)
        for key, value in changes.items():
            setattr(text_config(model.config), key, value)
    model.set_submodule(path, rope)
    return Patch(model, path, rope)


def _set_softmax(model: nn.Module, scales: dict[str, float]) -> dict[str, float]:
    """Set the softmax scales by path of their attention, and return the previous ones."""
    attentions: dict[str, Any] = {path: model.get_submodule(path) for path in scales}
    before = {path: attention.scaling for path, attention in attentions.items()}
    for path, attention in attentions.items():
        attention.scaling = scales[path]
    return before


def active(model: nn.Module) -> Patch | None:
    """Return the active patch of a model or of its copy, or None."""
    base = base_model(model)
    place = find_substitute(base, ScaledRope)
    return None if place is None else Patch(base, *place)


def plan_of_record(record: records.Record, source: Checkpoint) -> Plan:
    """Return the plan of a record, for its base or for a checkpoint with the same RoPE."""
    factor = {"factor": record.factor} if record.method in METHODS else {}
    return plan_method(source, record.method, factor | record.parameters, record.target)
