"""The command line: fast help, results on stdout, progress on stderr, exit codes."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial

import pytest
from checkpoint_folders import write_checkpoint

import ropepatch
from ropepatch import HOME, METHODS, REMAPPINGS
from ropepatch import __version__ as ropepatch_version
from ropepatch.cli import app
from ropepatch.cli.derive import ONLY_IN_PYTHON, written
from ropepatch.cli.parameters import parse_settings
from ropepatch.errors import argument, arguments_written
from ropepatch.model.checkpoint import TINY

COMMANDS = [name for name in app if not name.startswith("-")]
LINES = {  # commands without a model: exit code, heaviest allowed import, and a part of the output
    "": (2, None, "Usage: ropepatch COMMAND"),
    "--help": (0, None, "Usage: ropepatch COMMAND"),
    "-h": (0, None, "Usage: ropepatch COMMAND"),
    "--version": (0, None, ropepatch_version),
    "extnd": (2, None, ""),
    "recipes": (0, None, "llama2-7b-yarn-32k"),
    "recipes tiny": (0, None, "yaml-language-server"),
    "recipes tinny": (2, None, ""),
    "suites": (0, None, "demo "),
    "suites demo --json": (0, None, '"suite": "demo"'),
    "methods": (0, "torch", "position remapping"),
    "methods yarm": (2, "torch", ""),
    "encodings alibi": (0, "torch", "alibi ("),
}
EACH_LINE = """
import json, sys, ropepatch.cli
for line, (code, heaviest, _) in json.loads(sys.argv[1]).items():
    sys.argv = ["ropepatch", *line.split(), *[""] * line.endswith(" ")]
    try: ropepatch.cli.main()
    except SystemExit as end: assert (end.code or 0) == code, line
    heavy = {"torch", "transformers"} & set(sys.modules)
    assert heavy <= {heaviest}, (line, heavy)
    print("/" + line)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_checkpoint(
        tmp_path_factory.mktemp("source") / "tiny-llama", by_bytes=True
    )
    (folder.parent / "text.txt").write_text("a small story about a long rope. " * 60)
    return folder


