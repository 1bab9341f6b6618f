"""The frame of the studies: cases, rows that resume, and tables, with those whose figures are computed."""

import json
import sys
from dataclasses import replace

import pytest
import study
from study import Checkpoint, Study, averaged, excess

# The frame


def counting(measured, *, stop=None):
    """A study of six cases that notes what it measures; it is interrupted at one of them."""

    def measure(case, given):
        if case == stop:
            raise KeyboardInterrupt
        measured.append(case)
        found = {"nats": ((1 / 3, 7), (0.1234567891, 2)), "at": 0.1234567891}
        return [found, found | {"of": "another text"}] if case["factor"] == 8 else found

    cases = [{"model": "m", "factor": factor, "seed": seed} for factor in (2, 4, 8) for seed in (None, 0)]
    return Study(
        name="test", about=None, cases=lambda given: cases, measure=measure, inputs=lambda case: [INPUT]
    ), cases


INPUT = study.TINY / "config.json"


def test_an_interrupted_study_resumes_with_missing_rows_and_each_row_names_its_start(tmp_path, monkeypatch):
    file, measured = tmp_path / "rows.json", []
    monkeypatch.setattr(sys, "argv", ["first"])
    stopped, cases = counting(measured, stop={"model": "m", "factor": 4, "seed": 0})
    with pytest.raises(KeyboardInterrupt):
        stopped.main(["--json", str(file)])
    assert measured == cases[:3]
    monkeypatch.setattr(sys, "argv", ["second", "--now"])
    whole, _ = counting(measured)
    whole.main(["--json", str(file)])
    assert measured == cases
    whole.main(["--json", str(file)])
    assert measured == cases
    held = json.loads(file.read_text())
    assert [row["recorded"] for row in held["rows"]] == [0] * 3 + [1] * 5
    first, second = held["recorded"]
    assert (first["command"], second["command"]) == ("python first", "python second --now")
    for start in held["recorded"]:
        assert {"date", "commit", "versions", "cpu"} <= start.keys()
        assert start["inputs"] == {
            "checkpoint/config.json": study.digests((INPUT,))["checkpoint/config.json"]
        }
    *_, last = file.read_text().splitlines()[:-2]
    row = json.loads(last)  # a row is a line, sums of nats to 6 digits, all else as it is
    assert row["nats"] == [[0.333333, 7], [0.123457, 2]]
    assert (row["at"], row["of"]) == (0.1234567891, "another text")


def test_a_case_that_fails_is_named_and_the_others_are_measured(tmp_path, capsys):
    measured = []
    study, cases = counting(measured)

    def fails(case, given):
        return 1 / (case["factor"] - 4) and study.measure(case, given)

    with pytest.raises(SystemExit, match="2 cases failed"):
        replace(study, measure=fails).main(["--json", str(tmp_path / "rows.json")])
    assert measured == [*cases[:2], *cases[4:]]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_rows_of_another_process_stay(tmp_path):
    ours, theirs = (study.Rows(tmp_path / "rows.json", "test") for _ in range(2))
    ours.add({"case": 1})
    theirs.add({"case": 2})
    assert [row["case"] for row in study.Rows(tmp_path / "rows.json", "test").rows] == [1, 2]


def test_only_measures_the_cases_that_have_these_values(tmp_path):
    measured = []
    asked, cases = counting(measured)
    asked.main(["--json", str(tmp_path / "rows.json"), "--only", "factor=2,seed=0", "model=m,factor=8"])
    assert measured == [cases[1], *cases[4:]]


def test_a_checkpoint_reads_its_windows_as_it_is_and_within_its_own_window():
    place = Checkpoint("tiny", 2, windows=3)
    own, far, floor = place.through_own_window(), place.losses(place.loaded[0]), place.floor()
    assert excess(own, floor).value > 0
    assert excess(far, own, "last").value > 0.1
    assert excess(far, own, "short").value == pytest.approx(0, abs=0.02)
    assert [weight for _, weight in far["last"]] == [128] * 3
    other = Checkpoint("tiny", 2, windows=2).losses(place.loaded[0])
    with pytest.raises(ValueError, match="different windows"):
        excess(other, own)


# Tables


def test_a_mean_over_seeds_is_cluster_by_cluster():
    place = {"model": "m", "factor": 4, "target": 1024, "digest": "d"}
    rows = [place | {"all": [[nats, 10], [nats + 1, 10], [nats - 1, 10]]} for nats in (10.0, 20.0)]
    assert averaged(rows, "all")["all"] == [[15, 10], [16, 10], [14, 10]]
