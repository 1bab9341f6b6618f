"""Fold the attention factor into the query weights, for engines that ignore it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.patching import put
from ropepatch.extension.planning import Plan, plan_by
from ropepatch.extension.record import Record, Verdict
from ropepatch.extension.verification import (
    check_frequencies,
    largest_change,
    probe_logits,
)
from ropepatch.extension.writing import (
    copy_files,
    origin_of,
    proof_of,
    small_files,
    write_configuration,
)
from ropepatch.files import absent, check_space, new_folder
from ropepatch.model.checkpoint import Checkpoint, InMemory
from ropepatch.model.config import Config
from ropepatch.model.weights import Progress, clone_files
from ropepatch.scaling import make_scaling

# Largest change of a logit, relative to the largest, without the rounding of weights to these dtypes.
FOLDED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
# Keys of the earlier record that are about other weights
STALE = {
    "evaluation": None,
    "command": None,
}
RENEWED = ("attention_factor", "config_changes", "engines", "versions")
HINT = "keep the attention factor in config.json, and use an engine that supports it"


def fold_attention(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint whose attention factor a is 1 and whose queries are a^2 times as large.

    The logits stay the same: a multiplies cos and sin, hence every attention logit by a^2. The RoPE
    parameters are saved so that every engine that supports them uses a factor of 1.

    Args:
        model: A checkpoint folder or a Hub id.
        out: The folder to write; it must not exist.
        revision: The branch, tag or commit of a Hub id.
        progress: A function of (bytes written, bytes in total).

    Returns:
        The folder.

    Raises:
        RopepatchError: If there is no factor to fold, the queries have no weights of their own, or stock
            transformers computes other logits from the result; nothing is left behind then.
    """
    folder = absent(out)
    source = Checkpoint.find(model, revision, weights=True)
    a = source.config.rope.carried_attention_factor
    _check(source)
    plan = _plan(source, attention_factor=1.0)
    offsets = query_weights(source)
    weights = source.weights
    if missing := offsets.keys() - weights.shapes.keys():
        raise RopepatchError(f"the weights contain no {min(missing)}", hint=HINT)
    with new_folder(folder) as made:
        check_space(
            "the copy", folder.parent, weights.num_bytes, hint="free some space"
        )
        copy_files(small_files(source.folder), made)
        write_configuration(source, made, plan, plan.change)
        dtype = getattr(source.config.text, "dtype", None)
        larger = {
            name: partial(_scaled, a * a, offset, dtype)
            for name, offset in offsets.items()
        }
        clone_files(weights.files, made, link=False, progress=progress, changes=larger)
        unfolded = _plan(source, attention_factor=a)
        folded = Checkpoint(made)
        verdict = _verify(folded, source, plan, unfolded, a * a, offsets)
        proof = proof_of(folded, verdict)
        records.write(
            made, _record(source, plan).amended(folded_attention_factor=a, **proof)
        )
    return folder


def _check(source: Checkpoint) -> None:
    if source.config.rope.carried_attention_factor == 1:
        raise RopepatchError(
            f"{source.name} has attention factor 1: there is nothing to fold",
            hint="serve it unchanged",
        )
    if source.config.is_quantised:
        raise RopepatchError(
            f"{source.name} has quantised weights, which ropepatch cannot change",
            hint=HINT,
        )
    if source.config.rotates_partly:
        raise RopepatchError(
            f"only part of each head of {source.name} rotates, so the attention factor scales only a part",
            hint=HINT,
        )


def _plan(source: Checkpoint, *, attention_factor: float) -> Plan:
    """Plan no further scaling, with another attention factor; L is the present context length."""
    rope = source.config.rope.model_copy(
        update={"carried_attention_factor": attention_factor}
    )
    config = replace(source.config, scaled_rope=rope)
    return plan_by(
        InMemory(source.name, source.revision, config),
        make_scaling("none", factor=1.0),
        config.window,
    )


def _record(source: Checkpoint, plan: Plan) -> Record:
    """Return the record of the source's extension, with the present config changes and engines."""
    origin = origin_of(source)
    if "earlier" not in origin:
        return Record.of(plan, **origin)
    extension: Record = origin["earlier"]
    folded = Record.of(plan)
    return extension.amended(**STALE, **{key: getattr(folded, key) for key in RENEWED})


