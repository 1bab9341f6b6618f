"""Fold the attention factor into the query weights, for engines that ignore it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
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
from ropepatch.files import absent, new_folder
from ropepatch.model.checkpoint import Checkpoint, InMemory
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
    plan = _plan(source)
    offsets = query_weights(source)
    with new_folder(folder) as made:
        copy_files(small_files(source.folder), made)
        write_configuration(source, made, plan, plan.change)
        dtype = getattr(source.config.text, "dtype", None)
        larger = {
            name: partial(_scaled, a * a, offset, dtype)
            for name, offset in offsets.items()
        }
        files = source.weights.files
        clone_files(files, made, link=False, progress=progress, changes=larger)
        folded = Checkpoint(made)
        verdict = _verify(folded, source, plan, a * a, offsets)
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


def _plan(source: Checkpoint) -> Plan:
    """Plan no further scaling, with an attention factor of 1; L is the present context length."""
    rope = replace(source.config.rope, carried_attention_factor=1.0)
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
    config, tensors = source.config, dict[str, float]()
    kinds: dict[Any, str] = dict(
        enumerate(getattr(config.text, "layer_types", None) or ())
    )
    place = config.site.path.rpartition(".")[0]
    language_model = config.skeleton.get_submodule(place)
    for path, module in language_model.named_modules(prefix=place):
        kind = kinds.get(getattr(module, "layer_idx", None))
        rotates = hasattr(module, "q_proj") and hasattr(module, "k_proj")
        if rotates and config.layer_type in (None, kind):
            norm = getattr(module, "q_norm", None)
            part, last = ("q_norm", norm) if norm else ("q_proj", module.q_proj)
            for name, _ in last.named_parameters():
                tensors[f"{path}.{part}.{name}"] = _offset(last) if norm else 0.0
    if not tensors:
        raise RopepatchError(
            f"{config.model_type} has no weights of its queries alone", hint=HINT
        )
    return tensors


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
    scale: float,
    offsets: Mapping[str, float],
) -> Verdict:
    """Compare the folded checkpoint with its source at the same frequencies, in float32.

    Rounding of the scaled weights to bfloat16 changes the logits of a deep model by several percent. So it
    checks two things: each weight is scaled up to its rounding, and without rounding the logits are the same.
    """
    check_frequencies(written, plan)
    model: Any = source.load()
    folded: Any = written.load()
    tolerance = FOLDED[model.dtype]
    exact = {}
    for name, offset in offsets.items():
        weight, given = model.get_parameter(name), folded.get_parameter(name)
        exact[name] = scale * (weight.detach().double() + offset) - offset
        to = torch.finfo(given.dtype)
        if not torch.allclose(given.double(), exact[name], rtol=to.eps, atol=to.tiny):
            raise RopepatchError(
                f"{name} was not folded: it is not {scale:g} times as large",
                hint=HINT,
            )
    before = probe_logits(model.float(), plan.target, source.folder.name)
    after = probe_logits(folded.float(), plan.target, written.folder.name)
    difference = largest_change(before, after)
    folded.load_state_dict(exact, strict=False)
    after = probe_logits(folded, plan.target, written.folder.name)
    apart = largest_change(before, after)
    if not apart <= tolerance:
        raise RopepatchError(
            f"folding the attention factor changes the logits by {apart:.1e} of the largest",
            hint=HINT,
        )
    logits = f"within {difference:.1e} of the largest, before folding"
    return Verdict(
        frequencies="equal", logits=logits, compared=True, difference=difference
    )
