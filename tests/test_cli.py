"""The command line as a user meets it: fast help, results on stdout, progress on stderr, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import tiny_llama_folder

from ropepatch import METHODS, RopepatchError
from ropepatch.cli.arguments import parse_settings
from ropepatch.lengths import parse_length, parse_lengths, short_length

COMMANDS = ["extend", "plan", "eval", "compare", "plot", "methods", "demo"]


def ropepatch(*words, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "ropepatch", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("source") / "tiny-llama")
    (folder.parent / "text.txt").write_text("a small story about a long rope. " * 60)
    return folder


def test_help_and_import_load_neither_torch_nor_transformers():
    code = (
        "import sys, ropepatch, ropepatch.cli\n"
        "sys.argv = ['ropepatch', '--help']\n"
        "try: ropepatch.cli.main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_ends_with_examples_on_lines_of_their_own(command):
    done = ropepatch(command, "--help")
    assert done.returncode == 0
    assert f"\n    ropepatch {command}" in done.stdout.split("Examples:")[1]


def test_plan_prints_the_plan_and_json_of_the_same(checkpoint):
    text = ropepatch("plan", checkpoint, "--to", "256")
    assert (text.returncode, text.stderr) == (0, "")
    assert "64 -> 256 tokens" in text.stdout
    plan = json.loads(ropepatch("plan", checkpoint, "--to", "256", "--json").stdout)
    assert (plan["method"], plan["factor"], plan["target"]) == ("yarn", 4.0, 256)
    assert len(plan["inv_freq"]) == plan["rotary_dim"] // 2
    assert [engine["engine"] for engine in plan["engines"]][:2] == ["transformers 5.x", "transformers 4.x"]


def test_extend_writes_a_folder_named_after_what_it_is(checkpoint, tmp_path):
    done = ropepatch("extend", checkpoint, "--to", "1k", "--method", "ntk", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    assert folder.name == "tiny-llama-ntk-1k"
    assert "logits equal" in done.stdout
    again = ropepatch("extend", checkpoint, "--to", "1k", "--method", "ntk", cwd=tmp_path)
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(checkpoint, tmp_path):
    done = ropepatch("extend", checkpoint, "--to", "256", "--dry-run", cwd=tmp_path)
    assert done.stdout == ropepatch("plan", checkpoint, "--to", "256").stdout
    assert not list(tmp_path.iterdir())


def test_eval_prints_before_and_after_by_length(checkpoint):
    text = checkpoint.parent / "text.txt"
    done = ropepatch(
        "eval", checkpoint, "--text", text, "--method", "linear", "--method", "yarn", "--to", "256"
    )
    assert done.returncode == 0, done.stderr
    headline, header = done.stdout.splitlines()[:2]
    assert "tiny-llama, trained on 64 tokens: " in headline
    assert headline.endswith("text.txt, 6 x 256 tokens")
    assert header.split() == ["as", "it", "is", "linear", "yarn"]
    for length in (32, 64, 128, 256):
        assert f"{length} tokens" in done.stdout


def test_eval_as_json_is_a_list_of_results(checkpoint):
    text = checkpoint.parent / "text.txt"
    done = ropepatch("eval", checkpoint, "--text", text, "--lengths", "32,128", "--windows", "3", "--json")
    (result,) = json.loads(done.stdout)
    assert result["parameters"]["pieces"] == 3
    rows = {row["length"]: row["tokens"] for row in result["tables"]["by_length"]}
    assert rows == {32: 3 * 31, 128: 3 * 127}
    assert {"ropepatch", "transformers", "torch", "device", "dtype"} <= result["env"].keys()


SUITE = """
methods: [linear, yarn]
to: [2x]
tasks:
  - {task: perplexity, windows: 2}
  - {task: passkey, lengths: [0.5x], depths: [0.5], trials: 2}
