"""Errors that can be known in advance are raised before any work, and late errors lose no results."""

import re
import shutil
from pathlib import Path

import pytest
from run_recipes import small_recipe
from safetensors.torch import load_file, save_file

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import read_result
from ropepatch.model.source import TINY
from ropepatch.training.recipe import Data


def recipe_of(text):
    """A recipe that trains on a text."""
    return small_recipe(data=Data(sources=(Texts(text=text),), windows=(64,), tokens_per_batch=128))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval tiny --report shut", "error: shut already exists"),
        ("eval tiny --out file/results", "error: cannot write file/results: Not a directory"),
        ("eval tiny --out dangling", "error: --out must be a folder, got dangling"),
        ("eval tiny --report dangling", "error: dangling already exists"),
        ("compare tiny --to 512 --report file/r.html", "error: no folder file for the report"),
        ("eval tiny --suite s.yaml", "haystacks must be"),
        ("eval tiny --suite harness --limit 1", "error: ropepatch_long_perplexity needs text"),
        (
            "extend tiny --to 512 --text nofile.txt --dry-run",
            "error: --text has no effect without --eval",
        ),
        ("extend tiny --to 512 --field body", "error: --field has no effect without --eval"),
        ("extend tiny --to 512 --distil --split train", "error: --split needs --text"),
    ],
)
def test_invalid_outputs_and_options_raise_errors_before_any_measurement(
    words, message, tmp_path, run_here, monkeypatch
):
    (tmp_path / "shut").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "s.yaml").write_text(
        "to: 1x\ntasks: [{task: perplexity}, {task: retrieval, haystacks: none}]\n"
    )
    monkeypatch.setattr("ropepatch.model.checkpoint.load_model", None)
    before = sorted(tmp_path.rglob("*"))
    done = run_here(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "tiny", "to": "1k"},
            "data.windows contains 2048 tokens, more than the target length of 1024",
        ),
        ({"recipe": recipe_of("short.txt")}, "short.txt has .* tokens, too few to hold out 1 x 512"),
        ({"recipe": recipe_of("titles.jsonl")}, "titles.jsonl, line 1 has no field 'text'"),
        ({"recipe": small_recipe(), "out": "shut"}, "shut already exists"),
        ({"recipe": small_recipe(), "out": "begun"}, "begun.run exists and is not a run"),
        ({"out": "file/out"}, "cannot write .*file/out: Not a directory"),
        ({"push": "no/such/name"}, "'no/such/name' is not a valid repository name"),
        ({"include": ["key"]}, "key contains a Hub access token"),
        ({"model": "cut"}, "1 missing keys, for instance model.embed_tokens"),
        ({"model": "adapted"}, "adapted contains a model and a PEFT adapter"),
    ],
    ids=str,
)
def test_a_dry_run_reports_the_error_that_extend_raises_before_loading_weights(
    options, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("shut", "begun.run/other"):
        Path(name).mkdir(parents=True)
    for name, text in (
        ("file", ""),
        ("begun.run/.lock", ""),
        ("short.txt", "a tale"),
        ("titles.jsonl", '{"title": "a"}\n'),
    ):
        Path(name).write_text(text)
    for name in ("cut", "adapted", "model"):
        shutil.copytree(TINY, name)
    save_file(dict(list(load_file(TINY / "model.safetensors").items())[1:]), "cut/model.safetensors")
    Path("adapted/adapter_config.json").write_text("{}")
    Path("model/key").write_text("hf_" + 34 * "a")
    monkeypatch.setattr("ropepatch.model.checkpoint.load_model", None)
    options = {"model": "model", "to": 512, "say": lambda line: None} | options
    before = sorted(tmp_path.rglob("*"))
    first, *_ = ropepatch.extend(**options, dry_run=True).obstacles
    assert re.search(message, str(first))
    with pytest.raises(RopepatchError, match=re.escape(str(first))):
        ropepatch.extend(**options)
    assert sorted(tmp_path.rglob("*")) == before


def test_results_are_kept_if_writing_the_report_fails(tmp_path, monkeypatch):
    def fails(results, page, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ropepatch.report.write_report", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RopepatchError, match=r"cannot write the report: .*No space left") as caught:
        ropepatch.evaluate("tiny", windows=1, lengths=[128], report=tmp_path / "r.html")
    (folder,) = tmp_path.glob("ropepatch-results-*")
    assert str(folder) in caught.value.hint
    assert {read_result(file).task for file in folder.glob("*.json")} == {"perplexity"}
