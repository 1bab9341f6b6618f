"""Every user error is one line, one hint and exit code 2, and leaves no files."""

import ast
import errno
import inspect
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from checkpoint_folders import contents, edit_json, write_checkpoint
from gguf_files import write_gguf

from ropepatch import api
from ropepatch.cli import main
from ropepatch.files import PACKAGE
from ropepatch.model.reading_file import RIGHT
from ropepatch.probing.asking import Probed
from ropepatch.probing.judging import CUT_OFF, UNDECIDED, Judgement
from ropepatch.probing.mistakes import TWICE

EXTEND = "extend src --to 256 --out new/out"
LONG = "o" * 300
INDEX = "model.safetensors.index.json"
ADAPTER = (Path(__file__).parents[2] / "recipes/tiny.yaml").read_text() + "save: adapter\n"
MOSHI = '{"model_type": "moshi", "num_hidden_layers": 2}'
RECURRENT_GEMMA = '{"model_type": "recurrent_gemma", "num_hidden_layers": 3}'
THETA = 10000.0
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 2.0, "original_max_position_embeddings": 64}

Damage = Callable[[Path], object]


def config(**values) -> Damage:
    return lambda folder: edit_json(folder / "config.json", **values)


def rope(**parameters) -> Damage:
    return config(rope_parameters=parameters)


