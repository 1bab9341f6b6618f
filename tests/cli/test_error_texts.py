"""Every user error is one line, one hint and exit code 2, and leaves no files.

errors.txt is the table: a command, the damage in the folder, and the error and hint of the command.
"""

import ast
import errno
import inspect
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
import safetensors.torch
import torch
from checkpoint_folders import contents, edit_json, write_checkpoint
from gguf_files import write_gguf
from oldest import OLDEST
from readme import updating

from ropepatch import api
from ropepatch.cli import main
from ropepatch.files import PACKAGE
from ropepatch.model.mistakes import TWICE
from ropepatch.model.reading_file import RIGHT
from ropepatch.probing.asking import Probed
from ropepatch.probing.judging import CUT_OFF, UNDECIDED, Judgement

TABLE = Path(__file__).with_name("errors.txt")
EXTEND = "extend src --to 256 --out new/out"
LONG = "o" * 300

Damage = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
NORMALISED = [  # text that may change with transformers, safetensors, Python or a new method
    (r"(transformers cannot [^:]*: ).*?(?= -> )", r"\1…"),
    (r"(is truncated or damaged: ).*?(?= -> )", r"\1…"),
    (r"(cannot read [^:]*: ).*?(?= -> )", r"\1…"),
    (r"(invalid value for [^:]*: ).*?(?= -> )", r"\1…"),
    (r"(methods: none, linear, ).*", r"\1…"),
    (r"model-\d+-of-\d+", "model-00002-of-N"),
    (LONG, "{long}"),
]


def config(*, drop: tuple[str, ...] = (), **values) -> Damage:
    return lambda folder: edit_json(folder / "config.json", drop=drop, **values)


def mapped(folder: Path) -> None:
    described = {"name": "rerope", "parameters": {"window": 8}, "window": 64, "target": 256}
    edit_json(folder / "config.json", model_type="llama-position-remapping", position_remapping=described)


def rope(**parameters) -> Damage:
    return config(rope_parameters=parameters)


