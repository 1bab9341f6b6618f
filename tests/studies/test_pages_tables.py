"""The tables of the study of long prompts, on rows whose answers are known."""

import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).resolve().parents[2] / "eval" / "studies"
sys.path[:0] = [str(STUDIES), str(STUDIES / "pages")]

from pages_tables import Outcome, answers_of, found, mean  # noqa: E402


def row(method, page, tokens, numbers):
    """The row of a page with two quotes of 32 tokens and two numbers."""
    quotes = {"found": tokens, "parts": 32, "log_prob": [-1.0, -2.0]}
    answers = {"found": numbers, "log_prob": [-1.0, -1.0]}
    named = {"method": method, "page": page, "target": 8, "losses": [1.0]}
    return named | {"quote 8": quotes, "number 8": answers}


def test_seeds_are_averaged_on_the_pages_that_they_have():
    rows = [row("student-0", page, [8, 24], "10") for page in range(3)]
    rows.append(row("student-1", 2, [16, 32], "11"))
    pages = Outcome(rows, 4, 8).methods["student"]
    quotes = mean(pages, answers_of(found, "quote", 8), share=True)
    numbers = mean(pages, answers_of(found, "number", 8), share=True)
    assert quotes.clusters == ((32, 64), (32, 64), (40, 64))
    assert numbers.value == pytest.approx((0.5 + 0.5 + 0.75) / 3)
