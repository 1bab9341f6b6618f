"""The tables and lines that `ropepatch plan` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ropepatch.attention import Remapping
from ropepatch.columns import Table, as_text, columns
from ropepatch.errors import printable
from ropepatch.extension.changes import Planned
from ropepatch.extension.engines import Engine
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.scaling.rope import Method, bands

WIDTH = 80  # columns of a printed plan


def plan_text(plan: Planned, engines: Iterable[Engine], warnings: Iterable[str]) -> str:
    """Return what `ropepatch plan` prints."""
    config, method = plan.source.config, plan.method
    at = f" at {plan.source.revision}" if plan.source.revision else ""
    name = f"{printable(plan.source.name)}{at} ({printable(config.model_type)})"
    lines: list[str | Table] = [
        f"{name}: {config.reach} -> {plan.target} tokens",
        f"{method.name} ({method.paper}): factor={plan.factor:g}{_parameters(method)}",
    ]
    if config.original_window:
        lines.append(
            f"original length {config.window}; {config.file_name} states {config.stated_length}"
        )
    if config.layer_type:
        lines.append(f"scales RoPE in the {config.layer_type} layers only")
    lines += ["", *_effect(plan)]
    lines += ["", config.file_name, changes_table(plan)]
    lines.append("engine support, rope_type, evidence")
    lines.append(engines_table(plan, engines))
    lines += [f"warning: {printable(warning)}" for warning in warnings]
    return as_text(lines, WIDTH)


def _parameters(method: Method) -> str:
    """Return the parameters of a method that are set, each after a comma."""
    given = (
        (key, value) for key, value in method.parameters().items() if value is not None
    )
    return printable("".join(f", {key}={_short(value)}" for key, value in given))


def engines_table(plan: Planned, engines: Iterable[Engine]) -> Table:
    """Return the table of engine support."""
    kind = plan.method.name
    if plan.method.kind == "scaling":
        kind = plan.rope_parameters.get("rope_type", "-")
    rows = (
        (f"  {engine.engine}", engine.reads, kind, engine.how or "", engine.note)
        for engine in engines
    )
    return columns(rows, whole=[0])


def _effect(plan: Planned) -> Iterator[str | Table]:
    """Yield what a method does: its bands of frequencies, or the length that a remapping reaches."""
    rope, window = plan.source.config.rope, plan.source.config.window
    if isinstance(plan.method, Remapping):
        reach = plan.method.reach(window)
        length = "at any length" if reach is None else f"up to {reach} tokens"
        yield f"remapped distances stay within the original context of {window} tokens, {length}"
        return
    if not rope.num_pairs:
        yield "its attention has no RoPE: only the length changes"
        return
    frequencies = plan.frequencies()
    numbers = (
        "wavelength (tokens)",
        f"rotations in {rope.original_max_position_embeddings}",
        "divided by",
    )
    rows = (
        (
            _span((band.first, band.last)),
            band.fate,
            *map(_span, (band.wavelength, band.rotations, band.divisor)),
        )
        for band in bands(rope, frequencies.inv_freq, plan.factor)
    )
    yield columns(rows, ("pairs", "", *numbers), right=(2, 3, 4), whole=[0])
    before, a = rope.carried_attention_factor, frequencies.attention_factor
    yield f"attention factor {before:.4f} -> {a:.4f} (logits x {a * a:.4f})"


def _span(ends: tuple[float, float]) -> str:
    first, last = (f"{end:.4g}" if end < 1e5 else f"{end:.3g}" for end in ends)
    return first if first == last else f"{first} to {last}"


def changes_table(plan: Planned) -> Table:
    """Return one row per changed value of config.json and per key of the old and new `rope_parameters`.

    The older keys repeat rope_parameters and are only named.
    """
    cells = {
        key: (plan.before.get(key), value)
        for key, value in plan.changes.items()
        if key not in LEGACY_KEYS and key != "rope_parameters"
    }
    if new := plan.rope_parameters:
        old = plan.config.rope_parameters
        for key in new | old:
            cells[f"rope_parameters.{key}"] = old.get(key), new.get(key)
    rows = [
        (f"  {key}", _short(old), "" if old == new else f"-> {_short(new)}")
        for key, (old, new) in cells.items()
    ]
    if legacy := [key for key in plan.changes if key in LEGACY_KEYS]:
        rows.append((f"  {', '.join(legacy)}", "(same values)", ""))
    return columns((map(printable, row) for row in rows), whole=[0])


def _short(value: Any) -> str:
    """Return JSON, with the inner numbers of long lists left out."""
    if value is None:
        return "absent"
    if isinstance(value, list | tuple) and len(value) > 4:
        first, last = _short(value[0]), _short(value[-1])
        return f"[{first}, ... {last}] ({len(value)} numbers)"
    if isinstance(value, float):
        return f"{value:.6g}" if value % 1 else f"{value:.1f}"
    return value if isinstance(value, str) else json.dumps(value)
