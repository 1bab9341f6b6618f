"""Every command and code block of the README runs, and every generated block is what its source says."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from readme import README, block, updating, write_block
from tiny_checkpoint import tiny_llama_folder

from ropepatch import METHODS

ROOT = README.parent
RESULTS = ROOT / "eval" / "results"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    lines = (line.split("#")[0].strip() for text in code_blocks("bash") for line in text.splitlines())
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the checkpoint and the books that the README speaks of, small and random."""
    folder = tmp_path_factory.mktemp("readme")
    tiny_llama_folder(folder / "llama-2-7b", window=4096)
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("a rope has no end until it is cut. " * 1500)
    return folder


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("ropepatch ")])
def test_a_command_of_the_readme_runs(workplace, command):
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [line for line in commands() if not line.startswith("ropepatch ")])
def test_every_other_command_is_a_target_of_the_makefile(command):
    """`make test` cannot run itself; CI runs both on a clean checkout."""
    assert shlex.split(command)[0] == "make"
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_the_notebook_lines_run(workplace):
    (lines,) = code_blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=workplace, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    assert (workplace / "llama-2-7b-32k" / "config.json").exists()


def generated(name: str, text: str) -> None:
    if updating():
        write_block(name, text)
    assert block(name) == text


def test_the_method_table_is_the_registry():
    rows = [f"| `{m.name}` | {m.formula} | {m.paper} | {m.saved_as} |" for m in METHODS.values()]
    generated(
        "methods", "\n".join(["| method | frequencies | source | saved as |", "|---|---|---|---|", *rows])
    )


def test_the_results_are_those_of_the_result_file():
    record = json.loads((RESULTS / "babyllama-4x.json").read_text())
    columns = record["results"]
    lines = [
        f"Perplexity of the first tokens of {record['windows']} windows of {record['length']} tokens "
        f"({record['env']['dtype'].removeprefix('torch.')}, {record['env']['device']}):",
        "",
        f"| tokens | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for length in columns["as it is"]["perplexity"]:
        values = (f"{column['perplexity'][length]:.2f}" for column in columns.values())
        lines.append(f"| {length} | {' | '.join(values)} |")
    generated("results", "\n".join(lines))


def test_the_costs_are_those_of_the_benchmarks():
    extend = json.loads((RESULTS / "extend_cost.json").read_text())
    patch = json.loads((RESULTS / "patch_overhead.json").read_text())
    runs, ratio = extend["runs"], extend["ratio_of_seconds"]["extend / imports"]
    rows = [
        f"| `extend --link-weights`, {extend['checkpoint']['apparent_gb']:.0f} GB in "
        f"{extend['checkpoint']['files']} files | {spread(runs['extend']['seconds'], '.1f')} s, "
        f"{runs['extend']['peak_mb']['median']:.0f} MB | "
        f"{spread(ratio, '.2f')} x importing torch and transformers |"
    ]
    rows += [
        f"| forward of {f['tokens']} tokens, {f['mode']} | "
        f"| {spread(f['ratios']['patched / native'], '.3f')} x the same scaling in stock transformers |"
        for f in patch["forward"]
    ]
    rows.append(f"| `patch()` | {spread(patch['patch_milliseconds']['patch'], '.1f')} ms | |")
    machine = extend["environment"]
    header = f"| {machine['cores']} cores, {machine['cpu']} | median (quartiles) | ratio (quartiles) |"
    generated("costs", "\n".join([header, "|---|---|---|", *rows]))


def spread(figure: dict[str, float], form: str) -> str:
    return f"{figure['median']:{form}} ({figure['q1']:{form}} to {figure['q3']:{form}})"
