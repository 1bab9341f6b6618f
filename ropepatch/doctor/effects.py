"""What a fault does to the model itself: two ropes, the same weights, the same text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
AROUND = 32  # tokens on either side of the length at which frequencies switch
EQUAL = 1e-6  # nats per token, below which two predictions count as equal
SWITCHING = "switches-against-cache"


@dataclass(frozen=True)
class Probe:
    """A loaded model whose rotary module is exchanged."""

    model: PreTrainedModel
    site: RotarySite

    def rotary(self, raw: dict[str, Any]) -> nn.Module:
        """The stock rotary module of a configuration."""
        config = load_text_config(raw)
        with stock_code(f"compute the rope of {config.model_type}"), float32_on_cpu():
            module: nn.Module = self.site.rotary_class(config)
        return module

    @contextmanager
    def under(self, rotary: nn.Module) -> Iterator[Any]:
        """The model while it rotates by another module."""
        exchanged = rotating_by(self.model, self.site.path, rotary)
        with exchanged, stock_code("run the model"), torch.inference_mode():
            yield self.model


def with_effects(
    case: Case, findings: Iterable[Finding], weights: Weights | None, loadable: Case
) -> list[Finding]:
    """The findings; those that concern the rope with the effect that was measured, or why it was not.

    `loadable` is the checkpoint after all repairs: its configuration loads if any does.
    """
    results = []
    probe: Probe | str = ""
    for finding in findings:
        if touches_rope(finding):
            probe = probe or _probe(loadable.raw, weights, quantised="quantization_config" in case.raw)
            effect = f"not measured: {probe}" if isinstance(probe, str) else _effect(case, finding, probe)
            finding = replace(finding, effect=effect)
        results.append(finding)
    return results


def touches_rope(finding: Finding) -> bool:
    """Whether a finding concerns the computation of the rope, and somebody can tell what is meant."""
    meant = finding.meant
    return finding.code == SWITCHING or (meant is not None and all(edit.file == CONFIG for edit in meant))


def _probe(raw: dict[str, Any], weights: Weights | None, *, quantised: bool) -> Probe | str:
    """The model, or why it is not loaded."""
    if weights is None:
        return "no weights here that can be loaded"
    if quantised:
        return "quantised weights"
    if 2 * weights.num_bytes > available_bytes():
        return "the weights do not fit into memory"
    try:
        with TemporaryDirectory() as scratch:
            for file in weights.files:
                (Path(scratch) / file.name).symlink_to(file.resolve())
            write_json(Path(scratch) / CONFIG, raw)
            model = load_model(Checkpoint(Path(scratch)))
        return Probe(model, find_rotary(model))
    except RopepatchError as error:
        return str(error)


def _effect(case: Case, finding: Finding, probe: Probe) -> str:
    try:
        if finding.code == SWITCHING:
            return _switching(case, probe)
        intended = case.with_edits(finding.meant or ())
        meant = probe.rotary(intended.raw)
    except RopepatchError as error:
        return f"not measured: {error}"
    try:
        read = probe.rotary(case.with_edits(finding.read).raw)
        with stock_code("run the model"):
            return _divergences(intended, probe, meant, read)
    except RopepatchError as error:
        return f"measured: {error}"


def _divergences(case: Case, probe: Probe, meant: nn.Module, read: nn.Module) -> str:
    """How far the predictions move, in words."""
    reach = int(case.reach() or TOKENS)
    originals = [int(original) for rope in case.ropes if (original := case.original(rope))]
    window = min([*originals, reach])
    with probe.under(meant) as model:
        ids = _written(model, min(TOKENS, reach))
    length = ids.shape[1]
    near = min(length, window)
    within = _divergence(probe, meant, read, ids[:, :near], torch.arange(near))
    parts = [f"{within:.3g} nats per token (mean KL) within {window} positions"]
    beyond = 0.0
    if reach > window and length > 1:
        # The second half at the far end: its tokens attend to each other and across the whole window.
        half = length // 2
        positions = torch.cat([torch.arange(half), torch.arange(reach - length + half, reach)])
        beyond = _divergence(probe, meant, read, ids, positions, skip=half)
        parts.append(f"{beyond:.3g} across {reach}")
    if max(within, beyond) < EQUAL:
        return f"measured: none, equal predictions for {length} tokens that the model writes itself"
    return f"measured on {length} tokens that the model writes itself: predictions move by {', '.join(parts)}"


def _divergence(
    probe: Probe, meant: nn.Module, read: nn.Module, ids: Tensor, positions: Tensor, skip: int = 0
) -> float:
    """Mean KL in nats per token of the predictions under one rope from those under another."""
    with probe.under(meant) as model:
        expected = _logits(model, ids, positions).log_softmax(-1)[skip:]
    with probe.under(read) as model:
        got = _logits(model, ids, positions).log_softmax(-1)[skip:]
    return (expected.exp() * (expected - got)).sum(-1).mean().item()


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """[T, V] float32; the mask is explicit because jumps would be taken for packed documents."""
    mask = torch.ones_like(ids)
    out = model(ids, position_ids=positions[None], attention_mask=mask, use_cache=False)
    logits: Tensor = out.logits[0].float()
    return logits


def _written(model: Any, length: int) -> Tensor:
    """Tokens that the model samples itself, from its own first token on: [1, length]."""
    generator = torch.Generator().manual_seed(0)
    config = text_config(model.config)
    start = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    ids, read = torch.tensor([[start % config.vocab_size]]), reading_on(model)
    while ids.shape[1] < length:
        following = torch.multinomial(
            read(ids[:, -1:]).logits[:, -1].float().softmax(-1), 1, generator=generator
        )
        ids = torch.cat([ids, following], dim=1)
    return ids


def _switching(case: Case, probe: Probe) -> str:
    """The full-against-incremental test: the same tokens across the switch, at once and one by one."""
    rope = next(rope for rope in case.ropes if rope.kind in ("dynamic", "longrope"))
    switch = int(case.original(rope) or case.window or 0)
    if switch < 2 * AROUND:
        return f"not measured: a window of {switch} tokens is too short"
    vocabulary = text_config(probe.model.config).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, 2 * AROUND), generator=generator)
    across, before = (
        _cached_against_full(case, probe, ids, torch.arange(2 * AROUND) + start)
        for start in (switch - AROUND, switch - 2 * AROUND)
    )
    return (
        f"measured on {2 * AROUND} random tokens, {AROUND} before and {AROUND} after position {switch}: "
        f"read at once and one by one with the cache, logits differ by up to {across:.2g} "
        f"({before:.1g} where all lie before it)"
    )


def _cached_against_full(case: Case, probe: Probe, ids: Tensor, positions: Tensor) -> float:
    """The largest difference of a logit between one pass, and half of it and then token by token."""
    half, logits = ids.shape[1] // 2, []
    with probe.under(probe.rotary(case.raw)) as model:
        read = reading_on(model)
        for step in (slice(0, half), *(slice(i, i + 1) for i in range(half, ids.shape[1]))):
            mask, where = torch.ones(1, step.stop, dtype=torch.long), positions[None, step]
            out = read(ids[:, step], position_ids=where, attention_mask=mask)
            logits.append(out.logits[0].float())
    with probe.under(probe.rotary(case.raw)) as model:
        full = _logits(model, ids, positions)
    return (torch.cat(logits) - full)[half:].abs().max().item()
