"""`evaluate`: its arguments, its results as tables, data frames and figures, and checkpoints of ropepatch."""

import shutil

import pytest
from checkpoint_folders import with_other_weights, write_checkpoint

import ropepatch
from ropepatch.evaluation.measuring import Suite
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask
from ropepatch.files import read_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.publishing.contents import judge
from ropepatch.verbs.evaluate import extension_of


@pytest.fixture(scope="module")
def results():
    """The bundled checkpoint with and without scaling, at its original context length and twice that."""
    return ropepatch.evaluate(
        "tiny", methods=["yarn"], to="2x", lengths=[256, "2x"], windows=2
    )


def test_evaluate_returns_results_that_display_as_a_table(results):
    assert [result.label for result in results] == ["floor", "baseline", "yarn"]
    assert [row.length for row in results[-1].of("loss", "length")] == [256, 512]
    assert repr(results).startswith("tiny, trained on 256 tokens")
    assert results.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_data_frame_has_one_row_per_measured_value(results):
    frame = results.to_pandas()
    named = "model target task label measure value low high n clusters"
    assert {*frame} == {*named.split(), "length", "begin", "end"}
    assert len(frame) == sum(len(result.rows) for result in results)
    at_target = frame[(frame.label == "yarn") & (frame.length == 512)].iloc[0]
    row = results[-1].row("loss", length=512)
    assert (at_target.measure, at_target.value) == ("loss", row.value)
    assert (at_target.n, at_target.clusters) == (row.n, 2) == (2 * 511, 2)


def test_limit_seed_and_dtype_are_applied_and_recorded():
    lines = []
    options = {
        "limit": 1,
        "seed": 7,
        "dtype": "bfloat16",
        "device": "cpu",
        "say": lines.append,
    }
    tasks = (PerplexityTask(), RetrievalTask(lengths=(128,)))
    results = ropepatch.evaluate("tiny", Suite(to=(128,), tasks=tasks), **options)
    loss, retrieval = (result for result in results if result.label == "baseline")
    assert (loss.parameters["windows"], loss.parameters["pieces"]) == (1, 1)
    assert (retrieval.parameters["haystacks"], retrieval.parameters["seed"]) == (1, 7)
    assert {result.env["dtype"] for result in (loss, retrieval)} == {"torch.bfloat16"}
    assert [line for line in lines if line.startswith("on ")] == ["on cpu, bfloat16"]


# A checkpoint that ropepatch wrote


def test_a_written_checkpoint_is_measured_with_its_origin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = ropepatch.extend(
        "tiny", "written", to=512, reading=False, say=lambda line: None
    )
    asked = {"windows": 1, "lengths": [64, 512], "say": lambda line: None}

    def stop(line):
        if line.startswith("perplexity, baseline"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ropepatch.evaluate(written, **asked | {"say": stop})
    assert read_json(written.folder / "ropepatch.json")["evaluation"] == {}
    assert any(
        "evaluation is incomplete" in note for note in judge(written.folder).notes
    )
    results = ropepatch.evaluate(written, **asked)
    assert [result.label for result in results] == ["floor", "baseline", "yarn"]
    assert {(result.model["name"], result.target) for result in results} == {
        ("tiny", 512)
    }
    assert (written.folder / "evaluation.html").is_file()
    assert {*map(repr, ropepatch.read_results(written))} == {*map(repr, results)}
    assert not any(
        "evaluation is incomplete" in note for note in judge(written.folder).notes
    )
    labels = {"perplexity": ["baseline", "floor", "yarn"]}
    assert read_json(written.folder / "ropepatch.json")["evaluation"] == labels


def test_a_written_checkpoint_is_measured_alone_without_its_origin(tmp_path):
    source = write_checkpoint(tmp_path / "source" / "model", by_bytes=True)
    (tmp_path / "text.txt").write_text("a small story about a long rope. " * 60)
    asked = {"text": tmp_path / "text.txt", "windows": 1}
    once = ropepatch.extend(
        source, tmp_path / "once", to=128, reading=False, say=lambda line: None
    )
    before, lines = once.record, []
    results = ropepatch.evaluate(once, **asked, say=lines.append)
    assert {result.model["name"] for result in results} == {"once"}
    assert lines[0].startswith("warning: only this checkpoint is measured")
    assert read_json(once.folder / "ropepatch.json") == before
    suite = tmp_path / "suite.yaml"
    suite.write_text("{methods: [yarn], to: [2x], tasks: [{task: perplexity}]}")
    results = ropepatch.evaluate(once, suite, text=asked["text"], say=lines.append)
    assert {result.label for result in results} == {"baseline"}, "not scaled twice"
    place = tmp_path / "model"  # next to it, as the record names it
    shutil.copytree(source, place)
    with_other_weights(place)
    assert extension_of(Checkpoint(once.folder), lines.append) is None
    shutil.rmtree(place)
    place.symlink_to(source)
    results = ropepatch.evaluate(
        once, **asked, out=tmp_path / "results", say=lines.append
    )
    assert {result.label for result in results} == {"baseline", "yarn"}
    # The results are elsewhere
    assert read_json(once.folder / "ropepatch.json") == before
    twice = ropepatch.extend(
        once, tmp_path / "far" / "twice", to=256, say=lambda line: None
    )
    model = ropepatch.evaluate(twice, **asked, say=lines.append)[0].model
    assert (model["trained"], model["extended_from"]) == (256, 64)


def test_loss_curves_and_answers_convert_to_data_frames(tiny):
    model, tokenizer = tiny
    curve = ropepatch.perplexity(model, None, [list(range(3, 103))])
    assert list(curve.to_pandas().length) == [16, 32, 64, 100]
    answers = ropepatch.passkey(model, tokenizer, lengths=[128], haystacks=1)
    (answer,) = answers.to_pandas().to_dict("records")
    assert (answer["length"], answer["kind"]) == (128, "passkey")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval tiny --report shut", "error: shut already exists"),
        (
            "eval tiny --out file/results",
            "error: cannot write file/results: Not a directory",
        ),
        (
            "compare tiny --to 512 --report file/r.html",
            "error: cannot write file/r.html: Not a directory",
        ),
        ("eval tiny --suite s.yaml", "haystacks must be"),
        (
            "eval tiny --suite harness --limit 1",
            "error: ropepatch_long_perplexity needs text",
        ),
    ],
)
def test_invalid_outputs_and_options_raise_errors_before_any_measurement(
    words, message, tmp_path, run_here, monkeypatch
):
    (tmp_path / "shut").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    (tmp_path / "s.yaml").write_text(
        "to: 1x\ntasks: [{task: perplexity}, {task: retrieval, haystacks: none}]\n"
    )
    monkeypatch.setattr("ropepatch.model.checkpoint.Checkpoint.load", None)
    before = sorted(tmp_path.rglob("*"))
    done = run_here(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_results_are_returned_if_writing_the_report_fails(tmp_path, monkeypatch):
    def fails(results, page, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ropepatch.report.page.write_report", fails)
    lines, report = [], tmp_path / "r.html"
    results = ropepatch.evaluate(
        "tiny", windows=1, lengths=[128], report=report, say=lines.append
    )
    assert {one.task for one in results} == {"perplexity"}
    assert lines[-1] == "warning: no report: [Errno 28] No space left on device"