"""


def test_eval_runs_a_suite_into_a_folder_and_a_report_and_again_from_the_folder(tmp_path):
    (tmp_path / "mine.yaml").write_text(SUITE)
    words = ("eval", "tiny", "--suite", "mine.yaml", "--out", "out")
    done = ropepatch(*words, "--report", "report.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").iterdir())) == 7
    assert "longest with 85.6%" in done.stdout
    assert "<table" in (tmp_path / "report.html").read_text()
    again = ropepatch(*words, cwd=tmp_path)
    assert again.stdout == done.stdout
    drawn = ropepatch("plot", *sorted((tmp_path / "out").iterdir()), "--out", "figures", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    names = {file.suffix for file in (tmp_path / "figures").iterdir()}
    assert names == {".png", ".svg"}


def test_compare_ranks_and_recommends(tmp_path):
    words = ("compare", "tiny", "--methods", "linear,yarn", "--to", "512", "--windows", "4", "--trials", "1")
    done = ropepatch(*words, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranked = [line.split()[0] for line in done.stdout.splitlines()[1:5]]
    assert ranked == ["yarn", "as", "linear", "floor"]
    assert done.stdout.endswith("ropepatch extend tiny --to 512 --method yarn\n")
    record = json.loads(ropepatch(*words, "--out", "out", "--json", cwd=tmp_path).stdout)
    assert record["ranking"]["recommended"] == "yarn"
    assert [row["label"] for row in record["ranking"]["rows"]] == ["yarn", "as it is", "linear"]


def test_compare_without_digits_in_the_vocabulary_asks_for_no_pass_keys(checkpoint):
    text = checkpoint.parent / "text.txt"
    done = ropepatch("compare", checkpoint, "--methods", "yarn", "--to", "128", "--text", text)
    assert done.returncode == 0, done.stderr
    assert "warning: no pass keys are asked for: " in done.stderr


def test_methods_lists_every_method_and_describes_one():
    listed = json.loads(ropepatch("methods", "--json").stdout)
    assert [method["method"] for method in listed] == list(METHODS)
    one = ropepatch("methods", "abf").stdout
    assert "--set rope_theta=VALUE (required)" in one
    assert ropepatch("methods", "yarm").returncode == 2


@pytest.mark.parametrize("words", [[], ["extend"], ["plan", "x"], ["plan", "x", "--to"], ["nonsense"]])
def test_a_malformed_command_line_is_a_user_error(words):
    done = ropepatch(*words)
    assert done.returncode in (0, 2) if not words else done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("32k", 32768), ("1M", 1048576), (" 8K ", 8192)]
)
def test_lengths_are_read_in_units_of_1024(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "4.5k", "k", "32kb", "1e3", "٣", "9" * 30])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(RopepatchError, match="not a length"):
        parse_length(text)


@pytest.mark.parametrize("tokens", [1, 1000, 1024, 1536, 32768, 1048576, 3 * 1048576])
def test_a_short_length_reads_back(tokens):
    assert parse_length(short_length(tokens)) == tokens


def test_lengths_come_back_ascending_and_each_once():
    assert parse_lengths("4k,256,1k,256") == [256, 1024, 4096]


def test_settings_take_the_types_of_the_method(tmp_path):
    (tmp_path / "divisors.json").write_text("[1, 2.5]")
    settings = ["beta_fast=16", "truncate=false", "ramp=rotations", "attention_factor=none"]
    assert parse_settings("yarn", settings) == {
        "beta_fast": 16.0, "truncate": False, "ramp": "rotations", "attention_factor": None,
    }  # fmt: skip
    assert parse_settings("custom", ["divisors=1,2"]) == {"divisors": (1.0, 2.0)}
    assert parse_settings("custom", [f"divisors={tmp_path / 'divisors.json'}"]) == {"divisors": (1.0, 2.5)}


@pytest.mark.parametrize("setting", ["beta_fast=fast", "truncate=maybe", "beta_fast", "attention_factor="])
def test_a_setting_of_another_type_is_refused(setting):
    with pytest.raises(RopepatchError):
        parse_settings("yarn", [setting])
