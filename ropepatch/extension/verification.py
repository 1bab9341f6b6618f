"""Stock transformers as the judge of a written checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.extension.patching import put
from ropepatch.extension.planning import Plan
from ropepatch.extension.record import Verdict
from ropepatch.extension.remapping_code import load_remapped, remapped_layers
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import text_config
from ropepatch.model.head import check_finite
from ropepatch.model.precision import available_bytes
from ropepatch.model.stock import stock_code

PROBE_TOKENS = 48
TOLERANCE = 1e-5  # of logits; the same operations in the same order are expected to agree to the bit
# Of the largest logit: stock `dynamic` rounds its base to float32, which far positions feel.
DYNAMIC_TOLERANCE = 0.02
# Of the largest logit: the same scores, summed in another order and rounded in float32.
MAP_TOLERANCE = 1e-3


def read_source(source: Checkpoint, plan: Plan) -> tuple[Plan, Tensor | str]:
    """Compute what a checkpoint must compute that is written by a plan: the logits of the patched source.

    Returns:
        The plan, which then names the layers that rotate by its remapping where not all do; and the logits of
        random tokens, or why there are none to compare.
    """
    needed, available = 2 * source.weights.num_bytes, available_bytes()
    if source.is_quantised:
        return plan, "quantised weights"
    if needed > available and plan.remapping is None:
        return plan, "the weights do not fit into memory"
    if needed > available:
        raise RopepatchError(
            f"a checkpoint with a position remapping is compared before it is kept, which takes "
            f"{needed / 1e9:.1f} GB of memory; there are {available / 1e9:.1f}",
            hint="extend it on a machine with more memory, or patch it in memory",
        )
    model = source.load(None if plan.remapping is None else torch.float32)
    put(model, source, plan)
    plan = replace(plan, layers=remapped_layers(model)) if plan.remapping else plan
    return plan, probe_logits(model, plan.target, source.folder.name)


def read_trained(model: Any, plan: Plan, name: str) -> Tensor | str:
    """The logits of a trained model under the patch of a plan, or why there are none to compare."""
    if sum(weight.numel() * weight.element_size() for weight in model.parameters()) > available_bytes():
        return "the weights do not fit into memory twice"
    return probe_logits(model.eval(), plan.target, name)


def verify(written: Checkpoint, plan: Plan, expected: Tensor | str) -> tuple[Verdict, PreTrainedModel | None]:
    """Reload a written checkpoint with stock transformers and compare what it computes.

    Args:
        written: The checkpoint to judge; the code of a position remapping is what we have just put there.
        plan: Says the frequencies that it must compute.
        expected: The logits that it must compute, or why they are not compared.

    Returns:
        The verdict, and the model as it was reloaded; None where it did not have to be.
    """
    model = None
    if plan.remapping is None:
        check_frequencies(written, plan)
    else:
        model = load_remapped(written.folder)
        stock: Any = model.get_submodule(plan.site.path).stock
        inv_freq, planned = getattr(stock, plan.site.attribute("inv_freq")), plan.frequencies().inv_freq
        if not torch.equal(inv_freq, planned):
            raise _differs("frequencies", float((inv_freq - planned).abs().max()))
    if isinstance(expected, str):
        said = f"not compared: {expected}"
        return Verdict(frequencies="equal", logits=said, compared=False, difference=None), model
    model = model or written.load()
    logits = probe_logits(model, plan.target, written.folder.name)
    largest, tolerance = expected.abs().max().item(), TOLERANCE
    if plan.remapping is not None:
        tolerance = MAP_TOLERANCE * largest
    elif plan.rope_parameters["rope_type"] == "dynamic":
        tolerance = DYNAMIC_TOLERANCE * largest
    difference = (logits - expected).abs().max().item()
    if not difference <= tolerance:
        raise _differs("logits", difference)
    said = "equal" if difference == 0 else f"within {difference:.1e}"
    return Verdict(frequencies="equal", logits=said, compared=True, difference=difference), model


def frequency_error(written: Checkpoint, plan: Plan) -> float:
    """By how much the frequencies of stock transformers are off from a plan's; 0.0 if equal to the bit."""
    return plan.source.with_config(written.raw).frequencies().distance(plan.saved.frequencies)


def check_frequencies(written: Checkpoint, plan: Plan) -> None:
    """Refuse a checkpoint from which stock transformers computes other frequencies than the plan's."""
    judged = plan.source.with_config(written.raw)
    if error := judged.frequencies().distance(plan.saved.frequencies):
        raise _differs("frequencies", error)
    if not plan.source.other_frequencies().items() <= judged.other_frequencies().items():
        raise _differs("frequencies for the other layers", float("nan"))


@torch.inference_mode()
def probe_logits(model: PreTrainedModel, target: int, name: str) -> Tensor:
    """The logits of random tokens spread evenly over the target: [1, T, V] float32."""
    vocabulary = text_config(model.config).vocab_size
    ids = torch.randint(vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.linspace(0, target - 1, PROBE_TOKENS).long()[None]
    # The mask is explicit because jumps in the positions would be taken for packed documents.
    with stock_code(f"run {name}"):
        out = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    logits: Tensor = out.logits.float()
    if not logits.isfinite().all():
        check_finite(model, name)
        raise RopepatchError(
            f"{name} computes logits that are NaN or infinite",
            hint=f"its weights are finite: it overflows in {out.logits.dtype}",
        )
    return logits


def largest_change(before: Tensor, after: Tensor) -> float:
    """By how much logits differ, as a share of the largest."""
    return ((after - before).abs().max() / before.abs().max()).item()


def _differs(what: str, difference: float) -> RopepatchError:
    return RopepatchError(
        f"stock transformers computes other {what} from what was written (off by {difference:.1e})",
        hint="nothing was kept; please report the model type and the method",
    )
