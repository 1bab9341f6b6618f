"""Every user error is one line, one hint and exit code 2, and leaves no files."""

import ast
import errno
import inspect
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
from checkpoint_folders import contents, edit_json
from gguf_files import write_gguf

import ropepatch
from ropepatch.extension.record import ShortContextCheck
from ropepatch.files import PACKAGE
from ropepatch.probing.asking import Probed
from ropepatch.probing.judging import CUT_OFF, UNDECIDED, Judgement
from ropepatch.probing.reading import RIGHT, TWICE
from ropepatch.verbs.extend import Extension

EXTEND = "extend src --to 256 --out new/out"
LONG = "o" * 300
RECURRENT_GEMMA = '{"model_type": "recurrent_gemma", "num_hidden_layers": 3}'


def config(**values):
    return lambda folder: edit_json(folder / "config.json", **values)


def file(name, content):
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def gguf_file(folder):
    write_gguf(folder / "a.gguf", "qwen3")


IN_COMMANDS = re.compile(
    r"`ropepatch [^`]*`|ropepatch \w+ .*"
)  # a command line to copy
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
VERBS = [getattr(ropepatch, name) for name in ropepatch.HOME if name.islower()]
ARGUMENTS = {
    key for one in VERBS if callable(one) for key in inspect.signature(one).parameters
}


REFUSED = [  # a command, the damage in `src`, and a part of the error and its hint
    ("extend", None, 'command "extend" parameter MODEL requires an argument'),
    ("extend src --too 3", None, "unknown option: --too -> did you mean --to?"),
    ("extnd src", None, 'unknown command "extnd" -> did you mean "extend"?'),
    (
        "train src --recipe",
        None,
        'command "train" parameter --recipe requires an argument',
    ),
    (
        "extend src/config.json --to 256",
        None,
        "src/config.json is a file, not a checkpoint folder",
    ),
    (
        "extend src/a.gguf --to 256 --out new.bin",
        gguf_file,
        "--out of a GGUF file must end in .gguf, got new.bin",
    ),
    (
        "extend src/a.gguf --to 256 --out nowhere/new.gguf",
        gguf_file,
        "no folder /here/nowhere",
    ),
    ("EXTEND --revision main", None, "src is a local folder, which has no revisions"),
    ("EXTEND --method pi", None, "unknown method 'pi' -> did you mean linear?"),
    ('EXTEND --method {"rope_type":"yarn","factor":4.0}', None, "unknown method"),
    ("extend src", None, "--to is missing"),
    ("EXTEND --set beta_fast", None, "--set beta_fast has no value"),
    (
        "EXTEND --method longrope --set long_factor=1,x",
        None,
        "longrope: long_factor[1] must be a valid number, got 'x'",
    ),
    (
        "EXTEND",
        config(
            model_type="internlm2",
            architectures=["InternLM2ForCausalLM"],
            auto_map={"AutoModel": "modeling.Model"},
        ),
        "model_type 'internlm2' asks for remote code (auto_map),",
    ),
    (
        "EXTEND",
        file("config.json", RECURRENT_GEMMA),
        "max_position_embeddings must be an integer, got None",
    ),
    (
        "EXTEND",
        config(rope_parameters={"rope_type": "wavy", "rope_theta": 1e4}),
        "transformers cannot build llama from config.json: KeyError: 'wavy'",
    ),
    (
        "extend src --to 256 --out {long}",
        None,
        "cannot write {long}: File name too long",
    ),
    (
        "eval src --text src/empty.txt",
        file("empty.txt", ""),
        "no text in src/empty.txt: all of it is blank",
    ),
    ("eval src --text src/config.json --device gpu", None, "no device 'gpu' here"),
    ("eval src --suite demo", None, "--text is missing"),
    ("eval tiny --suite demo --field body", None, "--field and --split need --text"),
    ("eval tiny --dtype int8", None, "no dtype 'int8' of weights"),
]


@pytest.fixture
def here(template, tmp_path, monkeypatch, capsys):
    """An empty folder with a sound checkpoint in `src`, and something in `there`."""
    shutil.copytree(template, tmp_path / "src")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "HF_HUB_OFFLINE", "1"
    )  # for child processes; this one has loaded the value already
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    return tmp_path


def raising(error):
    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize(("command", "damage", "words"), REFUSED)
