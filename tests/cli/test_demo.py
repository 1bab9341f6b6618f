"""The demo does what the README claims."""

import os
import re
import subprocess
import sys
from pathlib import Path

import measured
import pytest
from transformers import AutoModelForCausalLM

from ropepatch.verbs.evaluate import read_results

pytestmark = pytest.mark.slow

NEAR = {
    "loss": 0.02,
    "log_prob": 0.5,
    "found": 0.1,
    "gain": 0.05,
}  # differences allowed on another processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the demo; in CI it runs before the tests, with only the packages of a new user."""
    before = os.environ.get("ROPEPATCH_DEMO")
    return Path(before).resolve() if before else tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def done(folder):
    """The demo as a new user runs it, once for this file."""
    line = [sys.executable, "-m", "ropepatch", "demo", "--out", "out"]
    if (folder / "done").exists():
        return subprocess.CompletedProcess(
            line, 0, *((folder / to).read_text() for to in ("stdout", "stderr"))
        )
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_the_demo_reproduces_the_documented_results(done, folder):
    found = {
        (one.task, one.label): one
        for one in read_results(folder / "out" / "evaluation")
    }
    stated = {
        (one.task, one.label): one for one in read_results(measured.RESULTS / "demo")
    }
    assert found.keys() == stated.keys()
    for key, result in stated.items():
        rows = {(row.measure, *row.at.items()): row.value for row in found[key].rows}
        lengths = [row for row in result.rows if row.at.keys() == {"length"}]
        assert lengths
        for row in lengths:
            value = rows[(row.measure, *row.at.items())]
            assert value == pytest.approx(row.value, abs=NEAR[row.measure]), (key, row)


def test_yarn_in_the_demo_has_lower_loss_and_retrieves_passkeys(done, folder):
    rows = {
        (one.label, row.measure, row.length): row.value
        for one in read_results(folder / "out" / "evaluation")
        for row in one.rows
        if row.at.keys() == {"length"}
    }
    assert (
        rows["baseline", "loss", 2048]
        > 2 * rows["yarn", "loss", 2048]
        > 2 * rows["floor", "loss", 2048]
    )
    for length in (512, 1024, 2048):
        assert rows["baseline", "found", length] <= 0.1
        assert rows["yarn", "found", length] >= 0.5


def test_the_demo_prints_few_lines_and_one_measured_verdict(done, folder):
    assert len(done.stdout.splitlines()) <= 15
    assert len(done.stderr.splitlines()) <= 4
    (found,) = (
        row
        for one in read_results(folder / "out" / "evaluation")
        for row in one.rows
        if (one.label, row.measure, row.at) == ("yarn", "found", {"length": 2048})
    )
    assert (
        f"tiny retrieves {found.value * 20:.0f} of 20 passkeys at 2,048 tokens, 8 times its original context "
        "length; 0 of 20 before."
    ) in done.stdout.splitlines()
    for unhelpful in ("Effective length", "gained"):
        assert unhelpful not in done.stdout


def test_the_demo_writes_the_picture_that_it_names(done, folder):
    (named,) = re.findall("^picture: (.*)$", done.stdout, re.MULTILINE)
    assert (folder / named).read_bytes().startswith(b"\x89PNG")


def test_the_demo_writes_a_report_and_a_checkpoint(done, folder):
    assert (folder / "out" / "evaluation.html").stat().st_size > 50_000
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert model.config.max_position_embeddings == 2048
    assert model.config.rope_parameters["rope_type"] == "yarn"
