"""The guides on serving and on other trainers: their commands parse."""

import shlex
from pathlib import Path

import pytest
import typer

from ropepatch.cli.doctor import doctor
from ropepatch.cli.export import export
from ropepatch.cli.extend import extend
from ropepatch.cli.plan import plan

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "serve.md"
COMMANDS = {"plan": plan, "export": export, "extend": extend, "doctor": doctor}


@pytest.mark.parametrize(
    ("guide", "named"), [("serve", ["plan", "export"]), ("train-elsewhere", ["extend", "doctor"])]
)
def test_the_commands_of_a_guide_parse(guide, named):
    lines = GUIDE.with_name(f"{guide}.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("    ropepatch ")]
    assert [words[0] for words in commands] == named
    for words in commands:
        app = typer.Typer()
        app.command()(COMMANDS[words[0]])
        typer.main.get_command(app).make_context(words[0], words[1:])
