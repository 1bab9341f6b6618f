"""The line that loads a checkpoint is valid Python and one shell word for any folder name."""

import ast
import shlex

import pytest
from checkpoint_folders import write_checkpoint
from tiny_models import tiny_model

from ropepatch.publishing.loading import call

NAMES = [
    "it's-yarn",
    'a"+__import__("os").popen("touch X").read()+"b',
    'a\\n"b\x1b[31m\u202e\U0001f600 é',
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_a_text_of_printable_characters(name):
    line = call("load", name, branch=name, code=True)
    assert line.isprintable()
    (statement,) = ast.parse(line).body
    parts = [node for node in ast.walk(statement) if isinstance(node, ast.Constant)]
    assert [part.value for part in parts] == [name, name, True]


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_line_that_extend_prints_loads_the_folder(name, tmp_path, run_here, capsys):
    source = write_checkpoint(tmp_path / "source")
    done = run_here(
        "extend", source, "--to", "128", "--method", "ntk", "--out", tmp_path / name
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("load: ")]
    *_, code = shlex.split(line)
    (_, printed) = ast.parse(code).body
    assert [
        node.value for node in ast.walk(printed) if isinstance(node, ast.Constant)
    ] == [str(tmp_path / name)]
    exec(code)
    assert capsys.readouterr().out == "128\n"


def test_extend_warns_of_a_missing_tokenizer(tmp_path, run_here):
    tiny_model("qwen3").save_pretrained(tmp_path / "source")
    done = run_here(
        "extend", tmp_path / "source", "--to", "128", "--out", tmp_path / "out"
    )
    assert "warning: no tokenizer was copied" in done.stderr
