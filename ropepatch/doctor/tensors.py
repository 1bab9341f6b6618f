"""The weight files, by their headers: whether they are whole, where the index says, and the model's own."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.extension.writing import check_weights
from ropepatch.files import read_json
from ropepatch.model.checks.case import Case, positive
from ropepatch.model.checks.findings import CONFIG, Finding, Key, Mend, shown
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.survey import survey
from ropepatch.model.weights import (
    INDEX,
    NAMED,
    PICKLES,
    SINGLE,
    TensorEntry,
    Weights,
    read_header,
    read_headers,
    weight_sets,
)

SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
FREQUENCIES = "rotary_emb.inv_freq"  # the end of the names under which older checkpoints save them
HALF = {"BF16": "bfloat16", "F16": "float16"}
WEIGHT_MAP = Key(INDEX, ("weight_map",))
COPY_AGAIN = "copy the index and the files again"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAMPLE = 1 << 17  # numbers at most, of either end of a tensor
SAMPLES = 1 << 27  # of all tensors, of which a mixture of experts may have 50,000
FAR_OFF = 0.02  # relative; bfloat16 rounds by 0.004 at most
Headers = dict[str, dict[str, str]]  # of every file, the dtype of every tensor in it


def weight_findings(case: Case) -> list[Finding]:
    """What is wrong with the weights of a checkpoint; no finding where there are none."""
    headers, findings = read_shards(case.folder)
    sets = weight_sets(case.folder)
    findings += _not_loaded(case, sets)
    if sets == [INDEX]:
        findings += _index(case.folder, headers, broken=bool(findings))
    elif not sets and not findings:
        findings += _without_index(case.folder, headers)
    elif SINGLE in headers:
        headers = {SINGLE: headers[SINGLE]}
    if not any(finding.severity == "error" for finding in findings):
        findings += [*_misfit(case), *_saved_frequencies(case, headers)]
    return findings


def not_finite(weights: Weights) -> Iterator[Finding]:
    """Tensors with a NaN or an infinity, by the first and the last `SAMPLE` numbers of each, or fewer."""
    most = max(1, min(SAMPLE, SAMPLES // max(1, len(weights.tensors))))
    bad = [name for name, entry in sorted(weights.tensors.items()) if not _is_finite(entry, most)]
    if bad:
        yield Finding(
            "weights-not-finite",
            "error",
            f"{bad[0]} holds a NaN or an infinity{_and_more(bad)}",
            "whatever the model reads, it answers NaN",
            "download the file again; of a model that was trained here an earlier state is whole, perhaps",
            file=weights.tensors[bad[0]].file.name,
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


def readable(case: Case) -> Weights | None:
    """The weights of a checkpoint, None where they are missing or damaged."""
    try:
        return read_headers(case.folder)
    except RopepatchError:
        return None


def read_shards(folder: Path) -> tuple[Headers, list[Finding]]:
    """The headers of the weight files, and what is wrong with those that are none.

    Links are followed wherever they lead, as `extend` does: weights often lie on another disk, and a file
    that is not safetensors is not read.
    """
    headers: Headers = {}
    findings = []
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != SINGLE and not SHARD.fullmatch(file.name):
            continue
        try:
            tensors = read_header(file).tensors
            headers[file.name] = {name: entry.dtype for name, entry in tensors.items()}
        except RopepatchError as error:
            why, remedy = "the checkpoint does not load", "download the file again"
            findings.append(Finding("weights-damaged", "error", str(error), why, remedy, file=file.name))
    return headers, findings


def _not_loaded(case: Case, sets: list[str]) -> Iterator[Finding]:
    """Weights that stock transformers does not load, beside those that it does."""
    named = case.raw.get(NAMED)
    if named not in (None, *sets[:1]):
        yield Key(CONFIG, (NAMED,), named).error(
            "weights-named",
            f"it names {shown(named)} as the weights, not {[*sets, SINGLE][0]}",
            "transformers loads what it names, other programs do not; ropepatch refuses it",
            f"load it with transformers and save_pretrained it, which leaves {NAMED} out",
        )
    elif len(sets) == 2:
        yield Finding(
            "weights-twice",
            "warning",
            f"transformers loads {SINGLE} and not the files of {INDEX}, which are here too",
            "other programs may load them, and they may be another model's",
            f"keep one set: remove {INDEX} and its files, or {SINGLE}",
            file=INDEX,
        )


def _index(folder: Path, headers: Headers, *, broken: bool) -> Iterator[Finding]:
    """What is wrong with the index, and with what it names; of broken files no index can be made."""
    problem = "it has no weight_map of tensor names to file names"
    try:
        places: Any = read_json(folder / INDEX).get("weight_map")
    except RopepatchError as error:
        places, problem = None, str(error)
    shards = {name: tensors for name, tensors in headers.items() if name != SINGLE}
    again = COPY_AGAIN if broken else _incomplete(shards)
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        yield _wrong_index(problem, remedy=again)
        return
    missing = sorted({*places.values()} - headers.keys())
    outside = [name for name in missing if Path(name).name != name]
    if outside:
        yield _wrong_index(
            f"it names {shown(outside[0])}, which is not a file beside it{_and_more(outside)}",
            remedy=COPY_AGAIN,
        )
    if absent := [name for name in missing if name not in outside and not is_there(folder / name)]:
        yield WEIGHT_MAP.error(
            "shard-missing",
            f"{INDEX} names {shown(absent[0])}, which is not there{_and_more(absent)}",
            "the checkpoint does not load, or its tensors are made up at random",
            "download the checkpoint again; every shard is needed",
        )
    tensors = {tensor for tensors in shards.values() for tensor in tensors}
    misplaced = sorted(name for name, file in places.items() if file in headers and name not in headers[file])
    unlisted = sorted(tensors - places.keys())
    remedy = again if not missing and places.keys() <= tensors else again or COPY_AGAIN
    if misplaced:
        problem = f"{misplaced[0]} is not in {places[misplaced[0]]}"
        yield _wrong_index(problem, len(misplaced), remedy=remedy)
    elif unlisted:
        problem = f"{unlisted[0]} is in the files and not in the index"
        yield _wrong_index(problem, len(unlisted), remedy=remedy)


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def is_there(file: Path) -> bool:
    """Whether a file exists; one whose name no disk can hold does not."""
    try:
        return file.exists()
    except (OSError, ValueError):
        return False


def _incomplete(shards: Headers) -> str:
    """What to do before an index can be made of these files; empty if they are those of one whole save."""
    numbers = [match.groups() for name in shards if (match := SHARD.fullmatch(name))]
    counts = sorted({count for _, count in numbers})
    if len(counts) > 1:
        saves = " and ".join(f"-of-{count}" for count in counts)
        return f"files of several saves lie here ({saves}): keep those of one, with its index"
    if not counts:
        return COPY_AGAIN
    expected = int(counts[0])
    if sorted(int(number) for number, _ in numbers) != [*range(1, expected + 1)]:
        return f"{COPY_AGAIN}: {len(numbers)} of {expected} files are here"
    copies = Counter(tensor for tensors in shards.values() for tensor in tensors)
    twice = sorted(tensor for tensor, count in copies.items() if count > 1)
    return f"{COPY_AGAIN}: {twice[0]} is in two of the files" if twice else ""


def _wrong_index(problem: str, count: int = 1, *, remedy: str) -> Finding:
    """A fault of the index, with what to do; without a remedy the index is made anew from the files."""
    others = f", and {count - 1} more tensors are wrong" if count > 1 else ""
    finding = WEIGHT_MAP.error(
        "index-wrong",
        problem + others,
        "tensors that are not found are made up at random, with no more than a warning",
        remedy or "make the index anew from the files",
    )
    return finding if remedy else replace(finding, mend=Mend(reindex=True))


def _without_index(folder: Path, headers: Headers) -> Iterator[Finding]:
    """Shards that nothing lists, or weights in a form that is not read."""
    pickles = [name for name in PICKLES if (folder / name).exists()]
    if headers:
        yield _wrong_index(f"{len(headers)} shards, and no {INDEX}", remedy=_incomplete(headers))
    elif pickles:
        yield Finding(
            "weights-pickled",
            "error",
            f"the weights are a pickle ({pickles[0]})",
            "a pickle can run code when it is loaded; ropepatch and careful servers refuse it",
            "where you trust it, load it with transformers and save_pretrained it: that writes safetensors",
            file=pickles[0],
        )


def _misfit(case: Case) -> Iterator[Finding]:
    """Weights of another model; a configuration that cannot be built is another finding."""
    weights = readable(case)
    if weights is None or "quantization_config" in case.raw:
        return
    try:
        model = blueprint(load_config(case.raw))
    except RopepatchError:
        return
    try:
        check_weights(weights, model)
    except RopepatchError as error:
        why = "the model loads with random tensors in their place, or not at all"
        file = weights.files[0].name
        yield Finding("weights-misfit", "error", str(error), why, error.hint or "", file=file)


def _saved_frequencies(case: Case, headers: Headers) -> Iterator[Finding]:
    """Frequencies among the weights that are others than those of config.json, or rounded."""
    places = {
        tensor: (file, dtype)
        for file, tensors in headers.items()
        for tensor, dtype in tensors.items()
        if tensor.endswith(FREQUENCIES)
    }
    if not places:
        return
    first = min(places)
    file, dtype = places[first]
    key = Key(file, (first,))
    with safe_open(case.folder / file, framework="pt") as tensors:
        saved = tensors.get_tensor(first).double().flatten()
    try:
        exact = survey(case.raw).rope.inv_freq().double()
    except RopepatchError:
        exact = None
    off, radians, reach = 0.0, 0.0, case.reach() or 0
    if exact is not None and exact.shape != saved.shape:
        off = math.inf
    elif exact is not None:
        saved = min(_meanings(case, saved), key=partial(_distance, exact))
        off, radians = _distance(exact, saved), (saved - exact).abs().max().item() * reach
    if not off <= FAR_OFF:
        yield key.error(
            "frequencies-contradict",
            f"{first} holds other frequencies than config.json describes (off by {off:.1%})",
            "transformers recomputes them from config.json; the model may have been trained with these",
            "find out which were trained, and mend config.json if it was the saved ones",
            value=dtype,
        )
    elif dtype in HALF:
        finding = key.warning(
            "frequencies-rounded",
            f"{len(places)} tensors like {first} hold the frequencies in {HALF[dtype]}",
            f"what loads them, as transformers does not, is off by {radians:.2g} radians at "
            f"position {reach:g}",
            "leave them out: every reader can compute them",
            value=dtype,
        )
        yield replace(finding, mend=Mend(without=frozenset(places)))


def _meanings(case: Case, saved: Tensor) -> list[Tensor]:
    """Saved frequencies as they are, and as transformers 4.31 meant them: linear, it divided positions."""
    factors = [positive(block.values.get("factor")) for block in case.blocks if block.kind == "linear"]
    return [saved, *(saved / factor for factor in factors if factor)]


def _distance(exact: Tensor, saved: Tensor) -> float:
    """The largest relative difference."""
    return ((saved - exact).abs() / exact.clamp(min=torch.finfo(torch.float64).tiny)).max().item()
