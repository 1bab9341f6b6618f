"""The weight files, by their headers: whether they are whole, where the index says, and the model's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropepatch.doctor.case import Case, positive
from ropepatch.doctor.findings import Finding, Mend
from ropepatch.errors import RopepatchError
from ropepatch.extension.writing import check_weights
from ropepatch.files import read_json
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.survey import survey
from ropepatch.model.weights import INDEX, PICKLES, SINGLE, Weights, read_header, read_headers

SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
FREQUENCIES = "rotary_emb.inv_freq"  # the end of the names under which older checkpoints save them
HALF = {"BF16": "bfloat16", "F16": "float16"}
COPY_AGAIN = "copy the index and the files again"
FAR_OFF = 0.02  # relative; bfloat16 rounds by 0.004 at most
Headers = dict[str, dict[str, str]]  # of every file, the dtype of every tensor in it


def weight_findings(case: Case) -> list[Finding]:
    """What is wrong with the weights of a checkpoint; no finding where there are none."""
    headers, found = read_shards(case.folder)
    if (case.folder / INDEX).exists():
        found += _index(case.folder, headers, broken=bool(found))
    elif SINGLE not in headers and not found:
        found += _unnamed(case.folder, headers)
    if not any(finding.severity == "error" for finding in found):
        found += [*_misfit(case), *_saved_frequencies(case, headers)]
    return found


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
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != SINGLE and not SHARD.fullmatch(file.name):
            continue
        try:
            tensors = read_header(file).tensors
            headers[file.name] = {name: entry.dtype for name, entry in tensors.items()}
        except (SafetensorError, OSError) as error:
            found.append(
                Finding(
                    "weights-damaged",
                    "error",
                    f"{file.name} cannot be read: {error}",
                    "the checkpoint does not load",
                    "download the file again",
                    file=file.name,
                )
            )
    return headers, found


def _index(folder: Path, headers: Headers, *, broken: bool) -> Iterator[Finding]:
    try:
        places: Any = read_json(folder / INDEX).get("weight_map")
    except RopepatchError as error:
        places, problem = None, str(error)
    else:
        problem = "it has no weight_map of tensor names to file names"
    shards = {name: tensors for name, tensors in headers.items() if name != SINGLE}
    again = COPY_AGAIN if broken else _incomplete(shards)
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        yield _wrong_index(problem, remedy=again)
        return
    held = {tensor for tensors in shards.values() for tensor in tensors}
    missing = sorted({*places.values()} - headers.keys())
    for name in missing:
        if not (folder / name).exists():
            yield Finding(
                "shard-missing",
                "error",
                f"{INDEX} names {name}, which is not there",
                "the checkpoint does not load, or its tensors are made up at random",
                "download the checkpoint again; every shard is needed",
                file=INDEX,
                key="weight_map",
            )
    misplaced = sorted(
        tensor for tensor, place in places.items() if place in headers and tensor not in headers[place]
    )
    unlisted = sorted(held - places.keys())
    remedy = again if not missing and places.keys() <= held else again or COPY_AGAIN
    if misplaced:
        place = places[misplaced[0]]
        yield _wrong_index(f"{misplaced[0]} is not in {place}", len(misplaced), remedy=remedy)
    elif unlisted:
        yield _wrong_index(
            f"{unlisted[0]} is in the files and not in the index", len(unlisted), remedy=remedy
        )


def _incomplete(shards: Headers) -> str:
    """What to do before an index can be made of these files; empty if they are those of one whole save."""
    numbers = [match.groups() for name in shards if (match := SHARD.fullmatch(name))]
    counts = sorted({count for _, count in numbers})
    if len(counts) > 1:
        saves = " and ".join(f"-of-{count}" for count in counts)
        return f"files of several saves lie here ({saves}): keep those of one, with its index"
    expected = int(counts[0]) if counts else 0
    if len(numbers) != expected or {int(number) for number, _ in numbers} != {*range(1, expected + 1)}:
        return f"{COPY_AGAIN}: {len(numbers)} of {expected} files are here" if counts else COPY_AGAIN
    placed = Counter(tensor for tensors in shards.values() for tensor in tensors)
    twice = sorted(tensor for tensor, count in placed.items() if count > 1)
    return f"{COPY_AGAIN}: {twice[0]} is in two of the files" if twice else ""


def _wrong_index(problem: str, count: int = 1, *, remedy: str) -> Finding:
    """A fault of the index, with what to do; without a remedy the index is made anew from the files."""
    others = f", and {count - 1} more tensors are wrong" if count > 1 else ""
    return Finding(
        "index-wrong",
        "error",
        problem + others,
        "tensors that are not found are made up at random, with no more than a warning",
        remedy or "make the index anew from the files",
        file=INDEX,
        key="weight_map",
        mend=None if remedy else Mend(reindex=True),
    )


def _unnamed(folder: Path, headers: Headers) -> Iterator[Finding]:
    """Weights in a form that is not read."""
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
    weights = readable(case)
    if weights is None or "quantization_config" in case.raw:
        return
    try:
        model = blueprint(load_config(case.raw))
    except RopepatchError:
        return  # a configuration that cannot be built is another finding
    try:
        check_weights(weights, model)
    except RopepatchError as error:
        yield Finding(
            "weights-misfit",
            "error",
            str(error),
            "the model loads with random tensors in their place, or not at all",
            error.hint or "",
            file=weights.files[0].name,
        )


def _saved_frequencies(case: Case, headers: Headers) -> Iterator[Finding]:
    places = {
        tensor: (name, dtype)
        for name, tensors in headers.items()
        for tensor, dtype in tensors.items()
        if tensor.endswith(FREQUENCIES)
    }
    if not places:
        return
    first = min(places)
    name, dtype = places[first]
    with safe_open(case.folder / name, framework="pt") as tensors:
        saved = tensors.get_tensor(first).double().flatten()
    try:
        rope = survey(case.raw).rope
        exact = rope.inv_freq().double()
    except RopepatchError:
        exact = None
    off = 0.0
    if exact is not None and exact.shape == saved.shape:
        off, saved = min(
            ((_distance(one, exact), one) for one in _meanings(case, saved)), key=lambda pair: pair[0]
        )
    elif exact is not None:
        off = float("inf")
    if not off <= FAR_OFF:
        yield Finding(
            "frequencies-contradict",
            "error",
            f"{first} holds other frequencies than config.json describes (off by {off:.1%})",
            "transformers recomputes them from config.json; the model may have been trained with these",
            "find out which were trained, and mend config.json if it was the saved ones",
            file=name,
            key=first,
            value=dtype,
        )
    elif dtype in HALF:
        reach = case.reach() or 0
        radians = 0.0 if exact is None else (saved - exact).abs().max().item() * reach
        yield Finding(
            "frequencies-rounded",
            "warning",
            f"{len(places)} tensors like {first} hold the frequencies in {HALF[dtype]}",
            f"what loads them, as transformers does not, is off by {radians:.2g} radians at "
            f"position {reach:g}",
            "leave them out: every reader can compute them",
            file=name,
            key=first,
            value=dtype,
            mend=Mend(without=frozenset(places)),
        )


def _meanings(case: Case, saved: Tensor) -> Iterator[Tensor]:
    """Saved frequencies as they are, and as transformers 4.31 meant them: linear, it divided positions."""
    yield saved
    yield from (
        saved / factor
        for block in case.blocks
        if block.kind == "linear" and (factor := positive(block.values.get("factor")))
    )


def _distance(saved: Tensor, exact: Tensor) -> float:
    """The largest relative difference."""
    return ((saved - exact).abs() / exact.clamp(min=torch.finfo(torch.float64).tiny)).max().item()
