"""The table of attention maps says what its result file holds, and the file what the study measures."""

import json
from pathlib import Path

import maps_study
import maps_tables
import pytest
from readme import check_block

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results" / "attention-maps.json"
PAGE = ROOT / "eval" / "studies" / "maps" / "maps.md"


def row(method, kind="loss", part=0, **more):
    return {"method": method, "kind": kind, "part": part, "settings": None} | more


def test_the_page_has_the_table_of_the_results():
    check_block("maps", maps_tables.maps_table(json.loads(RESULTS.read_text())["rows"]), PAGE)


def test_the_guide_has_the_short_table():
    check_block("maps-measured", maps_tables.short_table(json.loads(RESULTS.read_text())["rows"]))


def test_the_page_has_the_table_of_costs():
    result = json.loads((RESULTS.parent / "attention_cost.json").read_text())
    check_block("maps-cost", maps_tables.cost_table(result), PAGE)


def test_the_excess_is_of_the_windows_that_both_have_read():
    base = [row("own window", part=i, digest=str(i), all=[[10.0 * (i + 1), 10]]) for i in range(2)]
    read = [
        row("yarn", part=0, digest="0", all=[[12.0, 10]]),
        row("yarn", part=1, digest="x", all=[[99.0, 10]]),
    ]
    mean, parts = maps_tables.difference(read, base, "all")
    assert mean == pytest.approx(0.2)
    assert parts == [(2.0, 10)]


def test_a_study_that_was_stopped_goes_on_with_what_is_missing(monkeypatch):
    case = maps_study.Case(
        "tiny", "tiny", 2, windows=2, at_once=1, methods=("own window", "as it is", "rerope", "string")
    )
    rows, jobs = [], []
    measured = maps_study.losses

    def stopped(case, method, part):
        if len(jobs) == 3:
            raise KeyboardInterrupt
        jobs.append((method, part))
        return measured(case, method, part)

    monkeypatch.setattr(maps_study, "losses", stopped)
    with pytest.raises(KeyboardInterrupt):
        maps_study.measure(case, rows, lambda: None)
    assert jobs == [("own window", 0), ("as it is", 0), ("rerope", 0)]
    monkeypatch.setattr(maps_study, "losses", measured)
    maps_study.measure(case, rows, lambda: None)
    assert len({(r["method"], r["part"]) for r in rows}) == len(rows) == 8
    own, plain, mapped = (maps_tables.of(rows, name, "loss") for name in ("own window", "as it is", "rerope"))
    assert mapped[0]["settings"] == "window=128"
    far, near = (maps_tables.difference(one, own, "all")[0] for one in (plain, mapped))
    assert near < 0 < far