def test_commands_that_need_no_model_do_not_import_transformers():
    words = [sys.executable, "-c", EACH_LINE, json.dumps(LINES)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    parts = re.split(r"^/(.*)\n", done.stdout, flags=re.MULTILINE)
    for (line, (_, _, expected)), text in zip(LINES.items(), parts[::2], strict=False):
        assert expected in text, line
        assert expected or not text, line
    assert all(
        re.search(rf"^ {command} +\S", parts[0], re.MULTILINE) for command in COMMANDS
    )


def test_importing_ropepatch_does_not_import_torch_pydantic_rich_or_yaml():
    code = "import sys, ropepatch; assert not {'torch', 'pydantic', 'rich', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


VERBS = {"eval": "evaluate", "doctor": "diagnose"}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_options_match_the_python_arguments_and_have_help(command, run_here):
    text = run_here(command, "--help").stdout
    usage, _, examples = text.partition("Examples:")
    assert f"\n  ropepatch {command}" in examples
    assert "[ARGS]" not in usage
    assert "eval/" not in text  # a folder that pip does not install
    found = {
        one.name: one
        for one in app[command].assemble_argument_collection(parse_docstring=True)
    }
    assert all(one.parameter.help for one in found.values())
    in_python = r"`(to|method|out|text|recipe|model|settings)`"
    assert not re.search(in_python, usage)
    verb = VERBS.get(command, command)
    if verb not in HOME or command == "plot":
        return
    offered = {one.field_info.name for one in found.values()}
    arguments = (
        inspect.signature(getattr(ropepatch, verb)).parameters.keys()
        - ONLY_IN_PYTHON
        - {"parameters"}
    )
    assert arguments <= offered
    own = {"quiet", "as_json", "settings", "out", "fix", "show", "engine"}
    assert offered <= arguments | own


PYTHON = re.compile(r"\bin Python\b|loaded model|\*\*|`ropepatch\.|\bFOR\b")


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal_and_contains_no_python(
    command, width, run_here, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    # It keeps the width of its first use
    monkeypatch.setattr(app[command], "_fallback_console", None)
    text, _, examples = run_here(command, "--help").stdout.partition("\nExamples:")
    assert not PYTHON.search(text)
    assert not any(
        f"`{name}" in text for name in ropepatch.__all__ if name[0].isupper()
    )
    assert max(map(len, text.splitlines())) <= width
    assert width < 80 or all(
        line.startswith("  ropepatch") for line in examples.splitlines()[1:]
    )


def test_usual_options_come_first_and_extend_has_few(run_here):
    text = run_here("extend", "--help").stdout
    parts = ["Arguments", "Usual options", " --to TO", "Further"]
    assert [*map(text.index, parts)] == sorted(map(text.index, parts))
    assert len(app["extend"].assemble_argument_collection()) - 1 <= 16


def test_messages_name_arguments_as_the_caller_writes_them():
    names = {"to": "--to", "methods": "--methods", "settings": "--set"}
    given = (("to", "32k"), ("method", ""), ("seed", ""), ("ramp", "index"))
    in_python = ["`to=32k`", "`method`", "`seed`", "`ramp=index`"]
    assert [argument(*one) for one in given] == in_python
    with arguments_written(partial(written, names)):
        named = [argument(*one) for one in given]
    assert named == ["--to 32k", "--methods", "`seed`", "--set ramp=index"]
    with arguments_written(partial(written, {})):  # of another command
        assert argument("original", 32768) == "--original 32768"


def test_plan_prints_the_plan_as_text_or_json(checkpoint, run_here):
    text = run_here("plan", checkpoint, "--to", "256")
    assert (text.returncode, text.stderr) == (0, "")
    assert "64 -> 256 tokens" in text.stdout
    plan = json.loads(run_here("plan", checkpoint, "--to", "256", "--json").stdout)
    assert (plan["method"], plan["factor"], plan["target"]) == ("yarn", 4.0, 256)
    assert len(plan["inv_freq"]) == plan["rotary_dim"] // 2


def test_extend_names_the_folder_after_model_method_and_target(
    checkpoint, tmp_path, run_here
):
    done = run_here("extend", checkpoint, "--to", "1k", "--method", "ntk", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    assert folder.name == "tiny-llama-ntk-1k"
    assert "logits equal" in done.stdout
    load, measure, publish = done.stderr.splitlines()[-3:]
    assert load.startswith(
        "load:    python -c 'from transformers import AutoModelForCausalLM; "
    )
    assert done.stdout.startswith(f"{folder.name}: ")
    word = shlex.quote(str(folder))
    assert f"ropepatch eval {word} --text FILE" in measure
    assert f"ropepatch push {word}" in publish


def test_quiet_prints_only_results(run_here):
    done = run_here("eval", "tiny", "--quiet", "--limit", "1")
    assert "Loss (nats/token)" in done.stdout
    assert not done.stderr


def test_eval_prints_baseline_and_methods_by_length(checkpoint, run_here):
    words = ("eval", checkpoint, "--text", checkpoint.parent / "text.txt")
    words += ("--method", "linear", "--method", "yarn", "--to", "256")
    done = run_here(*words)
    assert done.returncode == 0, done.stderr
    headline, *lines = done.stdout.splitlines()
    labels = ["baseline", "linear", "yarn"]
    assert headline.startswith("tiny-llama, trained on 64 tokens. ")
    assert "6 pieces of text.txt, 1,536 tokens in total" in headline
    first = lines.index("Loss (nats/token)")
    assert [line.split()[0] for line in lines[first + 2 : first + 5]] == labels
    assert all(f"{length} tokens" in done.stdout for length in (32, 64, 128, 256))
    results = json.loads(
        run_here(*words, "--lengths", "32,128", "--windows", "3", "--json").stdout
    )
    assert [result["label"] for result in results] == labels
    assert results[0]["parameters"]["pieces"] == 3
    rows = [row for row in results[0]["rows"] if row["at"].keys() == {"length"}]
    counts = {row["at"]["length"]: row["n"] for row in rows}
    # And at the original context length
    assert counts == {32: 3 * 31, 64: 3 * 63, 128: 3 * 127}


SUITE = """
methods: [linear, yarn]
to: [2x]
tasks:
  - {task: perplexity, windows: 2}
  - {task: retrieval, lengths: [0.5x], haystacks: 3}
"""


@pytest.mark.slow
def test_eval_reuses_the_results_of_a_suite(tmp_path, run_here):
    (tmp_path / "mine.yaml").write_text(SUITE)
    words = ("eval", "tiny", "--suite", "mine.yaml", "--out", "out")
    done = run_here(*words, "--report", "report.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").iterdir())) == 7
    assert "Effective length at 85.6%" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "<table" in page
    again = run_here(*words, cwd=tmp_path)
    assert again.stdout == done.stdout
    drawn = run_here(
        "plot", *sorted((tmp_path / "out").iterdir()), "--out", "figures", cwd=tmp_path
    )
    assert drawn.returncode == 0, drawn.stderr
    names = {file.suffix for file in (tmp_path / "figures").iterdir()}
    assert names == {".png", ".svg"}


# Output


def test_methods_lists_every_method_and_describes_one(run_here):
    listed = json.loads(run_here("methods", "--json").stdout)
    assert [method["method"] for method in listed] == [*METHODS, *REMAPPINGS]
    first, second = run_here("methods").stdout.strip().split("\n\n")
    assert first.split()[0] == "scaling"
    assert second.split()[:2] == ["position", "remapping"]
    assert "--set rope_theta=VALUE (required)" in run_here("methods", "abf").stdout
    assert "--set sinks=4\n" in run_here("methods", "lambda").stdout


def test_set_options_are_numbers_names_lists_and_files(tmp_path):
    (tmp_path / "divisors.json").write_text("[1, 2.5]")
    settings = ["beta_fast=16", "truncate=false", "ramp=rotations"]
    parsed = {"beta_fast": 16, "truncate": False, "ramp": "rotations"}
    assert parse_settings("yarn", settings) == parsed
    for text in ("1,2.5", "[1, 2.5]", str(tmp_path / "divisors.json")):
        assert parse_settings("custom", [f"divisors={text}"]) == {"divisors": [1, 2.5]}


def test_plan_exits_with_1_where_an_engine_cannot_serve(run_here):
    for method, code in (("yarn", 0), ("dynamic", 1)):
        words = ("plan", "tiny", "--to", "1k", "--method", method, "--for", "vllm")
        assert run_here(*words).returncode == code


@pytest.mark.slow
def test_commands_escape_control_characters_in_folder_names(tmp_path, run_here):
    name = "a\x1b[2Jb"
    shutil.copytree(TINY, tmp_path / name)
    (tmp_path / "t.txt").write_text(
        "<|endoftext|>".join("Once there was a fox. " * 99 for _ in range(40))
    )
    (tmp_path / f"{name}-suite.yaml").write_text(
        "tasks: [{task: perplexity}]  # \x1b[2J"
    )
    extended = f"{name}-yarn-512"
    for words in (
        ["plan", name, "--to", "512"],
        ["train", name, "--to", "2k", "--recipe", "tiny", "--dry-run"],
        ["extend", name, "--to", "512"],
        ["eval", extended, "--suite", "demo", "--text", "t.txt", "--limit", "1"],
        ["doctor", extended],
        ["plot", extended, "--out", f"{name}-figures"],
        ["suites", f"{name}-suite.yaml"],
        ["export", extended, "--fold-attention"],
        ["push", extended, "me/it", "--dry-run"],
        ["eval", f"{name}x", "--text", "t.txt"],
    ):
        done = run_here(*words, cwd=tmp_path)
        assert done.returncode == (
            2 if words[1] in (f"{name}x", f"{name}-suite.yaml") else 0
        ), done.stderr
        assert "\x1b" not in done.stdout + done.stderr, words
