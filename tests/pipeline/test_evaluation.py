"""Models are measured from Python, and what is measured is shown in a notebook."""

import pytest

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.tasks import PerplexityTask


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
