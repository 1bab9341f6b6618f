"""A plan as the text that `ropepatch plan` prints."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ropepatch.model.legacy import LEGACY_KEYS
from ropepatch.scaling.bands import bands

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan

WIDTH = 110


def plan_text(plan: Plan) -> str:
    """The plan as aligned plain text, without a trailing newline."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, highlight=False, emoji=False, markup=False)
    frequencies = plan.frequencies()
    window = plan.rope.original_max_position_embeddings
    revision = f" at {plan.revision}" if plan.revision else ""
    console.print(f"{plan.model}{revision} ({plan.model_type}): {window} -> {plan.target} tokens")
    parameters = "".join(
        f", {key}={_short(value)}" for key, value in plan.scaling.parameters().items() if value is not None
    )
    console.print(f"{plan.scaling.name} ({plan.scaling.paper}): factor={plan.scaling.factor:g}{parameters}")
    if plan.site.layer_type:
        console.print(f"scales the rope of the {plan.site.layer_type} layers; the others keep theirs")
    console.print()
    console.print(_band_table(plan))
    a = frequencies.attention_factor
    console.print(
        f"attention factor {plan.rope.carried_attention_factor:.4f} -> {a:.4f} (logits x {a * a:.4f})"
    )
    console.print()
    if plan.exportable:
        console.print("config.json")
        console.print(_change_table(plan))
        console.print("engines and the rope type they read")
        console.print(_engine_table(plan))
    for warning in plan.warnings:
        console.print(f"warning: {warning}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def _grid(*headers: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(any(headers)))
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", overflow="fold")
    return table


def _band_table(plan: Plan) -> Table:
    numbers = (
        "wavelength (tokens)",
        f"rotations in {plan.rope.original_max_position_embeddings}",
        "divided by",
    )
    table = _grid("pairs", "", *numbers, right=numbers)
    for band in bands(plan.rope, plan.frequencies().inv_freq, plan.scaling.factor):
        pairs = f"{band.first}" if band.first == band.last else f"{band.first} to {band.last}"
        table.add_row(pairs, band.fate, _span(band.wavelength), _span(band.rotations), _span(band.divisor))
    return table


def _span(ends: tuple[float, float]) -> str:
    first, last = (f"{end:.4g}" if end < 1e5 else f"{end:.3g}" for end in ends)
    return first if first == last else f"{first} to {last}"


def _change_table(plan: Plan) -> Table:
    """One row per value that changes; the older keys repeat rope_parameters and are only named."""
    table = _grid("", "", "")
    for key in (key for key in plan.changes if key not in LEGACY_KEYS and key != "rope_parameters"):
        table.add_row(f"  {key}", _short(plan.before.get(key, "absent")), f"-> {_short(plan.changes[key])}")
    old, new = plan.rope_parameters_before, plan.rope_parameters
    for key in [*new, *(key for key in old if key not in new)]:
        row = _short(old.get(key, "absent")), f"-> {_short(new.get(key, 'absent'))}"
        table.add_row(f"  rope_parameters.{key}", *(row if old.get(key) != new.get(key) else row[:1]))
    if legacy := [key for key in plan.changes if key in LEGACY_KEYS]:
        table.add_row(f"  {', '.join(legacy)}", "the same, for older readers")
    return table


def _engine_table(plan: Plan) -> Table:
    table = _grid("", "", "", "")
    for engine in plan.engines:
        table.add_row(f"  {engine.engine}", engine.reads, plan.rope_parameters["rope_type"], engine.note)
    return table


def _short(value: Any) -> str:
    """JSON, with long lists of numbers cut in the middle."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple) and len(value) > 4:
        return f"[{value[0]:.4g}, {value[1]:.4g}, ... {value[-1]:.4g}] ({len(value)} numbers)"
    if isinstance(value, float):
        return f"{value:.6g}" if value != int(value) else f"{value:.1f}"
    return value if isinstance(value, str) else json.dumps(value)
