"""The measurements that the explorer draws, made from eval/results; docs/tables.py writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropepatch.evaluation.results import BASELINE
from ropepatch.files import read_json, read_text

RESULTS = Path(__file__).parents[1] / "eval" / "results"
OWN, BASE = "own window", "none"


def measured_from(results: Path) -> list[dict[str, Any]]:
    """One entry per model and target, from the folder of results.

    Each has the stretches of positions, the losses of every method over them in nats per token, the least
    possible loss where it is known, and by length how many passkeys were found of how many.
    """
    return [
        *_training_free(
            read_json(results / "tiny-training-free.json"), "tiny-training-free.json"
        ),
        _perplexities(results / "babyllama-4x.json"),
        *_maps(
            read_json(results / "position-remappings.json"), "position-remappings.json"
        ),
    ]


def _training_free(content: dict[str, Any], file: str) -> list[dict[str, Any]]:
    """The bundled model at each factor."""
    entries = []
    for target in dict.fromkeys(row["target"] for row in content["rows"]):
        rows = {
            row["method"]: row for row in content["rows"] if row["target"] == target
        }
        floor = rows.pop("floor")
        runs = {name: row for name, row in rows.items() if "keys" in row}
        entries.append(
            {
                "model": floor["model"],
                "trained": target // floor["factor"],
                "target": target,
                "kind": "methods",
                "file": file,
                "stretches": [
                    [int(end) for end in span.split(" to ")] for span in floor["nats"]
                ],
                "loss": {
                    name: [mean for mean, _ in run["nats"].values()]
                    for name, run in runs.items()
                },
                "floor": [mean for mean, _ in floor["nats"].values()],
                "passkey": {name: run["keys"] for name, run in runs.items()},
            }
        )
    return entries


def _perplexities(path: Path) -> dict[str, Any]:
    """Losses by position of one model, as `ropepatch eval --json` writes them."""
    results = json.loads(read_text(path))
    first, rows = results[0], [_by_position(result["rows"]) for result in results]
    return {
        "model": Path(first["model"]["name"]).name,
        "trained": first["model"]["trained"],
        "target": first["target"],
        "kind": "methods",
        "file": path.name,
        "stretches": [[row["at"]["begin"], row["at"]["end"]] for row in rows[0]],
        "loss": {
            BASE if result["scaling"] is None else result["label"]: [
                round(row["value"], 4) for row in of
            ]
            for result, of in zip(results, rows, strict=True)
        },
        "floor": None,
        "passkey": {},
    }


def _by_position(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["measure"] == "loss" and "begin" in row["at"]]


def _maps(content: dict[str, Any], file: str) -> list[dict[str, Any]]:
    """Every model with position remappings: within its window, and over the whole target."""
    rows = [
        row
        for row in content["rows"]
        if row["method"] != OWN and " with " not in row["method"]
    ]
    places = dict.fromkeys((row["model"], row["factor"], row["target"]) for row in rows)
    entries = []
    for model, factor, target in places:
        here = [row for row in rows if (row["model"], row["factor"]) == (model, factor)]
        losses, keys = (
            [row for row in here if row["kind"] == kind] for kind in ("loss", "passkey")
        )
        trained = target // factor
        entries.append(
            {
                "model": model,
                "trained": trained,
                "target": target,
                "kind": "remappings",
                "file": file,
                "stretches": [[0, trained], [0, target]],
                "loss": {
                    name: [_mean(of, "short"), _mean(of, "all")]
                    for name, of in _by_method(losses).items()
                    if all(row.get("all") for row in of)
                },
                "floor": None,
                "passkey": {
                    name: {
                        str(target): [
                            sum(row[one] for row in of) for one in ("correct", "n")
                        ]
                    }
                    for name, of in _by_method(keys).items()
                    if all("correct" in row for row in of)
                },
            }
        )
    return entries


def _by_method(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(
            BASE if row["method"] == BASELINE else row["method"], []
        ).append(row)
    return grouped


def _mean(rows: Sequence[dict[str, Any]], kind: str) -> float:
    """Nats per token over all pieces of text, each a sum and a number of tokens."""
    pieces = [piece for row in rows for piece in row[kind]]
    mean: float = sum(nats for nats, _ in pieces) / sum(count for _, count in pieces)
    return round(mean, 4)


def text() -> str:
    """The file of the explorer."""
    return json.dumps(measured_from(RESULTS), separators=(",", ":")) + "\n"
