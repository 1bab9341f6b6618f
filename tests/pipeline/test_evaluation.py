"""`evaluate` from Python: its arguments, and results as tables, data frames and figures."""

import pytest
import torch
from made_results import asking

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask
from ropepatch.report import print_results


@pytest.fixture(scope="module")
def results():
    """The bundled checkpoint with and without scaling, at its original context length and twice that."""
    return ropepatch.evaluate("tiny", methods=["yarn"], to="2x", lengths=[256, "2x"], windows=2)


def test_evaluate_returns_baseline_and_scaled_results_that_display_as_a_table(results):
    assert [result.label for result in results] == ["floor", "baseline", "yarn"]
    assert [row.length for row in results[-1].of("loss", "length")] == [256, 512]
    assert (len(results), results[1:][0].label, results[-1].target) == (3, "baseline", 512)
    assert "<table" in results._repr_html_()
    assert str(results).startswith("tiny, trained on 256 tokens")
    assert results.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_data_frame_has_one_row_per_measured_value(results):
    frame = results.to_pandas()
    assert [*frame][:5] == ["model", "target", "task", "label", "measure"]
    assert {*frame} - {"length", "begin", "end"} == {
        *("model", "target", "task", "label", "measure", "value", "low", "high", "n", "clusters")
    }
    assert len(frame) == sum(len(result.rows) for result in results)
    (at_target,) = frame[(frame.label == "yarn") & (frame.length == 512)].to_dict("records")
    row = results[-1].row("loss", length=512)
    assert (at_target["measure"], at_target["value"]) == ("nats_per_token", row.value)
    assert (at_target["n"], at_target["clusters"]) == (row.n, 2) == (2 * 511, 2)
    answers = ropepatch.Results([asking("yarn", [4, 2, 1])]).to_pandas("log_prob")
    assert {*answers.measure} == {"log_prob"}
    assert answers[answers.kind == "passkey"].length.tolist() == [256, 512, 1024]


def test_evaluate_accepts_suites_and_methods_as_objects():
    suite = Suite(to=(64,), tasks=(PerplexityTask(windows=1),))
    (_, result) = ropepatch.evaluate("tiny", suite)
    assert (result.label, result.target) == ("baseline", 64)
    method = Method(name="ntk-by-parts", parameters={"beta": 16.0})
    for given in (method, {"name": "ntk-by-parts", "beta": 16.0}):
        found = ropepatch.evaluate("tiny", methods=[given], to=512, lengths=[64], windows=1)
        assert found[-1].label == "ntk-by-parts (beta=16.0)"


def test_limit_seed_and_dtype_are_applied_and_recorded_in_the_results(tmp_path):
    lines = []
    options = {"limit": 1, "seed": 7, "dtype": "bfloat16", "device": "cpu", "say": lines.append}
    tasks = (PerplexityTask(), RetrievalTask(lengths=(128,)))
    results = ropepatch.evaluate("tiny", Suite(to=(128,), tasks=tasks), out=tmp_path, **options)
    loss, retrieval = (result for result in results if result.label == "baseline")
    assert (loss.parameters["windows"], loss.parameters["pieces"]) == (1, 1)
    assert (retrieval.parameters["haystacks"], retrieval.parameters["seed"]) == (1, 7)
    assert {result.env["dtype"] for result in (loss, retrieval)} == {"torch.bfloat16"}
    assert [line for line in lines if line.startswith("on ")] == [
        f"on cpu, bfloat16, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    ]
    assert [line.partition(";")[0] for line in lines if line.startswith("warning")] == [
        "warning: documents: 1",
        "warning: prompts: 1",
    ]
    again = {**options, "dtype": "float32"}
    with pytest.raises(RopepatchError, match="dtype"):  # results of another precision are not reused
        ropepatch.evaluate("tiny", Suite(to=(128,), tasks=tasks), out=tmp_path, **again)
    frame = ropepatch.read_results(tmp_path).to_pandas()
    assert set(frame.label) == {"floor", "baseline"}


def test_plans_and_results_state_that_a_checkpoint_was_extended_without_training(tmp_path, capsys):
    once = ropepatch.extend("tiny", tmp_path / "once", to=512, say=lambda line: None)
    (made,) = (line for line in ropepatch.plan(once, to=1024).warnings if "ropepatch.json" in line)
    assert made.endswith("extending tiny by 4x instead scales RoPE only once")
    twice = ropepatch.extend(once, tmp_path / "twice", to=1024, say=lambda line: None)
    (tmp_path / "text.txt").write_text("a bear went to find a ball near an old tree. " * 300)
    results = ropepatch.evaluate(twice, text=tmp_path / "text.txt", windows=1)
    model = results[0].model
    assert (model["trained"], model["extended_from"]) == (1024, 256)
    print_results(results)
    printed = capsys.readouterr().out
    assert "twice, trained on 256, extended to 1,024 tokens. " in printed
    assert "256 to 512" in " ".join(printed.split())


def test_loss_curves_and_answers_convert_to_data_frames(tiny):
    model, tokenizer = tiny
    curve = ropepatch.perplexity(model, None, [list(range(3, 103))])
    assert list(curve.to_pandas().length) == [16, 32, 64, 100]
    assert curve._repr_html_().startswith("<pre>")
    answers = ropepatch.passkey(model, tokenizer, lengths=[128], haystacks=1)
    ((answer,),) = (answers.to_pandas().to_dict("records"),)
    assert (answer["length"], answer["kind"], answer["found"]) == (
        128,
        "passkey",
        answers.found(128).value == 1,
    )


def test_progress_lines_name_the_measured_length_and_the_target_length():
    lines = []
    ropepatch.evaluate("tiny", lengths=[64], methods="yarn", to="1k", windows=1, say=lines.append)
    said = [line.partition(":")[0] for line in lines if line.startswith("perplexity")]
    assert said == ["perplexity, baseline at 64 tokens", "perplexity, yarn to 1k at 64 tokens"]
