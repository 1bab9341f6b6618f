"""The tables and lines that `ropepatch plan` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import singledispatch
from typing import Any

import torch

from ropepatch.attention import Remapping
from ropepatch.columns import Table, as_text, columns
from ropepatch.errors import plain, printable
from ropepatch.extension.changes import Planned
from ropepatch.extension.engines import Engine
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.scaling import Scaling
from ropepatch.scaling.rope import Method, bands

WIDTH = 80  # columns of a printed plan
ENDS = 1 << 20  # keys at each end of a band, among which are its extremes


def plan_text(plan: Planned, engines: Iterable[Engine], warnings: Iterable[str]) -> str:
    """Return what `ropepatch plan` prints."""
    config, method = plan.source.config, plan.method
    at = f" at {plan.source.revision}" if plan.source.revision else ""
    name = f"{printable(plan.source.name)}{at} ({printable(config.model_type)})"
    lines: list[str | Table] = [
        f"{name}: {config.reach} -> {plan.target} tokens",
        f"{method.name} ({method.paper}): factor={plan.factor:g}{parameters_text(method)}",
    ]
    if config.original_window:
        lines.append(
            f"original length {config.window}; {config.file_name} states {config.stated_length}"
        )
    if config.layer_type:
        lines.append(f"scales RoPE in the {config.layer_type} layers only")
    lines += ["", *effect_text(method, plan)]
    lines += ["", config.file_name, changes_table(plan)]
    lines.append("engine support, rope_type, evidence")
    lines.append(engines_table(plan, engines))
    lines += [f"warning: {printable(warning)}" for warning in warnings]
    return as_text(lines, WIDTH)


@singledispatch
def effect_text(method: Method, plan: Planned) -> tuple[Table, str]:
    """Return a table of what a method does to the positions, and a line about it."""
    raise TypeError(f"{method!r} is neither a scaling nor a position remapping")


def parameters_text(method: Method) -> str:
    """Return the parameters of a method that are set, each after a comma."""
    given = (
        (key, value) for key, value in method.parameters().items() if value is not None
    )
    return printable("".join(f", {key}={_short(value)}" for key, value in given))


def engines_table(plan: Planned, engines: Iterable[Engine]) -> Table:
    """Return the table of engine support."""
    kind = plan.method.stated_as(plan.rope_parameters.get("rope_type", "GGUF"))
    rows = (
        (f"  {engine.engine}", engine.reads, kind, engine.how or "", engine.note)
        for engine in engines
    )
    return columns(rows, whole=[0])


@effect_text.register(Scaling)
def _bands(method: Scaling, plan: Planned) -> tuple[Table, str]:
    """Return the table of frequency bands, and the line of the attention factor."""
    rope, frequencies = plan.source.config.rope, plan.frequencies()
    numbers = (
        "wavelength (tokens)",
        f"rotations in {rope.original_max_position_embeddings}",
        "divided by",
    )
    rows = (
        (
            f"{band.first}"
            if band.first == band.last
            else f"{band.first} to {band.last}",
            band.fate,
            *map(_span, (band.wavelength, band.rotations, band.divisor)),
        )
        for band in bands(rope, frequencies.inv_freq, plan.factor)
    )
    before, a = rope.carried_attention_factor, frequencies.attention_factor
    factors = f"attention factor {before:.4f} -> {a:.4f} (logits x {a * a:.4f})"
    return columns(rows, ("pairs", "", *numbers), right=(2, 3, 4), whole=[0]), factors


@effect_text.register(Remapping)
def _distances_by_band(remapping: Remapping, plan: Planned) -> tuple[Table, str]:
    """Return the table of remapped distances, and the line of the length up to which they stay in range."""
    window = plan.source.config.window
    reach = remapping.reach(window)
    length = "at any length" if reach is None else f"up to {reach} tokens"
    line = f"remapped distances stay within the original context of {window} tokens, {length}"
    return _distance_table(remapping, plan.target), line


def _distance_table(distances: Remapping, target: int) -> Table:
    """Return one row per band of a remapping, for the last token."""
    last, rows = torch.tensor([target - 1], device="cpu"), []
    for band in distances.bands():
        begin, end = int(band.begin(last).clamp(min=0)), int(band.end(last))
        if begin < end:
            stretches = (begin, min(begin + ENDS, end)), (max(begin, end - ENDS), end)
            keys = torch.cat(
                [torch.arange(*stretch, device="cpu") for stretch in stretches]
            )
            remapped = (band.query(last)[:, None] - band.key(keys)).double()
            between = _distances(target - end, target - 1 - begin)
            rows.append(
                (between, _distances(float(remapped.min()), float(remapped.max())))
            )
    return columns(
        rows, ("distance to the key", "remapped to"), right=(0, 1), whole=[0]
    )


def _distances(least: float, most: float) -> str:
    return plain(least) if least == most else f"{plain(least)} to {plain(most)}"


def _span(ends: tuple[float, float]) -> str:
    first, last = (f"{end:.4g}" if end < 1e5 else f"{end:.3g}" for end in ends)
    return first if first == last else f"{first} to {last}"


def changes_table(plan: Planned) -> Table:
    """Return one row per changed value of config.json and per key of the old and new `rope_parameters`.

    The older keys repeat rope_parameters and are only named.
    """
    before, new = plan.before, plan.rope_parameters
    old = plan.config.rope_parameters if new else {}
    rows: list[tuple[str, ...]] = []
    for key, value in plan.changes.items():
        if key not in LEGACY_KEYS and key != "rope_parameters":
            after = "absent" if value is None else _short(value)
            rows.append((f"  {key}", _short(before.get(key, "absent")), f"-> {after}"))
    for key in [*new, *(key for key in old if key not in new)]:
        row = [f"  rope_parameters.{key}", _short(old.get(key, "absent"))]
        if old.get(key) != new.get(key):
            row.append(f"-> {_short(new.get(key, 'absent'))}")
        rows.append(tuple(row))
    if legacy := [key for key in plan.changes if key in LEGACY_KEYS]:
        rows.append((f"  {', '.join(legacy)}", "(same values)"))
    return columns(([printable(cell) for cell in row] for row in rows), whole=[0])


def _short(value: Any) -> str:
    """Return JSON with long lists of numbers shortened, and only the shape of nested lists."""
    lengths, inner = [], value
    while isinstance(inner, list | tuple) and inner:
        lengths.append(len(inner))
        inner = inner[0]
    if len(lengths) > 1:
        return f"({' x '.join(map(str, lengths))} numbers)"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key}: {_short(item)}" for key, item in value.items())
            + "}"
        )
    if (
        isinstance(value, list | tuple)
        and len(value) > 4
        and all(isinstance(x, int | float) for x in value)
    ):
        return f"[{value[0]:.4g}, {value[1]:.4g}, ... {value[-1]:.4g}] ({len(value)} numbers)"
    if isinstance(value, float):
        return f"{value:.6g}" if value != int(value) else f"{value:.1f}"
    return value if isinstance(value, str) else json.dumps(value)
