"""Check that the weight files are complete, belong to the model and contain finite numbers."""

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
from ropepatch.model.config import blueprint, stated_class
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
END_NUMBERS = 1 << 17  # numbers checked at either end of a tensor, at most
MAX_NUMBERS = 1 << 27  # numbers checked in all tensors; a mixture of experts may have 50,000 tensors


def look_at_weights(case: Case) -> tuple[Weights | None, list[Finding]]:
    """Read the weight headers of a checkpoint, None if missing or damaged, and report their problems."""
    sets = weight_sets(case.folder)
    try:
        weights = read_headers(case.folder, case.raw)
    except RopepatchError as error:
        return None, [*_unread(case, [*sets, ""][0], error)]
    findings = [*_misfit(case, weights), *_misread(case, weights)]
    if len(sets) == 2:
        problem = f"the folder has two sets of weights; transformers loads {sets[0]}, not {sets[1]}"
        remedy = f"keep one set: remove {INDEX} and its files, or {SINGLE}"
        findings.append(Key(INDEX, ()).finding("weights-twice", problem, remedy))
    return weights, findings


def _unread(case: Case, first: str, error: RopepatchError) -> Iterator[Finding]:
    """Report unreadable weights, by the first file of their set; a folder without weights is fine."""
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
        yield Key(INDEX, ()).finding("index-wrong", f"{shards[0]} without {INDEX}", f"copy {INDEX} as well")
    elif pickles:
        yield Key(pickles[0], ()).finding("weights-pickled", problem, remedy)


def not_finite(weights: Weights) -> Iterator[Finding]:
    """Report tensors with NaN or infinity among the first and last `END_NUMBERS`, or fewer, of each."""
    most = max(1, min(END_NUMBERS, MAX_NUMBERS // max(1, len(weights.tensors))))
    bad = [name for name, entry in sorted(weights.tensors.items()) if not _is_finite(entry, most)]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        yield Key(weights.tensors[bad[0]].file.name, ()).finding(
            "weights-not-finite",
            f"{bad[0]} contains NaN or infinity{more}",
            "download the file again; if you trained this model, use an earlier checkpoint",
        )


def _is_finite(entry: TensorEntry, most: int) -> bool:
    """Check up to ``most`` numbers at both ends, without mapping the file; integers are finite."""
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
    """Report weights that do not fit config.json; an invalid config.json is another finding."""
    source = Checkpoint(case.folder, stated_raw=case.raw)
    try:
        kind = stated_class(source.whole_config)
        model = blueprint(source.whole_config, kind) if kind else source.skeleton
    except RopepatchError:
        return
    key = Key(weights.files[0].name, ())
    try:
        unused = check_weights(weights, model)
    except RopepatchError as error:
        yield key.finding("weights-misfit", str(error), error.hint or "")
        return
    if unused:
        more = f" and {len(unused) - 1} more tensors" if len(unused) > 1 else ""
        problem = f"the model that config.json describes has no {unused[0]}{more}"
        yield key.finding("weights-unused", problem, "none if another program needs them; else remove them")


def _misread(case: Case, weights: Weights) -> Iterator[Finding]:
    """Report a fingerprint of other weights, or a damaged one."""
    if not readings.exists(case.folder):
        return
    key = Key(readings.FILE, ())
    try:
        reading = readings.read(case.folder)
    except RopepatchError as error:
        yield key.finding("file-unreadable", str(error), error.hint or "", severity="warning")
        return
    if reading.weights != fingerprint(weights):
        problem = "it belongs to other weights"
        yield key.finding("reading-of-other-weights", problem, readings.HINT)
