"""What a fault does to the model itself: two ropes, the same weights, the same text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ropepatch.errors import RopepatchError
from ropepatch.extension.verification import available_bytes
from ropepatch.files import write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import CONFIG, Finding
from ropepatch.model.config import load_text_config, text_config
from ropepatch.model.head import reading_on
from ropepatch.model.loading import load_model
from ropepatch.model.rotary import RotarySite, find_rotary, float32_on_cpu, rotating_by
from ropepatch.model.stock import stock_code
from ropepatch.model.weights import Weights

TOKENS = 128  # that the model writes itself
EQUAL = 1e-6  # nats per token, below which two predictions count as equal


def with_effects(
    case: Case, findings: Iterable[Finding], weights: Weights | None, loadable: Case
) -> list[Finding]:
    """The findings; those that concern the rope with the effect that was measured, or why it was not.

    `loadable` is the checkpoint after all repairs: its configuration loads if any does.
    """
    results, model = list(findings), None
    for at, finding in enumerate(results):
        if finding.meant is not None and all(edit.file == CONFIG for edit in finding.meant):
            model = model or _load(loadable.raw, weights)
            effect = f"not measured: {model}" if isinstance(model, str) else _effect(case, finding, model)
            results[at] = replace(finding, effect=effect)
    return results


def _load(raw: dict[str, Any], weights: Weights | None) -> Any:
    """The model of weights and a configuration, or why it is not loaded."""
    if weights is None:
        return "no weights here that can be loaded"
    if "quantization_config" in raw:
        return "quantised weights"
    if 2 * weights.num_bytes > available_bytes():
        return "the weights do not fit into memory"
    try:
        with TemporaryDirectory() as scratch:
            for file in weights.files:
                (Path(scratch) / file.name).symlink_to(file.resolve())
            write_json(Path(scratch) / CONFIG, raw)
            model = load_model(Checkpoint(Path(scratch)))
        find_rotary(model)
    except RopepatchError as error:
        return str(error)
    return model


def _effect(case: Case, finding: Finding, model: Any) -> str:
    """How far the predictions move, in words."""
    site, intended = find_rotary(model), case.with_edits(finding.meant or ())
    try:
        meant = _rotary(site, intended.raw)
    except RopepatchError as error:
        return f"not measured: {error}"
    reach = int(intended.reach() or TOKENS)
    window = int(min([reach, *(rope.original for rope in intended.ropes if rope.original)]))
    try:
        actual = _rotary(site, case.with_edits(finding.read).raw)
        with stock_code("run the model"), torch.inference_mode():
            with rotating_by(model, site.path, meant):
                ids = _written(model, min(TOKENS, reach))
            length = ids.shape[1]
            half, near = length // 2, torch.arange(min(length, window))
            # The second half at the far end: its tokens attend to each other and across the whole window.
            far = torch.cat([torch.arange(half), torch.arange(reach - length + half, reach)])
            spans = [(ids[:, : len(near)], near, 0), (ids, far, half)]
            expected, got = (
                [
                    _predictions(model, site, rotary, tokens, positions)[skip:]
                    for tokens, positions, skip in (spans if reach > window and half else spans[:1])
                ]
                for rotary in (meant, actual)
            )
    except RopepatchError as error:
        return f"measured: {error}"
    moved = [(p.exp() * (p - q)).sum(-1).mean().item() for p, q in zip(expected, got, strict=True)]
    if max(moved) < EQUAL:
        return f"measured: none, equal predictions for {length} tokens that the model writes itself"
    parts = [f"{moved[0]:.3g} nats per token (mean KL) within {window} positions"]
    parts += [f"{across:.3g} across {reach}" for across in moved[1:]]
    return f"measured on {length} tokens that the model writes itself: predictions move by {', '.join(parts)}"


def _rotary(site: RotarySite, raw: dict[str, Any]) -> nn.Module:
    """The stock rotary module of a configuration."""
    config = load_text_config(raw)
    with stock_code(f"compute the rope of {config.model_type}"), float32_on_cpu():
        module: nn.Module = site.rotary_class(config)
    return module


def _predictions(model: Any, site: RotarySite, rotary: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """Log-probabilities [T, V] under a rope."""
    mask = torch.ones_like(ids)  # explicit because jumps would be taken for packed documents
    with rotating_by(model, site.path, rotary):
        out = model(ids, position_ids=positions[None], attention_mask=mask, use_cache=False)
    log_probabilities: Tensor = out.logits[0].float().log_softmax(-1)
    return log_probabilities


def _written(model: Any, length: int) -> Tensor:
    """Tokens that the model samples itself, from its own first token on: [1, length]."""
    generator, config = torch.Generator().manual_seed(0), text_config(model.config)
    start = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    ids, read = torch.tensor([[start % config.vocab_size]]), reading_on(model)
    while ids.shape[1] < length:
        probabilities = read(ids[:, -1:]).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return ids
