"""Commands and code in README and site run, links are valid, and generated files are up to date."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import tables
from checkpoint_folders import write_checkpoint
from gguf_files import write_gguf
from readme import DOCUMENTS, ROOT, code_blocks, commands
from run_recipes import ask_little
from transformers import AutoConfig

import ropepatch
from ropepatch.cli import app, main
from ropepatch.evaluation.measuring import measure
from ropepatch.model.checkpoint import TINY
from ropepatch.probing import making

RESULTS = ROOT / "eval" / "results"
PROTOCOL = ROOT / "eval" / "README.md"
MEASURED = ROOT / "eval" / "studies" / "README.md"
COSTS = ROOT / "eval" / "benchmarks" / "README.md"


# Programs that are not installed: only the ropepatch command in their lines is parsed.
ELSEWHERE = (
    "accelerate",
    "git",
    "torchrun",
    "vllm",
    "llama-cli",
    "llama-server",
    "ollama",
    "mlx_lm.generate",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with small random checkpoints and texts under the names that the documents use."""
    folder = tmp_path_factory.mktemp("readme")
    # One head of 16 dimensions: at 32k tokens attention takes nearly all of the time.
    smollm2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for name, length in (("llama-2-7b", 4096), ("MODEL", 4096), (smollm2, 8192)):
        write_checkpoint(
            folder / name,
            max_position_embeddings=length,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            by_bytes=True,
        )
    AutoConfig.for_model("qwen3", max_position_embeddings=40_960).save_pretrained(
        folder / "Qwen/Qwen3-8B"
    )
    shutil.copytree(
        RESULTS / "tiny-suite", folder / "results"
    )  # so that the suite is not measured again
    write_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", context_length=8192)
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text(
        "a rope has no end until it is cut. " * 1500
    )
    return folder


EXTENDED = "llama-2-7b-yarn-32k", "DIR"


def extended(workplace):
    """Make the checkpoints that the documents extend, unless one of their commands made them."""
    for name in EXTENDED:
        if not (workplace / name).exists():
            plan = ropepatch.plan(workplace / "llama-2-7b", to=32_768)
            ropepatch.extend(plan, workplace / name, reading=False)


@pytest.fixture(autouse=True)
def no_long_fingerprints(monkeypatch):
    """`extend` leaves out the fingerprint at 32k tokens, as it does when it would take minutes."""
    monkeypatch.setattr(making, "MOST_WORK", {"cpu": 3e10})


def measure_few(suite, source, **options):
    """Measure the suite with only two sequences and two haystacks."""
    few = {"perplexity": {"windows": 2}, "retrieval": {"haystacks": 2}}
    tasks = tuple(
        task.model_copy(update=few.get(task.name, {})) for task in suite.tasks
    )
    return measure(suite.model_copy(update={"tasks": tasks}), source, **options)


SLOW = "ropepatch compare tiny"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(line, marks=pytest.mark.slow) if line.startswith(SLOW) else line
        for line in commands()
        if line.startswith("ropepatch ")
        and line != "ropepatch demo"  # which tests/cli/test_demo.py runs
    ],
)
def test_each_ropepatch_command_in_the_documents_runs(
    workplace, monkeypatch, capsys, command
):
    words = []
    for word in shlex.split(command):
        words += (
            sorted(str(path) for path in workplace.glob(word))
            if "*" in word
            else [word]
        )
    monkeypatch.chdir(workplace)
    ask_little(monkeypatch)
    monkeypatch.setattr(
        "ropepatch.evaluation.measuring.candidates", lambda: ("linear", "yarn")
    )
    if "--suite" not in command:  # results of a suite are reused if it is the same
        monkeypatch.setattr("ropepatch.evaluation.measuring.measure", measure_few)
    if command.startswith(
        "ropepatch extend llama-2-7b --to 32k"
    ):  # another worker may have made it
        shutil.rmtree(workplace / EXTENDED[0], ignore_errors=True)
    elif any(name in words for name in EXTENDED):
        extended(workplace)
    elif (
        command.startswith("ropepatch probe tiny-1k")
        and not (workplace / "tiny-1k").exists()
    ):
        ropepatch.extend("tiny", workplace / "tiny-1k", to="4x")
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    done = capsys.readouterr()
    assert end.value.code in (None, 0), done.err
    assert done.out