def query_weights(source: Checkpoint) -> dict[str, float]:
    """Return the tensors w that scale the queries, by name, each with an offset o: queries scale with w + o.

    These are the weights of the query norm if there is one (o is 1 in families that multiply by 1 + w), else
    those of the projection.
    """
    tensors: dict[str, float] = {}
    for path, module in _query_layers(source.config.skeleton, source.config):
        if norm := getattr(module, "q_norm", None):
            if getattr(norm, "weight", None) is None:
                raise RopepatchError(
                    "queries are normalised without weights", hint=HINT
                )
            tensors[f"{path}.q_norm.weight"] = _offset(norm)
        else:
            tensors |= {
                f"{path}.q_proj.{name}": 0.0
                for name, _ in module.q_proj.named_parameters()
            }
    if not tensors:
        raise RopepatchError(
            f"{source.config.model_type} has no projection to queries alone", hint=HINT
        )
    return tensors


def _query_layers(model: PreTrainedModel, config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the decoder's attention modules whose RoPE is scaled and that have a query projection."""
    kinds = dict(enumerate(getattr(config.text, "layer_types", None) or ()))
    # Some audio encoders number their layers as well
    language_model = config.site.path.rpartition(".")[0]
    for path, module in model.named_modules():
        index = (
            getattr(module, "layer_idx", None)
            if path.startswith(language_model)
            else None
        )
        scaled = index is not None and config.layer_type in (None, kinds.get(index))
        if scaled and hasattr(module, "q_proj") and hasattr(module, "k_proj"):
            yield path, module


def _offset(norm: nn.Module) -> float:
    """Return 0 if the norm multiplies by its weight, 1 if it multiplies by 1 + weight."""
    probe: Any = copy.deepcopy(norm).to_empty(device="cpu")
    with torch.no_grad():
        probe.weight.zero_()
        return float(probe(torch.ones_like(probe.weight)).abs().max() > 0)


def _scaled(
    scale: float, offset: float, dtype: torch.dtype | None, weight: Tensor
) -> Tensor:
    """Scale a query weight with its offset, in the dtype it is loaded in."""
    scaled = scale * (weight.double() + offset) - offset
    return scaled.to(torch.promote_types(weight.dtype, dtype or weight.dtype))


def _verify(
    written: Checkpoint,
    source: Checkpoint,
    plan: Plan,
    unfolded: Plan,
    scale: float,
    offsets: Mapping[str, float],
) -> Verdict:
    """Compare the folded checkpoint with its source at the same frequencies, in float32.

    Rounding of the scaled weights to bfloat16 changes the logits of a deep model by several percent. So it
    checks two things: each weight is scaled up to its rounding, and the source has the same logits with the
    written weights divided by the scale.
    """
    check_frequencies(written, plan)
    model: Any = source.load()
    put(model, unfolded)
    tolerance = FOLDED[model.dtype]
    folded: Any = written.load()
    rounding = {name: torch.finfo(folded.get_parameter(name).dtype) for name in offsets}
    before = probe_logits(model.float(), plan.target, source.folder.name)
    after = probe_logits(folded.float(), plan.target, written.folder.name)
    difference = largest_change(before, after)
    with torch.no_grad():
        for name, offset in offsets.items():
            weight = model.get_parameter(name)
            given = folded.get_parameter(name).double() + offset
            meant = scale * (weight.double() + offset)
            to = rounding[name]
            if not torch.allclose(
                given - offset, meant - offset, rtol=to.eps, atol=to.tiny
            ):
                raise RopepatchError(
                    f"{name} was not folded: it is not {scale:g} times as large",
                    hint=HINT,
                )
            weight.copy_(given / scale - offset)
    apart = largest_change(probe_logits(model, plan.target, source.folder.name), after)
    if not apart <= tolerance:
        raise RopepatchError(
            f"folding the attention factor changes the logits by {apart:.1e} of the largest",
            hint=HINT,
        )
    logits = f"within {difference:.1e} of the largest, before folding"
    return Verdict(
        frequencies="equal", logits=logits, compared=True, difference=difference
    )
