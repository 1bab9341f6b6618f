"""A plan as the text that `ropepatch plan` prints."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from ropepatch.attention import AttentionMap
from ropepatch.errors import printable
from ropepatch.extension.engines import known
from ropepatch.model.architectures import IN_LLAMA_CPP
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.model.rotary import float32_on_cpu
from ropepatch.scaling.bands import bands

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan

WIDTH = 80
ENDS = 1 << 20  # keys at each end of a band: its extremes are there, or come again within a chunk


@float32_on_cpu()
def plan_text(plan: Plan) -> str:
    """A plan as aligned plain text, without a trailing newline."""
    out = io.StringIO()
    plain: Any = {"color_system": None, "highlight": False, "emoji": False, "markup": False}
    console = Console(file=out, width=WIDTH, force_jupyter=False, **plain)  # or a notebook displays it all
    method, window, layers = plan.method, plan.rope.original_max_position_embeddings, plan.site.layer_type
    revision = f" at {plan.revision}" if plan.revision else ""
    console.print(
        f"{printable(plan.model)}{revision} ({printable(plan.model_type)}): {window} -> {plan.target} tokens",
        soft_wrap=True,  # a path, to copy
    )
    parameters = "".join(
        f", {key}={_short(value)}" for key, value in method.parameters().items() if value is not None
    )
    console.print(f"{method.name} ({method.paper}): factor={plan.scaling.factor:g}{parameters}")
    if layers:
        console.print(f"scales the rope of the {layers} layers; the others keep theirs")
    console.print()
    if plan.distances:
        console.print(_distance_table(plan.distances, plan.target))
        reach = plan.distances.reach(window)
        length = "whatever the length" if reach is None else f"up to {reach} tokens"
        console.print(f"no distance leaves the {window} that were trained, {length}")
    else:
        console.print(_band_table(plan))
        before, a = plan.rope.carried_attention_factor, plan.frequencies().attention_factor
        console.print(f"attention factor {before:.4f} -> {a:.4f} (logits x {a * a:.4f})")
    console.print()
    console.print("config.json")
    console.print(_grid(("", "", ""), _changes(plan)))
    basis = "" if plan.model_type in IN_LLAMA_CPP else ", derived for LLaMA's architecture"
    console.print(f"engines, the rope type they read, and how that is known{basis}")
    kind = plan.distances.name if plan.distances else plan.rope_parameters["rope_type"]
    of_map = plan.distances is not None
    rows = (
        (f"  {engine.engine}", engine.reads, kind, known(engine, of_map=of_map), engine.note)
        for engine in plan.engines
    )
    console.print(_grid([""] * 5, rows))
    for warning in plan.warnings:
        console.print(f"warning: {printable(warning)}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def _grid(headers: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[str] = ()) -> Table:
    headers = list(headers)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headers))
    for place, header in enumerate(headers):
        justify: Any = "right" if header in right else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=place == 0)  # a name, to copy
    for row in rows:
        table.add_row(*row)
    return table


def _band_table(plan: Plan) -> Table:
    window = plan.rope.original_max_position_embeddings
    numbers = "wavelength (tokens)", f"rotations in {window}", "divided by"
    rows = (
        (
            f"{band.first}" if band.first == band.last else f"{band.first} to {band.last}",
            band.fate,
            *map(_span, (band.wavelength, band.rotations, band.divisor)),
        )
        for band in bands(plan.rope, plan.frequencies().inv_freq, plan.scaling.factor)
    )
    return _grid(("pairs", "", *numbers), rows, numbers)


def _distance_table(distances: AttentionMap, target: int) -> Table:
    """What the last token sees, one row for each band of a map."""
    last, rows = torch.tensor([target - 1]), []
    for band in distances.bands():
        begin, end = int(band.begin(last).clamp(min=0)), int(band.end(last))
        if begin < end:
            stretches = (begin, min(begin + ENDS, end)), (max(begin, end - ENDS), end)
            keys = torch.cat([torch.arange(*stretch) for stretch in stretches])
            read = (band.query(last)[:, None] - band.key(keys)).double()
            rows.append(
                map(_span, ((target - end, target - 1 - begin), (float(read.min()), float(read.max()))))
            )
    headers = "keys at a distance of", "are read at"
    return _grid(headers, rows, headers)


def _span(ends: tuple[float, float]) -> str:
    first, last = (f"{end:.4g}" if end < 1e5 else f"{end:.3g}" for end in ends)
    return first if first == last else f"{first} to {last}"


def _changes(plan: Plan) -> Iterable[tuple[str, ...]]:
    """One row per value that changes; the older keys repeat rope_parameters and are only named."""
    before, changes = plan.before, plan.changes
    for key in (key for key in changes if key not in LEGACY_KEYS and key != "rope_parameters"):
        yield f"  {key}", _short(before.get(key, "absent")), f"-> {_short(changes[key])}"
    old, new = plan.site.of(before["rope_parameters"]), plan.rope_parameters
    for key in [*new, *(key for key in old if key not in new)]:
        row = _short(old.get(key, "absent")), f"-> {_short(new.get(key, 'absent'))}"
        yield f"  rope_parameters.{printable(key)}", *(row if old.get(key) != new.get(key) else row[:1])
    if legacy := [key for key in changes if key in LEGACY_KEYS]:
        yield f"  {', '.join(legacy)}", "the same, for older readers"


def _short(value: Any) -> str:
    """JSON, with long lists of numbers cut in the middle, and of lists of lists their lengths alone."""
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