def file(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def renamed(old: str, new: str) -> Damage:
    return lambda folder: (folder / old).rename(folder / new)


def gguf(folder: Path) -> None:
    (folder / "config.json").rename(folder / "a.gguf")


def gguf_file(folder: Path) -> None:
    write_gguf(folder / "a.gguf", "qwen3")


def truncated(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def tensors_renamed(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {f"{name}.data": tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, folder / "model.safetensors")


def tokenizer(**values) -> Damage:
    def apply(folder: Path) -> None:
        (folder / "a.txt").write_text("word1 " * 100)
        edit_json(folder / "tokenizer_config.json", **values)

    return apply


def not_a_number(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def sharded(damage: Damage) -> Damage:
    def apply(folder: Path) -> None:
        shutil.rmtree(folder)
        write_checkpoint(folder, max_shard_size="10KB")
        damage(folder)

    return apply


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def placed(tensor: str, name: str | None = None) -> Damage:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        place = name or second_shard(folder).name
        edit_json(folder / INDEX, weight_map=index["weight_map"] | {tensor: place})

    return sharded(apply)


def adapter(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").touch()


REMAPPED = (
    (Path(__file__).parents[2] / "recipes/tiny.yaml").read_text().replace("method: yarn", "method: dca")
)
ADAPTER = (Path(__file__).parents[2] / "recipes/tiny.yaml").read_text() + "save: adapter\n"
MOSHI = '{"model_type": "moshi", "num_hidden_layers": 2}'
PHIMOE = '{"model_type": "phimoe", "num_hidden_layers": 1, "num_local_experts": 2}'
RECURRENT_GEMMA = '{"model_type": "recurrent_gemma", "num_hidden_layers": 3}'
THETA = 10000.0
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 2.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 2.0}

# Rows whose message differs with the oldest transformers, which rejects another part of config.json.
OTHERWISE = (
    "PHIMOE",
    "(head_dim=15)",
    "drop=('head_dim',), hidden_size=30",
    "rope(rope_type='wavy'",
)


def rows() -> list[list[str]]:
    """The rows of the table: command, damage, and the expected message."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if "\t" in line]


@pytest.fixture
def here(template, tmp_path, monkeypatch, capsys) -> Path:
    """An empty folder with a sound checkpoint in `src`, and something in `there`."""
    shutil.copytree(template, tmp_path / "src")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for child processes; this one has loaded the value already
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    return tmp_path


def run(monkeypatch, capsys, words: str) -> tuple[int | str | None, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["ropepatch", *words.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def error_of(words: str, here: Path, monkeypatch, capsys) -> str:
    """The message of a command that fails with a user error; check that no file changed."""
    before = {path: data for path, (_, data) in contents(here).items()}
    code, out, err = run(monkeypatch, capsys, words)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line and not line.startswith("warning: ")]
    assert [line.partition(": ")[0] for line in lines] == ["error", "hint"]
    assert {path: data for path, (_, data) in contents(here).items()} == before
    said = " -> ".join(line.partition(": ")[2] for line in lines).replace(str(here), "/here")
    for pattern, replacement in NORMALISED:
        said = re.sub(pattern, replacement, said)
    return said


@pytest.mark.parametrize(("command", "damage", "said"), rows())
def test_a_user_error_is_one_line_and_a_hint_with_exit_code_2(
    command, damage, said, here, monkeypatch, capsys
):
    with monkeypatch.context() as play:

        def system(code: int, step: str) -> Damage:
            def fail(path: Path, *arguments, **options):
                raise OSError(code, os.strerror(code), str(path))

            return lambda folder: play.setattr(Path, step, fail)

        if damage != "-":
            eval(damage, globals() | {"system": system})(here / "src")
        words = command.replace("EXTEND", EXTEND).replace("{long}", LONG)
        found = error_of(words, here, play, capsys)
    if any(part in damage for part in OTHERWISE if OLDEST):
        return
    if updating():
        old = f"{command}\t{damage}\t{said}\n"
        new = f"{command}\t{damage}\t{found}\n"
        TABLE.write_text(TABLE.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    else:
        assert found == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(2, "No such file", "/a/b\x1b[2J"),
            "error: /a/b\\x1b[2J: No such file\nhint: check that path\n",
        ),
        (OSError(errno.ENOSPC, "No space left"), "error: No space left\nhint: free some space\n"),
        (OSError("odd"), "error: odd\n"),
    ],
)
def test_an_unexpected_os_error_is_one_line_with_its_path(error, said, here, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("ropepatch.extension.planning.plan", fail)
    assert run(monkeypatch, capsys, "plan src --to 256") == (2, "", said)


@pytest.mark.parametrize(("verdict", "code"), [(RIGHT, 0), (TWICE, 1), (CUT_OFF, 1), (UNDECIDED, 2)])
def test_the_exit_code_of_probe_follows_its_verdict(verdict, code, here, monkeypatch, capsys):
    reading: Any = SimpleNamespace(positions=(), beyond=[], window=64)
    probed = Probed("http://x", "src", reading, Judgement(verdict, "why", 0.0, 0.0, {}), ())
    monkeypatch.setattr("ropepatch.api.probe", lambda *arguments, **options: probed)
    assert run(monkeypatch, capsys, "probe http://x src")[0] == code


ALLOCATED = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 100663296 bytes. Error code 12"


@pytest.mark.parametrize(
    ("words", "error", "said", "hint"),
    [
        ("compare src --to 256", RuntimeError(ALLOCATED), ": tried to allocate 96 MiB", "a shorter --to"),
        (
            "eval src --lengths 64 --text there/file",
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."),
            ": tried to allocate 2.50 GiB",
            "shorter --lengths",
        ),
        ("extend src --recipe tiny", MemoryError(), "", "gradient_checkpointing: true"),
        ("extend src --to 256", OSError(errno.ENOMEM, "Cannot allocate memory"), "", "a shorter --to"),
        ("plan src --to 256", MemoryError(), "", "free some memory"),
    ],
)
def test_out_of_memory_is_a_one_line_error_with_a_hint_that_saves_memory(
    words, error, said, hint, here, monkeypatch, capsys
):
    def full(*arguments, **options):
        raise error

    for verb in ("plan", "extend", "evaluate", "compare"):
        monkeypatch.setattr(f"ropepatch.api.{verb}", full)
    code, _, err = run(monkeypatch, capsys, words)
    assert code == 2
    assert err.startswith(f"error: out of memory{said}\nhint: ")
    assert hint in err


def test_another_runtime_error_stays_a_traceback(here, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("a defect")

    monkeypatch.setattr("ropepatch.api.plan", broken)
    monkeypatch.setattr(sys, "argv", ["ropepatch", "plan", "src", "--to", "256"])
    with pytest.raises(RuntimeError, match="a defect"):
        main()


def test_ctrl_c_while_parsing_the_command_line_prints_no_traceback(monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropepatch.cli.app", interrupt)
    assert run(monkeypatch, capsys, "plan tiny --to 2k") == (130, "", "")


def test_ctrl_c_inside_a_destructor_ends_the_command(monkeypatch, capsys):
    class Freed:
        def __del__(self):
            raise KeyboardInterrupt

    def dropped(*arguments, **options):
        Freed()
        threading.Event().wait(60)

    monkeypatch.setattr("ropepatch.cli.app", dropped)
    assert run(monkeypatch, capsys, "plan tiny --to 2k") == (130, "", "")


def test_an_interrupted_extension_exits_130_and_leaves_nothing(here, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropepatch.extension.writing.clone_files", interrupt)
    before = contents(here).keys()
    code, out, err = run(monkeypatch, capsys, EXTEND)
    assert (code, out, "Traceback" in err) == (130, "", False)
    assert contents(here).keys() == before


IN_COMMANDS = re.compile(r"`ropepatch [^`]*`|ropepatch \w+ .*")  # a command line to copy
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
ARGUMENTS = {key for one in api.__all__ for key in inspect.signature(getattr(api, one)).parameters}


def with_options() -> list[list[str]]:
    """One row of the table for each hint with an option, of commands that are also Python functions."""
    found = {}
    for command, damage, said in rows():
        is_verb = not command.startswith("recipes") and "unknown option" not in said
        if is_verb and "requires an argument" not in said and OPTION.search(IN_COMMANDS.sub("", said)):
            found.setdefault(said.partition(" -> ")[2].partition(", e.g.")[0], [command, damage])
    return [*found.values()]


@pytest.mark.parametrize(("command", "damage"), with_options())
def test_error_messages_in_python_name_no_command_line_options(command, damage, here, monkeypatch, capsys):
    if damage != "-" and "system" not in damage:
        eval(damage, globals())(here / "src")
    monkeypatch.setattr("ropepatch.cli.derive.arguments_written", lambda by: nullcontext())
    _, _, err = run(monkeypatch, capsys, command.replace("EXTEND", EXTEND).replace("{long}", LONG))
    assert not OPTION.search(IN_COMMANDS.sub("", err))


def test_error_messages_on_the_command_line_name_no_python_arguments():
    for command, _, said in rows():
        assert not ARGUMENTS.intersection(re.findall(r"`(\w+)[=`]", IN_COMMANDS.sub("", said))), command


def test_messages_below_the_cli_contain_no_hard_coded_options_or_arguments():
    others = {"--fix", "--max-model-len", "--context-length", "--upgrade", "--config", "--nproc-per-node"}
    faults = []
    for file in (f for f in PACKAGE.rglob("*.py") if not {"cli", "card", "serving.py"} & {*f.parts}):
        tree = ast.parse(file.read_text("utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        for text in (IN_COMMANDS.sub("", node.value) for node in texts if id(node) not in docs):
            named = ARGUMENTS.intersection(re.findall(r"`(\w+)[=`]", text))
            if named or not others.issuperset(OPTION.findall(text)):
                faults.append((file.name, text))
    assert not faults
