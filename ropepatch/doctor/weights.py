"""Check that the weight files are complete, belong to the model and contain finite numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ropepatch.doctor.findings import Finding, Rule
from ropepatch.errors import RopepatchError
from ropepatch.model.config import Config
from ropepatch.model.loading import check_weights
from ropepatch.model.weights import (
    COPY_BLOCK,
    INDEX,
    SINGLE,
    Progress,
    TensorEntry,
    Weights,
    read_headers,
    weight_sets,
)

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
UNREADABLE = Rule(
    "weights-unreadable",
    "error",
    "the checkpoint does not load, or loads with random tensors for the missing ones",
    "sgl-project/sglang/pull/32279",
)
MISFIT = Rule(
    "weights-misfit",
    "error",
    "the model loads with random tensors, or not at all",
    "unslothai/unsloth-zoo/pull/1073",
)
TWICE = Rule(
    "weights-twice",
    "warning",
    "other programs may load the other set, which may belong to another model",
    "Blaizzy/mlx-vlm/pull/1464",
)
NOT_FINITE = Rule(
    "weights-not-finite",
    "error",
    "the model returns NaN for any text",
    "liufanfanlff/C3-Context-Cascade-Compression/issues/4",
)


def look_at_weights(
    folder: Path, config: Config
) -> tuple[Weights | None, list[Finding]]:
    """Read the weight headers of a checkpoint, None if missing or damaged, and report their problems."""
    sets = weight_sets(folder)
    try:
        weights = read_headers(folder)
    except RopepatchError as error:
        return None, list(_unread(folder, sets, error))
    findings = [] if config.unloaded else list(_misfit(config, weights))
    if len(sets) == 2:
        problem = f"the folder has two sets of weights; transformers loads {sets[0]}, not {sets[1]}"
        remedy = f"keep one set: remove {INDEX} and its files, or {SINGLE}"
        findings.append(TWICE.found(Finding((), problem, remedy, INDEX)))
    return weights, findings


def _unread(folder: Path, sets: list[str], error: RopepatchError) -> Iterator[Finding]:
    """Report unreadable weights, by the first file of their set; a folder without weights is fine."""
    others = *folder.glob("model-*.safetensors"), *folder.glob("pytorch_model*")
    for file in [*sets, *(other.name for other in others)][:1]:
        yield UNREADABLE.found(Finding((), str(error)[:400], error.hint or "", file))


def _misfit(config: Config, weights: Weights) -> Iterator[Finding]:
    """Report weights that do not fit config.json; an invalid config.json is another finding."""
    try:
        model = config.skeleton
    except RopepatchError:
        return
    file = weights.files[0].name
    try:
        check_weights(weights, model)
    except RopepatchError as error:
        yield MISFIT.found(Finding((), str(error), error.hint or "", file))


def not_finite(weights: Weights, progress: Progress | None = None) -> Iterator[Finding]:
    """Report tensors with NaN or infinity; every number is read, in blocks."""
    bad, done = list[str](), 0
    total = sum(entry.num_bytes for entry in weights.tensors.values())
    for name, entry in sorted(weights.tensors.items()):
        if not _is_finite(entry):
            bad.append(name)
        done += entry.num_bytes
        if progress:
            progress(done, total)
    if bad:
        problem = f"NaN or infinity in {len(bad)} tensors, the first is {bad[0]}"
        remedy = "download the file again; if you trained this model, use an earlier checkpoint"
        file = weights.tensors[bad[0]].file
        yield NOT_FINITE.found(Finding((), problem, remedy, file.name))


def _is_finite(entry: TensorEntry) -> bool:
    """Check all numbers of a tensor, without mapping the file; integers are finite."""
    dtype = FLOATS.get(entry.dtype)
    if dtype is None:
        return True
    with entry.file.open("rb") as source:
        source.seek(entry.offset)
        for begin in range(0, entry.num_bytes, COPY_BLOCK):
            block = bytearray(source.read(min(COPY_BLOCK, entry.num_bytes - begin)))
            numbers = torch.frombuffer(block, dtype=dtype)
            if dtype.itemsize == 1:
                numbers = numbers.float()  # which has isfinite
            if not numbers.isfinite().all():
                return False
    return True
