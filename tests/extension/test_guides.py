"""The guides on serving and on other trainers: their commands parse."""

import shlex
from pathlib import Path

import pytest

from ropepatch.cli import app

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "serve.md"


@pytest.mark.parametrize(("guide", "named"), [("serve", ["plan"]), ("train-elsewhere", ["extend", "doctor"])])
def test_the_commands_of_a_guide_parse(guide, named):
    lines = GUIDE.with_name(f"{guide}.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("    ropepatch ")]
    assert [words[0] for words in commands] == named
    for words in commands:
        app.parse_args(words, exit_on_error=False, print_error=False)
