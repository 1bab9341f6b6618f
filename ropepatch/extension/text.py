"""The tables and lines that `ropepatch plan` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from ropepatch.attention import Remapping
from ropepatch.columns import Table, columns
from ropepatch.errors import plain, printable
from ropepatch.extension.engines import Engine
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.scaling.bands import bands
from ropepatch.scaling.method import Method
from ropepatch.scaling.rope import Frequencies, Rope

ENDS = 1 << 20  # keys at each end of a band, among which are its extremes


def parameters_text(method: Method) -> str:
    """Return the parameters of a method that are set, each after a comma."""
    given = ((key, value) for key, value in method.parameters().items() if value is not None)
    return "".join(f", {key}={_short(value)}" for key, value in given)


def engines_table(engines: Iterable[Engine], remapping: Remapping | None, rope_type: str) -> Table:
    """Return the table of engine support."""
    kind = remapping.name if remapping else rope_type
    rows = ((f"  {engine.engine}", engine.reads, kind, engine.how or "", engine.note) for engine in engines)
    return columns(rows, whole=[0])


def bands_text(rope: Rope, frequencies: Frequencies, factor: float) -> tuple[Table, str]:
    """Return the table of frequency bands, and the line of the attention factor."""
    numbers = "wavelength (tokens)", f"rotations in {rope.original_max_position_embeddings}", "divided by"
    rows = (
        (
            f"{band.first}" if band.first == band.last else f"{band.first} to {band.last}",
            band.fate,
            *map(_span, (band.wavelength, band.rotations, band.divisor)),
        )
        for band in bands(rope, frequencies.inv_freq, factor)
    )
    before, a = rope.carried_attention_factor, frequencies.attention_factor
    factors = f"attention factor {before:.4f} -> {a:.4f} (logits x {a * a:.4f})"
    return columns(rows, ("pairs", "", *numbers), right=(2, 3, 4), whole=[0]), factors


def distances_text(remapping: Remapping, window: int, target: int) -> tuple[Table, str]:
    """Return the table of remapped distances, and the line of the length up to which they stay in range."""
    reach = remapping.reach(window)
    length = "at any length" if reach is None else f"up to {reach} tokens"
    line = f"remapped distances stay within the original context of {window} tokens, {length}"
    return _distance_table(remapping, target), line


def _distance_table(distances: Remapping, target: int) -> Table:
    """Return one row per band of a remapping, for the last token."""
    last, rows = torch.tensor([target - 1]), []
    for band in distances.bands():
        begin, end = int(band.begin(last).clamp(min=0)), int(band.end(last))
        if begin < end:
            stretches = (begin, min(begin + ENDS, end)), (max(begin, end - ENDS), end)
            keys = torch.cat([torch.arange(*stretch) for stretch in stretches])
            remapped = (band.query(last)[:, None] - band.key(keys)).double()
            between = _distances(target - end, target - 1 - begin)
            rows.append((between, _distances(float(remapped.min()), float(remapped.max()))))
    return columns(rows, ("distance to the key", "remapped to"), right=(0, 1), whole=[0])


def _distances(least: float, most: float) -> str:
    return plain(least) if least == most else f"{plain(least)} to {plain(most)}"


def _span(ends: tuple[float, float]) -> str:
    first, last = (f"{end:.4g}" if end < 1e5 else f"{end:.3g}" for end in ends)
    return first if first == last else f"{first} to {last}"


def changes_table(
    before: dict[str, Any], changes: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
) -> Table:
    """Return one row per changed value of config.json and per key of the old and new `rope_parameters`.

    The older keys repeat rope_parameters and are only named.
    """
    return columns(_changes(before, changes, old, new), whole=[0])


def _changes(
    before: dict[str, Any], changes: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
) -> Iterable[tuple[str, ...]]:
    for key in (key for key in changes if key not in LEGACY_KEYS and key != "rope_parameters"):
        after = "absent" if changes[key] is None else changes[key]
        yield f"  {key}", _short(before.get(key, "absent")), f"-> {_short(after)}"
    for key in [*new, *(key for key in old if key not in new)]:
        row = _short(old.get(key, "absent")), f"-> {_short(new.get(key, 'absent'))}"
        yield f"  rope_parameters.{printable(key)}", *(row if old.get(key) != new.get(key) else row[:1])
    if legacy := [key for key in changes if key in LEGACY_KEYS]:
        yield f"  {', '.join(legacy)}", "(same values)"


def _short(value: Any) -> str:
    """Return JSON with long lists of numbers shortened, and only the shape of nested lists."""
    lengths, inner = [], value
    while isinstance(inner, list | tuple) and inner:
        lengths.append(len(inner))
        inner = inner[0]
    if len(lengths) > 1:
        return f"({' x '.join(map(str, lengths))} numbers)"
    if isinstance(value, dict):
        return printable("{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}")
    if isinstance(value, list | tuple) and len(value) > 4 and all(isinstance(x, int | float) for x in value):
        return f"[{value[0]:.4g}, {value[1]:.4g}, ... {value[-1]:.4g}] ({len(value)} numbers)"
    if isinstance(value, float):
        return f"{value:.6g}" if value != int(value) else f"{value:.1f}"
    return printable(value if isinstance(value, str) else json.dumps(value))