OTHERS = [line for line in commands() if not line.startswith("ropepatch ")]


@pytest.mark.parametrize("command", OTHERS)
def test_every_other_command_in_the_documents_is_valid(command):
    """A target of the Makefile, an extra of the package, Python, or one of the programs above."""
    program, *words = shlex.split(command)
    if (
        program == "make"
    ):  # `make test` cannot run itself; CI runs both on a clean checkout
        subprocess.run(
            [program, *words, "--dry-run"], cwd=ROOT, check=True, capture_output=True
        )
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        install, *packages = words
        assert install == "install"
        for package in packages:
            named = re.fullmatch(
                r"(?:\.|ropepatch)(?:\[([\w,]+)\])?(?: @ git\+(.+))?", package
            )
            assert set((named[1] or "all").split(",")) <= extras.keys()
            assert named[2] in (None, project["urls"]["Repository"])
    elif program == "python":
        subprocess.run(
            [sys.executable, *words], cwd=ROOT, check=True, capture_output=True
        )
    else:
        assert program in ELSEWHERE
        if "ropepatch" in words:
            app.parse_args(
                words[words.index("ropepatch") + 1 :],
                exit_on_error=False,
                print_error=False,
            )


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(file, id=str(file.relative_to(ROOT)))
        for file, code in code_blocks("python").items()
        if code
    ],
)
def test_the_python_code_of_each_document_runs(
    workplace, monkeypatch, capsys, document
):
    """Block by block; new files are removed, so that several pages can write the same files."""
    extended(workplace)
    there = set(workplace.iterdir())
    monkeypatch.chdir(workplace)
    names = {"__name__": "__main__"}
    for block in code_blocks("python")[document]:
        exec(compile(block, str(document), "exec"), names)
    for new in set(workplace.iterdir()) - there:
        shutil.rmtree(new)


def test_every_link_in_the_documents_leads_to_an_existing_file():
    for document in (*DOCUMENTS, PROTOCOL, MEASURED, COSTS, TINY / "README.md"):
        for link in re.findall(
            r"\]\(([^)#:]+)[^):]*\)", document.read_text(encoding="utf-8")
        ):
            assert (document.parent / link).exists(), f"{document}: {link}"


def test_every_output_line_in_the_readme_is_in_the_transcript():
    transcript = (RESULTS / "readme.txt").read_text(encoding="utf-8").splitlines()
    printed = [
        line
        for block in code_blocks("text")[ROOT / "README.md"]
        for line in block.splitlines()
    ]
    assert printed
    assert not [line for line in printed if line not in transcript]


MEASURED_BY_TESTS = {"families"}  # by tests/extension


@pytest.mark.slow  # make lint checks it, too
def test_generated_files_are_up_to_date():
    found = [str(file.relative_to(ROOT)) for file, _ in tables.differing()]
    assert not found, "make documents"


def test_figures_may_differ_only_by_rounding():
    drawn = '<path d="M 321.013375 45.49603"/><text>64</text><g id="DejaVuSans-4c"/>'
    assert tables.drawn_alike(
        drawn, drawn.replace("45.49603", "45.496037").replace("-4c", "-6e")
    )
    assert not tables.drawn_alike(drawn, drawn.replace("45.49603", "46.49603"))
    assert not tables.drawn_alike(drawn, drawn.replace("text>64", "text>one"))
    assert not tables.drawn_alike(drawn, drawn + drawn)


def test_every_generated_block_has_a_generator():
    listed = [
        page
        for folder in ("docs", "eval", "recipes", "ropepatch")
        for page in (ROOT / folder).rglob("*.md")
    ]
    for page in (ROOT / "README.md", *listed):
        marks = re.findall(
            r"^<!-- /([\w-]+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(marks) - MEASURED_BY_TESTS == {
            *tables.BLOCKS.get(str(page.relative_to(ROOT)), ())
        }, page
