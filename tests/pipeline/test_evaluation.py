"""Models are measured from Python, and what is measured is shown in a notebook."""

import re

import pytest
import torch

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.tasks import PasskeyTask, PerplexityTask
from ropepatch.model.precision import whereabouts
from ropepatch.report import print_results


@pytest.fixture(scope="module")
def results():
    """The bundled checkpoint as it is and scaled, at its own window and twice that."""
    return ropepatch.evaluate("tiny", methods=["yarn"], to="2x", lengths=[256, "2x"], windows=2)


def test_a_text_is_read_as_it_is_and_scaled(results):
    assert [result.label for result in results] == ["floor", "as it is", "yarn"]
    assert [row["length"] for row in results[-1].tables["by_length"]] == [256, 512]
    assert results[-1].target == 512


def test_results_are_a_sequence_and_a_table(results):
    assert (len(results), results[1:][0].label) == (3, "as it is")
    assert "<table" in results._repr_html_()
    assert list(results.to_pandas().label.unique()) == ["floor", "as it is", "yarn"]
    assert results.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_suite_and_methods_are_given_as_objects_too():
    suite = Suite(to=(64,), tasks=(PerplexityTask(windows=1),))
    (_, result) = ropepatch.evaluate("tiny", suite)
    assert (result.label, result.target) == ("as it is", 64)
    method = Method(name="ntk-by-parts", parameters={"beta": 16.0})
    for given in (method, {"name": "ntk-by-parts", "beta": 16.0}):
        found = ropepatch.evaluate("tiny", methods=[given], to=512, lengths=[64], windows=1)
        assert found[-1].label == "ntk-by-parts (beta=16.0)"


def test_a_limit_a_seed_and_a_precision_decide_what_is_measured_and_are_on_record(tmp_path):
    lines = []
    options = {"limit": 1, "seed": 7, "dtype": "bfloat16", "device": "cpu", "say": lines.append}
    tasks = (PerplexityTask(), PasskeyTask(lengths=(128,), depths=(0.5,)))
    results = ropepatch.evaluate("tiny", Suite(to=(128,), tasks=tasks), out=tmp_path, **options)
    reading, asking = (result for result in results if result.label == "as it is")
    assert (reading.parameters["windows"], reading.parameters["pieces"]) == (1, 1)
    assert (asking.parameters["trials"], asking.parameters["seed"]) == (1, 7)
    assert {result.env["dtype"] for result in (reading, asking)} == {"torch.bfloat16"}
    assert [line for line in lines if line.startswith("on ")] == [
        f"on cpu, bfloat16, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    ]
    assert sum("too little to tell models apart" in line for line in lines) == 1
    again = {**options, "dtype": "float32"}
    with pytest.raises(RopepatchError, match="dtype"):  # not the results of another precision
        ropepatch.evaluate("tiny", Suite(to=(128,), tasks=tasks), out=tmp_path, **again)
    frame = ropepatch.read_results(tmp_path).to_pandas()
    assert set(frame.label) == {"floor", "as it is"}
    assert "interval" not in frame
    assert (frame.lo < frame.hi)[frame.task == "passkey"].all()


def test_a_model_too_large_for_a_cpu_is_said_to_take_long(tiny, monkeypatch):
    monkeypatch.setattr("ropepatch.model.precision.LARGE", 10)
    where, warning = whereabouts(tiny[0])
    assert where.startswith("on cpu, float32, ")
    assert re.fullmatch(r"warning: .* billion parameters are read on the CPU: .* s or more .*", warning)


def test_a_checkpoint_that_was_extended_and_not_trained_is_said_to_be(tmp_path, capsys):
    once = ropepatch.extend("tiny", tmp_path / "once", to=512, say=lambda line: None)
    twice = ropepatch.extend(once, tmp_path / "twice", to=1024, say=lambda line: None)
    (tmp_path / "text.txt").write_text("a bear went to find a ball near an old tree. " * 300)
    results = ropepatch.evaluate(twice, text=str(tmp_path / "text.txt"), windows=1)
    model = results[0].model
    assert (model["trained"], model["extended_from"]) == (1024, 256)
    print_results(results)
    assert "twice, trained on 256, extended to 1,024 tokens: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 3}, "--seed where nothing is drawn"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"dtype": "int8"}, "no dtype 'int8' of weights"),
        ({"device": "cuda:99"}, "no device 'cuda:99' here"),
        ({"suite": "demo", "lengths": [64]}, "--lengths beside --suite"),
        ({"windows": 2, "documents": 2}, "--windows beside --documents"),
    ],
)
def test_what_contradicts_itself_is_refused(options, message):
    with pytest.raises(RopepatchError, match=message):
        ropepatch.evaluate(**{"model": "tiny"} | options)


def test_a_report_that_is_there_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(RopepatchError, match="already exists"):
        ropepatch.evaluate("tiny", out=tmp_path / "out", report=tmp_path / "report.html")
    assert not (tmp_path / "out").exists()


def test_curves_and_grids_are_frames_too(tiny):
    model, tokenizer = tiny
    curve = ropepatch.perplexity(model, None, [list(range(3, 103))])
    assert list(curve.to_pandas().length) == [16, 32, 64, 100]
    assert curve._repr_html_().startswith("<pre>")
    grid = ropepatch.passkey(model, tokenizer, lengths=[128], depths=[0.5], trials=1)
    assert grid.to_pandas().to_dict("records") == [
        {"length": 128, "depth": 0.5, "correct": grid.at(128).correct, "n": 1}
    ]
