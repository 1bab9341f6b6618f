"""Which engines support the scaling of which architecture, from eval/results; docs/tables.py writes it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from measured import result
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ropepatch.extension.engines import VERSIONS
from ropepatch.model import architectures
from ropepatch.model.architectures import ABSENT, NOT_KNOWN, TESTED, found
from ropepatch.model.architectures import OTHER_TYPES as OTHERS
from ropepatch.report.printers import markdown_rows

Row = Mapping[str, Any]
SAID = {"another model": "another rope", "undecided": NOT_KNOWN, "not shown": NOT_KNOWN}
READ = {
    "reads": {OTHERS: "right"},
    "ignores": {"default": NOT_KNOWN, OTHERS: "unscaled"},
}
READ |= {ABSENT: {OTHERS: ABSENT}}


@cache
def rows_of(engine: str) -> list[Row]:
    """List the results for an engine, of the version in `VERSIONS`."""
    rows: list[Row] = result("engine-types")["rows"]
    return [
        row
        for row in rows
        if (row["engine"], row["version"]) == (engine, VERSIONS[engine])
    ]


def engines() -> list[str]:
    """List the engines that have results, in the order of `VERSIONS`."""
    return [engine for engine in VERSIONS if rows_of(engine)]


def text() -> str:
    """The content of `engine_types.json`: of each engine all its types, and a line for each finding."""
    lines = []
    for engine in engines():
        groups: dict[str, list[str]] = {}
        [lists] = [row for row in rows_of(engine) if "asked" in row] or [{}]
        for row in rows_of(engine):
            name = row.get("model_type")
            if (
                name
                and not (lists and name not in lists["types"])
                and (verdicts := shortest(row))
            ):
                groups.setdefault(json.dumps([row["how"], verdicts]), []).append(
                    key(name)
                )
        named = [
            f'"{name}": {json.dumps(" ".join(lists[name]))},'
            for name in ("types", "new_keys")
            if name in lists
        ]
        found = ",\n".join(
            f"  [{group[1:-1]}, {json.dumps(' '.join(sorted(names)))}]"
            for group, names in sorted(groups.items())
        )
        lines.append(
            "\n ".join(
                [f"{json.dumps(engine)}: {{", *named, f'"rows": [\n{found}\n ]}}']
            )
        )
    return "{" + ",\n".join(lines) + "}\n"


def forget() -> None:
    """Let the package load `engine_types.json` again, which has just been written."""
    architectures._engine_types.cache_clear()
    architectures._engine_rows.cache_clear()


@cache
def key(model_type: str) -> str:
    """An architecture, and after it that of its language model where it has another."""
    part = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type
    return model_type if part == model_type else f"{model_type}/{part}"


def table() -> str:
    """The RoPE types that each engine supports in each architecture, and how that is known."""
    names = sorted(
        {
            row["model_type"]
            for engine in engines()
            for row in rows_of(engine)
            if "model_type" in row
        }
    )
    rows = [
        (f"`{name}`", *(cell(engine, *key(name).split("/")) for engine in engines()))
        for name in names
    ]
    return markdown_rows(
        ("model_type", *(f"{engine} ({VERSIONS[engine]})" for engine in engines())),
        rows,
    )


def cell(engine: str, whole: str, text: str | None = None) -> str:
    """Name the RoPE types that an engine supports in an architecture, and what it does with the others."""
    verdicts = {kind: found(engine, whole, text or whole, kind) for kind in TESTED}
    if len({*verdicts.values()}) == 1:
        how, verdict = verdicts["default"]
        return ", ".join(filter(None, ("all" if verdict == "right" else verdict, how)))
    right = [kind for kind, (_, verdict) in verdicts.items() if verdict == "right"]
    wrong = {
        verdict: None
        for _, verdict in verdicts.values()
        if verdict not in ("right", NOT_KNOWN)
    }
    [how] = {how for how, _ in verdicts.values()} - {None}
    said = "; else ".join(
        filter(None, (", ".join(right), " or ".join(wrong or [NOT_KNOWN])))
    )
    return f"{said}, {how}"


def shortest(row: Row) -> dict[str, str]:
    """The verdicts of a row by rope type, `*` for what most of them share; empty where nothing is known."""
    reads = row["reads"]
    if isinstance(reads, str):
        return READ.get(reads, {})
    verdicts = {kind: SAID.get(verdict, verdict) for kind, verdict in reads.items()}
    (most, _), *_ = Counter(
        value for kind, value in verdicts.items() if kind != "default"
    ).most_common(1)
    return {kind: verdict for kind, verdict in verdicts.items() if verdict != most} | {
        OTHERS: most
    }
