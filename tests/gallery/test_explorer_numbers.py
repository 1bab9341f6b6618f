"""What the explorer shows of eval/results is what stands there; ROPEPATCH_UPDATE=1 writes it anew."""

import json
import os
from pathlib import Path

import pytest

from ropepatch.gallery.explorer.measured import FILE, measured_from

RESULTS = Path(__file__).parents[2] / "eval" / "results"


def test_measured_numbers_are_those_of_the_results():
    entries = measured_from(RESULTS)
    if os.environ.get("ROPEPATCH_UPDATE") == "1":
        FILE.write_text(json.dumps(entries, separators=(",", ":")) + "\n", encoding="utf-8")
    assert json.loads(FILE.read_text(encoding="utf-8")) == entries


def test_a_loss_over_pieces_counts_tokens():
    (tiny,) = (
        one
        for one in measured_from(RESULTS)
        if (one["model"], one["target"], one["kind"]) == ("tiny", 1024, "maps")
    )
    rows = json.loads((RESULTS / "attention-maps.json").read_text())["rows"]
    pieces = [
        piece
        for row in rows
        if (row["model"], row["factor"], row["kind"], row["method"]) == ("tiny", 4, "loss", "yarn")
        for piece in row["all"]
    ]
    mean = sum(nats for nats, _ in pieces) / sum(tokens for _, tokens in pieces)
    assert tiny["loss"]["yarn"][1] == pytest.approx(mean, abs=1e-4)
