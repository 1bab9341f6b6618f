"""The weight files: whether they are whole, the model's own and finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ropepatch.errors import RopepatchError
from ropepatch.extension.writing import check_weights
from ropepatch.model import reading_file as readings
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import CONFIG, Finding, Key
from ropepatch.model.weights import (
    INDEX,
    NAMED,
    PICKLES,
    SINGLE,
    TensorEntry,
    Weights,
    fingerprint,
    read_headers,
    weight_sets,
)

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
END_NUMBERS = 1 << 17  # numbers at most, of either end of a tensor
MAX_NUMBERS = 1 << 27  # of all tensors, of which a mixture of experts may have 50,000


def look_at_weights(case: Case) -> tuple[Weights | None, list[Finding]]:
    """The weights of a checkpoint, None where they are missing or damaged, and what their headers say."""
    sets = weight_sets(case.folder)
    try:
        weights = read_headers(case.folder, case.raw)
    except RopepatchError as error:
        return None, [*_unread(case, [*sets, ""][0], error)]
    findings = [*_misfit(case, weights), *_misread(case, weights)]
    if len(sets) == 2:
        problem = f"transformers loads {sets[0]} and not the files of {sets[1]}, which are here too"
        remedy = f"keep one set: remove {INDEX} and its files, or {SINGLE}"
        findings.append(Key(INDEX, ()).finding("weights-twice", problem, remedy))
    return weights, findings


def _unread(case: Case, first: str, error: RopepatchError) -> Iterator[Finding]:
    """Weights that cannot be read, by the first file of their set; none are no fault."""
    shards = sorted(file.name for file in case.folder.glob("model-*.safetensors"))
    pickles = [name for name in PICKLES if (case.folder / name).exists()]
    problem, remedy = str(error)[:400], error.hint or ""
    if NAMED in problem:
        yield Key(CONFIG, (NAMED,), case.raw.get(NAMED)).finding("weights-named", problem, remedy)
    elif first == INDEX and " is missing from " in problem:
        yield Key(INDEX, ()).finding("shard-missing", problem, remedy)
    elif first == INDEX and INDEX in problem:
        yield Key(INDEX, ()).finding("index-wrong", problem, remedy)
    elif first:
        yield Key(first, ()).finding("weights-damaged", problem, remedy)
    elif shards:
        yield Key(INDEX, ()).finding("index-wrong", f"{shards[0]} without {INDEX}", "copy it too")
    elif pickles:
        yield Key(pickles[0], ()).finding("weights-pickled", problem, remedy)


def not_finite(weights: Weights) -> Iterator[Finding]:
    """Tensors with a NaN or an infinity, by the first and the last `END_NUMBERS` of each, or fewer."""
    most = max(1, min(END_NUMBERS, MAX_NUMBERS // max(1, len(weights.tensors))))
    bad = [name for name, entry in sorted(weights.tensors.items()) if not _is_finite(entry, most)]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        yield Key(weights.tensors[bad[0]].file.name, ()).finding(
            "weights-not-finite",
            f"{bad[0]} holds a NaN or an infinity{more}",
            "download the file again; of a model that was trained here take an earlier checkpoint",
        )


def _is_finite(entry: TensorEntry, most: int) -> bool:
    """By so many numbers at both ends, read without mapping the file; what is no float is finite."""
    dtype, count = FLOATS.get(entry.dtype), math.prod(entry.shape)
    if dtype is None or not count:
        return True
    number = min(count, most)
    with entry.file.open("rb") as source:
        for first in {0, count - number}:
            source.seek(entry.offset + first * dtype.itemsize)
            numbers = torch.frombuffer(bytearray(source.read(number * dtype.itemsize)), dtype=dtype)
            if not numbers.isfinite().all():
                return False
    return True


def _misfit(case: Case, weights: Weights) -> Iterator[Finding]:
    """Weights of another model; a configuration that cannot be built is another finding."""
    try:
        model = Checkpoint(case.folder, stated_raw=case.raw).skeleton
    except RopepatchError:
        return
    key = Key(weights.files[0].name, ())
    try:
        unused = check_weights(weights, model)
    except RopepatchError as error:
        yield key.finding("weights-misfit", str(error), error.hint or "")
        return
    if unused:
        problem = f"config.json describes no {unused[0]}, nor {len(unused) - 1} more"
        yield key.finding(
            "weights-unused", problem, "none, if another program needs them; else take them out"
        )


def _misread(case: Case, weights: Weights) -> Iterator[Finding]:
    """A reading that is not of these weights, or damaged."""
    if not readings.exists(case.folder):
        return
    key = Key(readings.FILE, ())
    try:
        reading = readings.read(case.folder)
    except RopepatchError as error:
        yield key.finding("file-unreadable", str(error), error.hint or "", severity="warning")
        return
    if reading.weights != fingerprint(weights):
        problem = "it was read from other weights than these"
        yield key.finding("reading-of-other-weights", problem, readings.HINT)
