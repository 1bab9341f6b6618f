"""The sentence on engines counts what they compute, and takes the largest divergence of that alone."""

from engines_tables import in_short

from ropepatch.model.reading_file import RIGHT
from ropepatch.probing.judging import UNDECIDED
from ropepatch.probing.mistakes import UNSCALED


def row(engine, served, verdict, largest):
    why = f"typically 1e-09, largest {largest} nats beyond the old window, 2e-08 and 9 within it"
    return {"engine": engine, "version": "1", "served": served, "verdict": verdict, "why": why}


def test_engines_in_short():
    text = in_short([
        row("one", RIGHT, RIGHT, "8e-08"),
        row("one", RIGHT, RIGHT, "0.003"),
        row("one", UNSCALED, UNSCALED, "5"),
        row("two", RIGHT, RIGHT, "0.2"),
        row("two", RIGHT, UNDECIDED, "7"),
    ])  # fmt: skip
    assert text.endswith(": one 1 2 of 2 (0.003 nats), two 1 1 of 2 (0.2 nats; 1 undecided).")