def test_a_user_error_is_one_line_and_a_hint(command, damage, words, here, run_here):
    if damage:
        damage(here / "src")
    before = {path: data for path, (_, data) in contents(here).items()}
    line = command.replace("EXTEND", EXTEND).replace("{long}", LONG)
    done = run_here(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    lines = re.sub("^(warning: .*)?\n", "", done.stderr, flags=re.MULTILINE)
    error, hint = re.fullmatch("error: (.*)\nhint: (.*)\n", lines).groups()
    said = f"{error} -> {hint}".replace(str(here), "/here")
    assert words.replace("{long}", LONG) in said
    assert not ARGUMENTS.intersection(
        re.findall(r"`(\w+)[=`]", IN_COMMANDS.sub("", said))
    )
    assert {path: data for path, (_, data) in contents(here).items()} == before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(2, "No such file", "/a/b\x1b[2J"),
            "error: /a/b\\x1b[2J: No such file\nhint: check that path\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left"),
            "error: No space left\nhint: free some space\n",
        ),
        (OSError("odd"), "error: odd\n"),
    ],
)
def test_an_unexpected_os_error_is_one_line_with_its_path(
    error, said, here, monkeypatch, run_here
):
    monkeypatch.setattr("ropepatch.extension.planning.plan", raising(error))
    done = run_here("plan", "src", "--to", "256")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("verdict", "code"), [(RIGHT, 0), (TWICE, 1), (CUT_OFF, 1), (UNDECIDED, 2)]
)
def test_the_exit_code_of_probe_follows_its_verdict(
    verdict, code, here, monkeypatch, run_here
):
    reading = SimpleNamespace(positions=(), beyond=[], window=64)
    judgement = Judgement(verdict, "why", 0.0, 0.0, {})
    probed = Probed("http://x", "src", reading, judgement, ())
    monkeypatch.setattr("ropepatch.probing.asking.probe", lambda *_, **__: probed)
    assert run_here("probe", "http://x", "src").returncode == code


@pytest.mark.parametrize(("most", "code"), [(0.1, 0), (0.01, 1)])
def test_the_exit_code_of_train_follows_its_check(most, code, monkeypatch, run_here):
    check = ShortContextCheck.of(2.0, 2.1, most)
    trained = Extension(Path("out"), ropepatch.plan("tiny", to=512), check=check)
    monkeypatch.setattr("ropepatch.verbs.train.train", lambda *_, **__: trained)
    assert run_here("train", "tiny", "--recipe", "tiny").returncode == code


CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
GPU = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("compare src --to 256", RuntimeError(CPU)),
        ("eval tiny --lengths 64", torch.OutOfMemoryError(GPU)),
        ("train src --recipe tiny", MemoryError()),
        ("plan src --to 256", OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
)
def test_out_of_memory_is_one_line_with_a_hint(
    words, error, here, monkeypatch, run_here
):
    for verb in ("plan", "train", "evaluate", "compare"):
        monkeypatch.setattr(f"{ropepatch.HOME[verb]}.{verb}", raising(error))
    done = run_here(*words.split())
    assert done.returncode == 2
    assert done.stderr.startswith("error: out of memory\nhint: use shorter lengths")


def test_another_runtime_error_stays_a_traceback(here, monkeypatch, run_here):
    defect = raising(RuntimeError("a defect"))
    monkeypatch.setattr("ropepatch.extension.planning.plan", defect)
    with pytest.raises(RuntimeError, match="a defect"):
        run_here("plan", "src", "--to", "256")


def test_ctrl_c_while_parsing_prints_no_traceback(monkeypatch, run_here):
    monkeypatch.setattr("ropepatch.cli.app", raising(KeyboardInterrupt()))
    done = run_here("plan", "tiny", "--to", "2k")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_messages_below_the_cli_contain_no_hard_coded_options():
    others = {
        "--fix",
        "--max-model-len",
        "--context-length",
        "--upgrade",
        "--config",
        "--nproc-per-node",
    }
    faults = []
    for file in PACKAGE.rglob("*.py"):
        if {"cli", "card", "serving.py"} & {*file.parts}:
            continue
        nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and id(node) not in docs:
                said = IN_COMMANDS.sub("", text)
                named = ARGUMENTS.intersection(re.findall(r"`(\w+)[=`]", said))
                if named or not others.issuperset(OPTION.findall(said)):
                    faults.append((file.name, said))
    assert not faults
