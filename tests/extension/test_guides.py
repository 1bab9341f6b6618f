"""The guides on serving and on other trainers: versions, notes and switches are those of the code."""

import json
import shlex
from importlib import resources
from pathlib import Path

import pytest
import typer
from readme import check_block

from ropepatch.cli.doctor import doctor
from ropepatch.cli.export import export
from ropepatch.cli.extend import extend
from ropepatch.cli.plan import plan
from ropepatch.extension.engines import VERSIONS, Engine
from ropepatch.extension.planning import plan_scaling
from ropepatch.model.survey import survey
from ropepatch.scaling import make_scaling

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "serve.md"
RUN = "transformers 5.x", "transformers 4.x", "mlx-lm"  # by tests/extension/test_engines.py
PRESETS = json.loads((resources.files("ropepatch.gallery") / "presets.json").read_text(encoding="utf-8"))
[LLAMA_2] = [preset["config"] for preset in PRESETS if preset["name"] == "llama-2-7b"]
COMMANDS = {"plan": plan, "export": export, "extend": extend, "doctor": doctor}
METHODS = "yarn", "linear", "ntk", "llama3", "ntk-fixed"


def engines(method: str) -> tuple[str, list[Engine]]:
    """What Llama-2-7b is saved as at four times its window, and how it is read."""
    extension = plan_scaling(survey(LLAMA_2), "llama", None, make_scaling(method, factor=4.0), 16384)
    return extension.rope_parameters["rope_type"], extension.engines


def test_the_page_names_the_versions_that_were_read():
    """ROPEPATCH_UPDATE=1 writes it anew."""
    lines = ["| engine | version | |", "|---|---|---|"]
    lines += [
        f"| {name} | {version} | {'run' if name in RUN else 'read'} |" for name, version in VERSIONS.items()
    ]
    check_block("engine-versions", "\n".join(lines), GUIDE)


def test_the_page_says_what_the_plan_says():
    """ROPEPATCH_UPDATE=1 writes it anew."""
    names = list(VERSIONS)[2:]
    lines = [f"| `--method` | saved as | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for method in METHODS:
        kind, support = engines(method)
        cells = [": ".join(filter(None, (line.reads, line.note))) for line in support if line.engine in names]
        lines.append(f"| `{method}` | `{kind}` | {' | '.join(cells)} |")
    check_block("engine-notes", "\n".join(lines), GUIDE)


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
