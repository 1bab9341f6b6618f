"""The demo does what the README says it does, and prints what stands there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import measured
import pytest
from readme import README
from transformers import AutoModelForCausalLM

from ropepatch.cli import demo as command
from ropepatch.cli import main

pytestmark = pytest.mark.slow

RESULT = README.parent / "eval" / "results" / "demo.json"
NATS = 0.02  # what another processor may change
LOG_PROB = 0.05  # the same, of the answers; relative
KEYS = 2  # of 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the demo has run: in CI before the tests, with the packages of a newcomer alone."""
    before = os.environ.get("ROPEPATCH_DEMO")
    return Path(before).resolve() if before else tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def done(folder) -> subprocess.CompletedProcess[str]:
    """The demo as a newcomer runs it, once for this file."""
    line = [sys.executable, "-m", "ropepatch", "demo", "--out", "out"]
    if (folder / "done").exists():
        return subprocess.CompletedProcess(
            line, 0, *((folder / to).read_text() for to in ("stdout", "stderr"))
        )
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def record(done, folder) -> dict:
    return json.loads((folder / "out" / "demo.json").read_text())


def test_the_table_it_prints_has_the_rows_of_the_readme(done, record):
    printed = {tuple(line.split()) for line in done.stdout.splitlines()}
    rows = [
        line for line in measured.demo(record).splitlines() if line.startswith("| ") and " at " not in line
    ]
    assert len(rows) == 11
    for row in rows:
        assert tuple(row.replace("|", " ").split()) in printed


def test_the_demo_finds_again_what_the_result_file_says(record):
    stated = json.loads(RESULT.read_text())
    assert record["floor"] == pytest.approx(stated["floor"], abs=1e-9)
    for name, result in record["results"].items():
        assert result["nats"] == pytest.approx(stated["results"][name]["nats"], abs=NATS)
        for length, cell in result["passkey"].items():
            expected = stated["results"][name]["passkey"][length]
            assert cell["n"] == expected["n"]
            assert abs(cell["correct"] - expected["correct"]) <= KEYS
            assert cell["log_prob"] == pytest.approx(expected["log_prob"], rel=LOG_PROB, abs=LOG_PROB)


def test_the_demo_shows_what_the_readme_claims(record):
    before, after = record["results"]["before"], record["results"]["after"]
    assert before["nats"]["1024 to 2048"] > 2 * after["nats"]["1024 to 2048"]
    for length in ("512", "1024", "2048"):
        assert before["passkey"][length]["correct"] <= 0.1 * before["passkey"][length]["n"]
        assert after["passkey"][length]["correct"] >= 0.5 * after["passkey"][length]["n"]
    for nats in (before["nats"], after["nats"]):  # never below the floor by more than luck
        assert all(nats[span] > floor - 0.01 for span, floor in record["floor"].items())


def test_results_go_to_stdout_and_progress_to_stderr(done):
    assert "nats per token" in done.stdout
    assert "reading" not in done.stdout
    assert "extending tiny" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_figures_and_a_checkpoint_that_stock_transformers_loads_are_there(done, folder):
    for name in ("loss.png", "loss.svg", "passkey.png", "passkey.svg"):
        assert (folder / "out" / name).stat().st_size > 5_000
    model = AutoModelForCausalLM.from_pretrained(folder / "out" / "tiny-yarn-2k")
    assert model.config.max_position_embeddings == 2048
    assert model.config.rope_parameters["rope_type"] == "yarn"


def test_an_interrupted_demo_exits_130_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropepatch.evaluation.retrieval.passkey", interrupt)
    monkeypatch.setattr("ropepatch.evaluation.perplexity.perplexity", lambda *arguments, **options: None)
    monkeypatch.setattr("sys.argv", ["ropepatch", "demo", "--out", str(tmp_path / "new" / "out")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_are_no_figures_and_a_line_says_how_to_get_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command._draw(tmp_path, {}, None, {}, 256) == []
    assert 'pip install "ropepatch[plot]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
