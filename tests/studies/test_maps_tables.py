"""The table of attention maps says what its result file holds, and the file what the study measures."""

import maps_study
import maps_tables
import pytest
from study import Rows, excess


def row(method, kind="loss", **more):
    return {"method": method, "kind": kind, "settings": None} | more


def test_an_excess_is_paired_by_document_and_of_the_same_windows_alone():
    own = row("own window", digest="a", all=[[10.0, 10], [20.0, 10], [30.0, 10]])
    read = row("yarn", digest="a", all=[[12.0, 10], [22.0, 10], [32.0, 10]])
    mean = excess(read, own)
    assert mean.value == pytest.approx(0.2)
    assert mean.interval() == pytest.approx((0.2, 0.2))
    with pytest.raises(ValueError, match="different windows"):
        excess(read | {"digest": "b"}, own)


def test_the_interval_of_keys_counts_each_as_a_haystack():
    assert maps_tables.found({"correct": 40, "n": 40}) == "40/40 (91% to 100%)"


def test_a_row_is_a_line_of_the_file_its_sums_to_6_digits_and_all_else_as_it_is(tiny, tmp_path):
    for number in (0.1234567891, 2):
        Rows(tmp_path / "rows.json", "maps").add(
            {"model": "tiny", "all": ((1 / 3, 7),), "at": number}, tiny[0]
        )
    lines = (tmp_path / "rows.json").read_text().splitlines()
    assert lines[-3:-1] == [
        '{"model": "tiny", "all": [[0.333333, 7]], "at": 0.1234567891},',
        '{"model": "tiny", "all": [[0.333333, 7]], "at": 2}',
    ]
    assert Rows(tmp_path / "rows.json", "maps").of(at=2)


@pytest.mark.slow
def test_an_interrupted_study_resumes_with_what_is_missing(monkeypatch, tmp_path):
    methods = ("own window", "baseline", "rerope", "string")
    case = maps_study.Case("tiny", 2, windows=3, methods=methods, haystacks=3)
    jobs, file = [], tmp_path / "rows.json"
    measured = maps_study.losses

    def stopped(case, method):
        if len(jobs) == 2:
            raise KeyboardInterrupt
        jobs.append(method)
        return measured(case, method)

    monkeypatch.setattr(maps_study, "losses", stopped)
    with pytest.raises(KeyboardInterrupt):
        maps_study.measure(case, Rows(file, "maps"))
    assert jobs == ["own window", "baseline"]
    monkeypatch.setattr(maps_study, "losses", measured)
    maps_study.measure(case, Rows(file, "maps"))
    rows = Rows(file, "maps").rows
    assert len({(one["method"], one["kind"]) for one in rows}) == len(rows) == 7
    own, plain, mapped = (maps_tables.of(rows, name, "loss") for name in ("own window", "baseline", "rerope"))
    assert mapped["settings"] == "window=128"
    far, near = (excess(one, own).value for one in (plain, mapped))
    assert near < 0 < far
    keys = maps_tables.of(rows, "rerope", "passkey")
    assert keys["n"] == 3
    assert keys["correct"] >= 2
