"""A plan as the text that `ropepatch plan` prints."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ropepatch.attention import MAPS, make_map
from ropepatch.errors import printable
from ropepatch.model.architectures import IN_LLAMA_CPP
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.model.rotary import float32_on_cpu
from ropepatch.scaling.bands import bands
from ropepatch.scaling.rope import Rope

WIDTH = 80
ENDS = 1 << 20  # keys at each end of a band: its extremes are there, or come again within a chunk
PlanRecord = Mapping[str, Any]  # what `Plan.to_dict` gives and ropepatch.json holds


@float32_on_cpu()
def plan_text(record: PlanRecord) -> str:
    """A plan as aligned plain text, without a trailing newline."""
    out = io.StringIO()
    plain: Any = {"color_system": None, "highlight": False, "emoji": False, "markup": False}
    console = Console(file=out, width=WIDTH, force_jupyter=False, **plain)  # or a notebook displays it all
    rope = _rope_before(record)
    revision = f" at {record['revision']}" if record["revision"] else ""
    console.print(
        f"{printable(record['model'])}{revision} ({printable(record['model_type'])}): "
        f"{rope.original_max_position_embeddings} -> {record['target']} tokens",
        soft_wrap=True,  # a path, to copy
    )
    parameters = "".join(
        f", {key}={_short(value)}" for key, value in record["parameters"].items() if value is not None
    )
    console.print(f"{record['method']} ({record['paper']}): factor={record['factor']:g}{parameters}")
    if record["layer_type"]:
        console.print(f"scales the rope of the {record['layer_type']} layers; the others keep theirs")
    console.print()
    if record["method"] in MAPS:
        console.print(_distance_table(record))
        console.print(_reach(record))
    else:
        console.print(_band_table(rope, record))
        before, a = rope.carried_attention_factor, record["attention_factor"]
        console.print(f"attention factor {before:.4f} -> {a:.4f} (logits x {a * a:.4f})")
    console.print()
    if record["config_changes"]:
        console.print("config.json")
        console.print(_change_table(record))
        basis = "" if record["model_type"] in IN_LLAMA_CPP else ", derived for LLaMA's architecture"
        console.print(f"engines and the rope type they read{basis}")
        console.print(_engine_table(record))
    for warning in record["warnings"]:
        console.print(f"warning: {printable(warning)}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def _rope_before(record: PlanRecord) -> Rope:
    carried = tuple(record["inv_freq_before"]) if record["already_scaled"] else None
    window = record["original_max_position_embeddings"]
    a = record["attention_factor_before"]
    return Rope(record["rotary_dim"], record["rope_theta"], window, carried, a)


def _rope_parameters(record: PlanRecord, values: str) -> dict[str, Any]:
    """Those of the layers that are scaled, of `config_before` or `config_changes`."""
    flat: dict[str, Any] = record[values]["rope_parameters"]
    return flat if record["layer_type"] is None else flat[record["layer_type"]]


def _grid(*headers: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(any(headers)))
    for place, header in enumerate(headers):
        justify: Any = "right" if header in right else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=place == 0)  # a name, to copy
    return table


def _band_table(rope: Rope, record: PlanRecord) -> Table:
    numbers = "wavelength (tokens)", f"rotations in {rope.original_max_position_embeddings}", "divided by"
    table = _grid("pairs", "", *numbers, right=numbers)
    for band in bands(rope, torch.tensor(record["inv_freq"], dtype=torch.float32), record["factor"]):
        pairs = f"{band.first}" if band.first == band.last else f"{band.first} to {band.last}"
        table.add_row(pairs, band.fate, _span(band.wavelength), _span(band.rotations), _span(band.divisor))
    return table


def _distance_table(record: PlanRecord) -> Table:
    """What the last token sees, one row for each band of a map."""
    last = torch.tensor([record["target"] - 1])
    headers = "keys at a distance of", "are read at"
    table = _grid(*headers, right=headers)
    for band in make_map(record["method"], **record["parameters"]).bands():
        begin, end = int(band.begin(last).clamp(min=0)), int(band.end(last))
        if begin < end:
            stretches = (begin, min(begin + ENDS, end)), (max(begin, end - ENDS), end)
            keys = torch.cat([torch.arange(*stretch) for stretch in stretches])
            read = (band.query(last)[:, None] - band.key(keys)).double()
            true = float(last - end + 1), float(last - begin)
            table.add_row(*map(_span, (true, (float(read.min()), float(read.max())))))
    return table


def _reach(record: PlanRecord) -> str:
    window = record["original_max_position_embeddings"]
    reach = make_map(record["method"], **record["parameters"]).reach(window)
    length = "whatever the length" if reach is None else f"up to {reach} tokens"
    return f"no distance leaves the {window} that were trained, {length}"


def _span(ends: tuple[float, float]) -> str:
    first, last = (f"{end:.4g}" if end < 1e5 else f"{end:.3g}" for end in ends)
    return first if first == last else f"{first} to {last}"


def _change_table(record: PlanRecord) -> Table:
    """One row per value that changes; the older keys repeat rope_parameters and are only named."""
    table = _grid("", "", "")
    before, changes = record["config_before"], record["config_changes"]
    for key in (key for key in changes if key not in LEGACY_KEYS and key != "rope_parameters"):
        table.add_row(f"  {key}", _short(before.get(key, "absent")), f"-> {_short(changes[key])}")
    old, new = (_rope_parameters(record, values) for values in ("config_before", "config_changes"))
    for key in [*new, *(key for key in old if key not in new)]:
        row = _short(old.get(key, "absent")), f"-> {_short(new.get(key, 'absent'))}"
        name = f"  rope_parameters.{printable(key)}"
        table.add_row(name, *(row if old.get(key) != new.get(key) else row[:1]))
    if legacy := [key for key in changes if key in LEGACY_KEYS]:
        table.add_row(f"  {', '.join(legacy)}", "the same, for older readers")
    return table


def _engine_table(record: PlanRecord) -> Table:
    table = _grid("", "", "", "")
    kind = _rope_parameters(record, "config_changes")["rope_type"]
    kind = record["method"] if record["method"] in MAPS else kind
    for engine in record["engines"]:
        table.add_row(f"  {engine['engine']}", engine["reads"], kind, engine["note"])
    return table


def _short(value: Any) -> str:
    """JSON, with long lists of numbers cut in the middle."""
    if isinstance(value, dict):
        return printable("{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}")
    if isinstance(value, list | tuple) and len(value) > 4 and all(isinstance(x, int | float) for x in value):
        return f"[{value[0]:.4g}, {value[1]:.4g}, ... {value[-1]:.4g}] ({len(value)} numbers)"
    if isinstance(value, float):
        return f"{value:.6g}" if value != int(value) else f"{value:.1f}"
    return printable(value if isinstance(value, str) else json.dumps(value))