def file(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def gguf_file(folder: Path) -> None:
    write_gguf(folder / "a.gguf", "qwen3")


def truncated(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def sharded(damage: Damage) -> Damage:
    def apply(folder: Path) -> None:
        shutil.rmtree(folder)
        write_checkpoint(folder, max_shard_size="10KB")
        damage(folder)

    return apply


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


IN_COMMANDS = re.compile(r"`ropepatch [^`]*`|ropepatch \w+ .*")  # a command line to copy
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
ARGUMENTS = {key for one in api.__all__ for key in inspect.signature(getattr(api, one)).parameters}


REFUSED = [  # a command, the damage in `src`, and a part of the error and its hint
    ("extend", None, 'command "extend" parameter MODEL requires an argument'),
    ("extend src --too 3", None, "unknown option: --too -> did you mean --to?"),
    ("extnd src", None, 'unknown command "extnd" -> did you mean "extend"?'),
    ("extend src --to 256 --eval", None, 'command "extend" parameter --eval requires an argument'),
    ('plan src --rope-scaling {"rope_type":"yarn","factor":8.0}', None, "use --to 8x --method yarn"),
    (
        'plan src --hf-overrides {"rope_scaling":{"type":"linear","factor":2}}',
        None,
        "use --to 2x --method linear",
    ),
    ("extend src --rope-scaling-type linear", None, "use --to 4x --method linear"),
    ("extend src --target 1k", None, "use --to for the target length"),
    ("extend missing/model/here --to 256", None, "no folder missing/model/here"),
    ("extend src/config.json --to 256", None, "src/config.json is a file, not a checkpoint folder"),
    ("plan src/a.gguf --to 256", file("a.gguf", b"GGUF"), "src/a.gguf is truncated or damaged"),
    ("extend src/a.gguf --to 256 --out new.gguf", None, "no file src/a.gguf"),
    (
        "extend src/a.gguf --to 256 --out new.bin",
        gguf_file,
        "--out of a GGUF file must end in .gguf, got new.bin",
    ),
    ("extend src/a.gguf --to 256 --out nowhere/new.gguf", gguf_file, "no folder /here/nowhere"),
    ("EXTEND --revision main", None, "src is a local folder, which has no revisions"),
    ("extend missing/model/here --recipe llama2-7b-yarn-32k", None, "no folder missing/model/here"),
    ("EXTEND --method pi", None, "unknown method 'pi' -> did you mean linear?"),
    ('EXTEND --method {"rope_type":"yarn","factor":4.0}', None, "use --to 4x and --method yarn"),
    ("extend src", None, "--to is missing"),
    ("extend src --to 64", None, "src already covers 64 tokens (max_position_embeddings);"),
    ("EXTEND --set beta_fast", None, "--set beta_fast has no value"),
    ("EXTEND --set truncate=maybe", None, "yarn: truncate must be true or false, got 'maybe'"),
    ("EXTEND --set beta_fast=0.5", None, "yarn: beta_fast must be above beta_slow = 1.0, got 0.5"),
    ("EXTEND --method linear --set beta=3", None, "linear has no parameter 'beta'"),
    ("EXTEND --method longrope", None, "longrope needs long_factor"),
    (
        "EXTEND --method longrope --set long_factor=1,x",
        None,
        "long_factor must be numbers separated by commas, or a",
    ),
    (
        "EXTEND --method longrope --set long_factor=1,2",
        None,
        "longrope: this model has 8 rotary pairs, got 2 divisors",
    ),
    ("EXTEND", without("config.json"), "no config.json in src"),
    ("EXTEND", file("config.json", ""), "cannot read src/config.json"),
    ("EXTEND", config(is_encoder_decoder=True), "config.json describes an encoder-decoder"),
    (
        "EXTEND",
        config(model_type="internlm2", auto_map={"AutoModel": "modeling.Model"}),
        "model_type 'internlm2' asks for remote code (auto_map),",
    ),
    ("EXTEND", config(model_type="t5"), "transformers has no model of type t5 that generates text"),
    ("EXTEND", file("config.json", MOSHI), "moshi is not supported: it has 2 rotary modules:"),
    ("EXTEND", file("config.json", RECURRENT_GEMMA), "max_position_embeddings must be an integer, got None"),
    ("EXTEND", config(head_dim=15), "transformers cannot read config.json"),
    ("EXTEND", config(head_dim=10**9), "1000000000 rotary dimensions are not plausible"),
    (
        "EXTEND",
        config(max_position_embeddings=64.0),
        "Field 'max_position_embeddings' expected int, got float (value: 64.0)",
    ),
    ("EXTEND", rope(rope_type="wavy", rope_theta=THETA), "unknown rope_type 'wavy' in config.json"),
    ("EXTEND", rope(**YARN | {"factor": 1e300}), "factor must be at most 1e+12, got 1e+300"),
    ("EXTEND --set ramp=index", rope(**YARN), "yarn is a formula of rope_theta and does not apply to"),
    ("EXTEND", config(rope_theta=500000.0), "config.json contradicts itself: rope_theta is 500000.0"),
    ("EXTEND", without("model.safetensors"), "no weights in src"),
    ("EXTEND", truncated, "model.safetensors is truncated or damaged"),
    ("plan src --to 256", config(short_factor=[1.0] * 10**6), "src/config.json has 5 MB, expected at most 4"),
    (
        "EXTEND",
        sharded(lambda folder: second_shard(folder).unlink()),
        "model-00002-of-N.safetensors is missing from src",
    ),
    ("EXTEND", sharded(file(INDEX, "{}")), "src/model.safetensors.index.json has no weight_map of"),
    ("extend src --to 256 --out there", None, "/here/there already exists"),
    ("extend src --to 256 --out there/file/out", None, "cannot write /here/there/file/out: Not a directory"),
    ("extend src --to 256 --out {long}", None, "cannot write {long}: File name too long"),
    ("eval src --text src/empty.txt", file("empty.txt", ""), "no text in src/empty.txt: all of it is blank"),
    ("eval src --text src/config.json --device gpu", None, "no device 'gpu' here"),
    ("eval tiny --suite standart", None, "unknown suite 'standart' -> did you mean standard?"),
    ("eval src --suite demo", None, "--text is missing"),
    (
        "eval tiny --suite src/mine.yaml",
        file("mine.yaml", "{"),
        "src/mine.yaml is not a suite: expected the node content,",
    ),
    ("eval tiny --seed 3", None, "--seed has no effect: no task of the suite is random"),
    ("eval tiny --dtype int8", None, "no dtype 'int8' of weights"),
    ("eval tiny --report there/file", None, "there/file already exists"),
    ("plot src/config.json", None, "src/config.json: unknown result key 'architectures'"),
    ("plot tiny --methods yarn", None, "--methods needs --to"),
    ("recipes --copy", None, "--copy needs a recipe"),
    ("recipes tiny mine.yaml", None, "mine.yaml needs --copy"),
    ("recipes tiny mine.txt --copy", None, "mine.txt must end in .yaml"),
    ("recipes tiny src/mine.yaml --copy", file("mine.yaml", ""), "src/mine.yaml already exists"),
    ("recipes tiny there/file/mine.yaml --copy", None, "cannot write there/file/mine.yaml: Not a directory"),
    (
        "extend src --to 256 --method rerope",
        file("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["their.T", null]}}'),
        "tokenizer_config.json contains other code, which",
    ),
    (
        "eval src --text src",
        config(model_type="llama-position-remapping"),
        "config.json has an invalid position_remapping, got None",
    ),
    (
        "extend tiny --recipe src/adapter.yaml --reading --out new",
        file("adapter.yaml", ADAPTER),
        "--reading: save: adapter writes no checkpoint",
    ),
]


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


@pytest.mark.parametrize(("command", "damage", "words"), REFUSED)
def test_a_user_error_is_one_line_and_a_hint_and_changes_no_file(
    command, damage, words, here, monkeypatch, capsys
):
    if damage:
        damage(here / "src")
    before = {path: data for path, (_, data) in contents(here).items()}
    line = command.replace("EXTEND", EXTEND).replace("{long}", LONG)
    code, out, err = run(monkeypatch, capsys, line)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line and not line.startswith("warning: ")]
    assert [line.partition(": ")[0] for line in lines] == ["error", "hint"]
    said = " -> ".join(line.partition(": ")[2] for line in lines).replace(str(here), "/here")
    assert words.replace("{long}", LONG) in re.sub(r"model-\d+-of-\d+", "model-00002-of-N", said)
    assert not ARGUMENTS.intersection(re.findall(r"`(\w+)[=`]", IN_COMMANDS.sub("", said)))
    assert {path: data for path, (_, data) in contents(here).items()} == before


def test_a_folder_that_cannot_be_made_is_named(here, monkeypatch, capsys):
    def fail(path: Path, *arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", fail)
    code, _, err = run(monkeypatch, capsys, EXTEND)
    assert code == 2
    assert err.startswith(f"error: cannot write {here}/new/out: Read-only file system\nhint: ")


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
