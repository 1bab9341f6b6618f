"""Arguments that may be written in several ways, in Python and on the command line."""

import shutil

import pytest
from made_results import reading

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Method


@pytest.fixture
def suites(monkeypatch):
    """The suites that would be measured."""
    seen = []

    def measured(suite, source, **options):
        seen.append(suite)
        return iter(())

    monkeypatch.setattr("ropepatch.evaluation.measuring.measure", measured)
    return seen


@pytest.mark.parametrize("lengths", ["2x,64,0.5x", [512, "64", "0.5x"]])
def test_lengths_may_be_multiples_of_the_original_context_length(lengths, suites):
    ropepatch.evaluate("tiny", lengths=lengths)
    assert suites[0].tasks[0].lengths == (64, 128, 512)
    assert suites[0].to == (512,)


def test_methods_are_names_objects_or_dictionaries(suites):
    method = Method(name="ntk-by-parts", parameters={"beta": 16.0})
    for given in (method, {"name": "ntk-by-parts", "beta": 16.0}):
        ropepatch.evaluate("tiny", methods=[given], to=512)
    assert [suite.methods for suite in suites] == [(method,)] * 2


def test_functions_on_loaded_models_accept_the_same_arguments_as_commands(tmp_path):
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    answers = ropepatch.passkey(model, tokenizer, lengths="128,256", haystacks=1)
    assert answers == ropepatch.passkey(
        model, tokenizer, lengths=["128", 256], haystacks=1
    )
    with pytest.raises(RopepatchError, match="'2y' is not a length"):
        ropepatch.passkey(model, tokenizer, lengths="2y")


def test_plot_draws_plans_and_folders_of_results(tmp_path):
    assert ropepatch.plot(ropepatch.plan("tiny", to="2x")).axes
    reading("yarn", [1.0] * 3).write(tmp_path / "0.json")
    assert ropepatch.plot(tmp_path).axes
    with pytest.raises(RopepatchError, match="unknown figure 'loss'"):
        ropepatch.plot(tmp_path, "loss")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": ["a", "b"]}, "text must be a valid string"),
        ({"to": ["4x"]}, "is not a length in tokens"),
    ],
)
def test_errors_in_python_name_arguments_of_the_function(options, message):
    with pytest.raises(RopepatchError, match=message):
        ropepatch.evaluate("tiny", **options)


@pytest.mark.parametrize(
    "command", [["extend", ".", "--to", "256"], ["export", ".", "--fold-attention"]]
)
def test_the_default_folder_is_next_to_the_working_folder(
    command, template, tmp_path, run_here
):
    shutil.copytree(template, tmp_path / "model")
    if command[0] == "export":
        ropepatch.extend(template, tmp_path / "scaled", to=256, reading=False)
        command[1] = "../scaled"
    done = run_here(
        *command, cwd=tmp_path / ("model" if command[1] == "." else "scaled")
    )
    assert done.returncode == 0, done.stderr
    written = "model-yarn-256" if command[1] == "." else "scaled-folded"
    assert (tmp_path / written / "config.json").is_file()


def test_no_windows_are_not_the_default_number_of_windows():
    for call in (ropepatch.evaluate, ropepatch.compare):
        with pytest.raises(
            RopepatchError, match="windows must be greater than 0, got 0"
        ):
            call("tiny", to="2x", windows=0)
