"""Arguments that may be written in several ways, in Python and on the command line."""

import shutil

import pytest
from made_results import reading
from tiny_models import tiny_model

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.suites import candidates
from ropepatch.settings import listed

WAYS = [
    ("yarn,ntk", ["yarn", "ntk"]),
    (["yarn", "ntk"], ["yarn", "ntk"]),
    (" yarn ", ["yarn"]),
    (64, [64]),
]


@pytest.mark.parametrize(
    ("written", "read"), [*WAYS, ({"name": "yarn"}, [{"name": "yarn"}])]
)
def test_lists_may_be_comma_separated_text_or_a_single_value(written, read):
    assert listed(written) == read


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


def test_the_command_line_accepts_the_lengths_that_python_accepts(suites, run_here):
    run_here("eval", "tiny", "--lengths", "2x,64")
    assert suites[0].tasks[0].lengths == (64, 512)
    assert run_here("eval", "tiny", "--lengths", "2y").stderr.startswith(
        "error: '2y' is not a length"
    )


@pytest.mark.parametrize("methods", ["linear,all", ["all"]])
def test_method_all_selects_every_candidate(methods, suites):
    ropepatch.evaluate("tiny", methods=methods, to="2x")
    assert {method.name for method in suites[0].methods} == {*candidates()}


def test_functions_on_loaded_models_accept_the_same_arguments_as_commands(tmp_path):
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    answers = ropepatch.passkey(model, tokenizer, lengths="128,256", haystacks=1)
    assert answers == ropepatch.passkey(
        model, tokenizer, lengths=["128", 256], haystacks=1
    )
    with pytest.raises(RopepatchError, match="'2y' is not a length"):
        ropepatch.passkey(model, tokenizer, lengths="2y")
    with ropepatch.patch(model, method="ntk", to="2x"):
        assert ropepatch.active(model).plan.method.name == "ntk"
    with ropepatch.patch(model, to=512):
        assert ropepatch.active(model).plan.method.name == "yarn"


def test_plot_draws_plans_and_folders_of_results(tmp_path):
    assert ropepatch.plot(ropepatch.plan("tiny", to="2x")).axes
    reading("yarn", [1.0] * 3).write(tmp_path / "0.json")
    assert ropepatch.plot(tmp_path).axes
    with pytest.raises(RopepatchError, match="unknown figure 'loss'"):
        ropepatch.plot(tmp_path, "loss")


def test_errors_in_python_name_arguments_of_the_function():
    with pytest.raises(
        RopepatchError, match="`windows` cannot be combined with `documents`"
    ):
        ropepatch.evaluate("tiny", windows=1, documents=1)


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (
            lambda model: ropepatch.evaluate(model),
            "must be .*, got <class .*LlamaForCausalLM'>",
            "pass the folder",
        ),
        (
            lambda model: ropepatch.evaluate("tiny", text=["a", "b"]),
            "text must be a valid string",
            "",
        ),
        (
            lambda model: ropepatch.evaluate("tiny", to=["4x"]),
            "is not a length in tokens",
            "",
        ),
    ],
)
def test_the_hint_of_a_plausible_wrong_call_states_the_right_one(call, message, hint):
    with pytest.raises(RopepatchError, match=message) as error:
        call(tiny_model("llama"))
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    "command", [["extend", ".", "--to", "256"], ["export", ".", "--fold-attention"]]
)
def test_the_default_folder_of_the_working_folder_is_next_to_it(
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
