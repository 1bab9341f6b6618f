"""Verify a written checkpoint by reloading it with stock transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.extension.changes import Change
from ropepatch.extension.patching import put
from ropepatch.extension.planning import Plan
from ropepatch.extension.record import Verdict
from ropepatch.extension.remapping_code import load_remapped, remapped_layers
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import generates, stock_code, text_config
from ropepatch.model.head import check_finite
from ropepatch.model.precision import available_bytes

PROBE_TOKENS = 48
# Of a logit; the same operations in the same order should be bit-identical
TOLERANCE = 1e-5
# Relative to the largest logit: stock `dynamic` rounds its base to float32, which affects far positions.
DYNAMIC_TOLERANCE = 0.02
# Relative to the largest logit: the same scores, summed in another order and rounded in float32.
MAP_TOLERANCE = 1e-3


def patched_logits(source: Checkpoint, plan: Plan) -> tuple[Tensor | str, Change]:
    """Compute the logits of the patched source, which the written checkpoint must reproduce.

    Returns:
        The logits of random tokens, or why they are not compared; and the plan's change, which for a
        remapping names the layers that it applies to.

    Raises:
        RopepatchError: If the model does not fit into memory, and has a position remapping.
    """
    change = plan.change
    if source.config.unloaded:
        return source.config.unloaded, change
    if source.config.is_quantised:
        return "quantised weights", change
    needed = 2 * source.weights.num_bytes
    if needed > available_bytes():
        if change.code:
            raise RopepatchError(
                f"verifying a checkpoint with a position remapping needs {needed / 1e9:.1f} GB of memory",
                hint="use a machine with more memory, or patch the model in memory (ropepatch.patch)",
            )
        return "the weights do not fit into memory", change
    model = source.load(torch.float32 if change.code else None)
    if source.config.has_rope:
        put(model, plan)
    if change.code:
        change = change.limited_to(remapped_layers(model))
    return probe_logits(model, plan.target, source.folder.name), change


def trained_logits(model: Any, plan: Plan) -> Tensor | str:
    """Compute the logits of a trained, patched model, or return why they are not compared."""
    if model.get_memory_footprint() > available_bytes():
        return "the weights do not fit into memory twice"
    return probe_logits(model.eval(), plan.target, plan.source.name)


def verify(
    written: Checkpoint, plan: Plan, expected: Tensor | str
) -> tuple[Verdict, PreTrainedModel | None]:
    """Reload a written checkpoint with stock transformers, and compare frequencies and logits.

    Args:
        written: The checkpoint; a position remapping's code file was written by ropepatch.
        plan: The plan with the expected frequencies.
        expected: The expected logits, or why they are not compared.

    Returns:
        The verdict, and the reloaded model; None if it was not reloaded.
    """
    model = None
    if plan.change.code:
        model = _reloaded_by_code(written, plan)
    else:
        check_frequencies(written, plan)
    difference, tolerance = None, TOLERANCE
    if isinstance(expected, str):
        result = f"not compared: {expected}"
    else:
        model = model or written.load()
        logits = probe_logits(model, plan.target, written.folder.name)
        difference = (logits - expected).abs().max().item()
        largest = expected.abs().max().item()
        if plan.change.code:
            tolerance += MAP_TOLERANCE * largest
        elif plan.rope_parameters.get("rope_type") == "dynamic":
            tolerance += DYNAMIC_TOLERANCE * largest
        if not difference <= tolerance:
            raise _differs("logits", difference)
        result = "equal" if difference == 0 else f"within {difference:.1e}"
        if not generates(model.config):
            result += ", as hidden states"
    compared = difference is not None
    verdict = Verdict(
        frequencies="equal", logits=result, compared=compared, difference=difference
    )
    return verdict, model


def _reloaded_by_code(written: Checkpoint, plan: Plan) -> PreTrainedModel:
    """Reload a checkpoint with the code of its position remapping, and compare its frequencies."""
    model, site = load_remapped(written.folder), plan.config.site
    stock: Any = model.get_submodule(site.path).stock
    planned = plan.change.frequencies
    computed = planned._replace(inv_freq=getattr(stock, site.attribute("inv_freq")))
    if error := planned.distance(computed):
        raise _differs("frequencies", error)
    return model


def check_frequencies(written: Checkpoint, plan: Plan) -> None:
    """Raise if stock transformers computes other frequencies than the plan's from a checkpoint."""
    reloaded = plan.config.read_from(written.raw)
    if error := reloaded.frequencies.distance(plan.change.frequencies):
        raise _differs("frequencies", error)
    if not plan.config.other_frequencies.items() <= reloaded.other_frequencies.items():
        raise _differs("frequencies for the other layers", float("nan"))


@torch.inference_mode()
def probe_logits(model: PreTrainedModel, target: int, name: str) -> Tensor:
    """Compute the logits [1, T, V] float32 of random tokens spread evenly over the target length.

    Of a model without a language model head, the last hidden states [1, T, D].
    """
    has_head = generates(model.config)
    vocabulary = text_config(model.config).vocab_size
    ids = torch.randint(
        vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    positions = torch.linspace(0, target - 1, PROBE_TOKENS).long()[None]
    # Without an explicit mask, jumps in the positions would count as packed documents.
    with stock_code(f"run {name}"):
        out = (model if has_head else model.base_model)(
            ids,
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            **({"use_cache": False} if has_head else {}),
        )
    computed = out.logits if has_head else out.last_hidden_state
    logits: Tensor = computed.float()
    if not logits.isfinite().all():
        check_finite(model, name)
        raise RopepatchError(
            f"{name} computes logits that are NaN or infinite",
            hint=f"its weights are finite, so it overflows in {computed.dtype}: use a wider dtype",
        )
    return logits


def largest_change(before: Tensor, after: Tensor) -> float:
    """Return the largest difference of two logits, relative to the largest logit."""
    return ((after - before).abs().max() / before.abs().max()).item()


def _differs(what: str, difference: float) -> RopepatchError:
    return RopepatchError(
        f"stock transformers computes other {what} from the written checkpoint (off by {difference:.1e})",
        hint="nothing was written; please report the model type and the method",
    )
