"""Every error a user can make ends in one line, one hint and exit code 2, with nothing left behind.

The messages stand in snapshots/errors.txt; ROPEPATCH_UPDATE_SNAPSHOTS=1 writes them anew.
"""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
from checkpoint_folders import contents, edit_json, write_checkpoint
from oldest import OLDEST

from ropepatch.cli import main

SNAPSHOTS = Path(__file__).parent / "snapshots" / "errors.txt"
UPDATE = bool(os.environ.get("ROPEPATCH_UPDATE_SNAPSHOTS"))
EXTEND = "extend src --to 256 --out new/out"

Damage = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
NORMALISED = [  # what transformers, safetensors, Python or a new method may word differently tomorrow
    (r"(error: transformers cannot [^:]*: ).*", r"\1…"),
    (r"(is truncated or damaged: ).*", r"\1…"),
    (r"(error: cannot read [^:]*: ).*", r"\1…"),
    (r"(invalid value for [^:]*: ).*", r"\1…"),
    (r"(methods: none, linear, ).*", r"\1…"),
    (r"model-\d+-of-\d+", "model-00002-of-N"),
    (r"o{300}", "ooo…"),
]


def nothing(folder: Path) -> None:
    pass


def config(*, drop: tuple[str, ...] = (), **values) -> Damage:
    return lambda folder: edit_json(folder / "config.json", drop=drop, **values)


def mapped(folder: Path) -> None:
    described = {"name": "rerope", "parameters": {"window": 8}, "window": 64, "target": 256}
    edit_json(folder / "config.json", model_type="llama-attention-map", attention_map=described)


def rope(**parameters) -> Damage:
    return config(rope_parameters=parameters)


def file(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def renamed(old: str, new: str) -> Damage:
    return lambda folder: (folder / old).rename(folder / new)


def truncated(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def tensors_renamed(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {f"{name}.data": tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, folder / "model.safetensors")


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


MAPPED = (Path(__file__).parents[2] / "recipes/tiny.yaml").read_text().replace("method: yarn", "method: dca")
MOSHI = '{"model_type": "moshi", "num_hidden_layers": 2}'
PHIMOE = '{"model_type": "phimoe", "num_hidden_layers": 1, "num_local_experts": 2}'
RECURRENT_GEMMA = '{"model_type": "recurrent_gemma", "num_hidden_layers": 3}'
THETA = 10000.0
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 2.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 2.0}

# Where the oldest transformers accepts or refuses another part of config.json: there the words are others.
OTHERWISE = (
    {"rotary that recomputes", "head_dim odd", "head_dim missing and odd", "rope_type unknown"}
    if OLDEST
    else set()
)

CASES: dict[str, tuple[str, Damage]] = {
    # a command line that cannot be read
    "no model": ("extend", nothing),
    "no target": ("compare src", nothing),
    "no such option": ("extend src --too 3", nothing),
    "no option like it": ("extend src --device cuda", nothing),
    "a length as an argument": ("extend src 1k", nothing),
    "an argument as an option": ("extend --model src --to 256", nothing),
    "no result": ("plot", nothing),
    "no such command": ("extnd src", nothing),
    "option without a value": ("plan src --to", nothing),
    "too many words": ("plan src there --to 256", nothing),
    "option out of its range": ("eval src --windows 0", nothing),
    # which model
    "no such folder": ("extend missing/model/here --to 256", nothing),
    "a file as the model": ("extend src/config.json --to 256", nothing),
    "a revision of a folder": (f"{EXTEND} --revision main", nothing),
    "a PEFT adapter": (EXTEND, adapter),
    "no such folder for a recipe": ("extend missing/model/here --recipe llama2-7b-yarn-32k", nothing),
    # which method, which length
    "unknown method": (f"{EXTEND} --method yarm", nothing),
    "method by another name": (f"{EXTEND} --method pi", nothing),
    "a method to be found": ("plan src --to 64 --method fit", nothing),
    "a method to be chosen": ("eval src --to 64 --method auto --text src/config.json", nothing),
    "unknown method listed": ("methods yarm", nothing),
    "no length": ("extend src", nothing),
    "length in words": ("extend src --to long", nothing),
    "length of zero": ("extend src --to 0", nothing),
    "length below zero": ("plan src --to=-5", nothing),
    "window long enough": ("extend src --to 64", nothing),
    "window longer": ("plan src --to 32", nothing),
    "original in words": ("plan src --to 256 --original many", nothing),
    "original beyond the target": ("extend src --to 256 --original 1k", nothing),
    "original of a scaled rope": (f"{EXTEND} --original 32", rope(**LINEAR)),
    "set without a value": (f"{EXTEND} --set beta_fast", nothing),
    "set a number to words": (f"{EXTEND} --set beta_fast=many", nothing),
    "set a switch to words": (f"{EXTEND} --set truncate=maybe", nothing),
    "set a choice to another": (f"{EXTEND} --set ramp=steep", nothing),
    "set outside the domain": (f"{EXTEND} --set beta_fast=0.5", nothing),
    "set not a number": (f"{EXTEND} --set beta_fast=nan", nothing),
    "set infinity": (f"{EXTEND} --set beta_fast=inf", nothing),
    "set an unknown parameter": (f"{EXTEND} --set beta_fest=3", nothing),
    "set where there is none": (f"{EXTEND} --method linear --set beta=3", nothing),
    "set a factor below one": (f"{EXTEND} --set factor=0.5", nothing),
    "required parameter missing": (f"{EXTEND} --method longrope", nothing),
    "list with a word": (f"{EXTEND} --method longrope --set long_factor=1,x", nothing),
    "list too short": (f"{EXTEND} --method longrope --set long_factor=1,2", nothing),
    "list with a zero": (f"{EXTEND} --method custom --set divisors=1,1,1,1,0,1,1,1", nothing),
    "list from no file": (f"{EXTEND} --method longrope --set long_factor=missing.json", nothing),
    "list from no list": (
        f"{EXTEND} --method longrope --set long_factor=src/numbers.json",
        file("numbers.json", "7"),
    ),
    # config.json as a file
    "no config.json": (EXTEND, without("config.json")),
    "config.json empty": (EXTEND, file("config.json", "")),
    "config.json no JSON": (EXTEND, file("config.json", "{'model_type': 'llama'}")),
    "config.json a list": (EXTEND, file("config.json", "[]")),
    "config.json with NaN": (EXTEND, file("config.json", '{"model_type": "llama", "rope_theta": NaN}')),
    "config.json not UTF-8": (EXTEND, file("config.json", b'{"a": "\xff"}')),
    # which architecture
    "no model_type": (EXTEND, config(drop=("model_type",))),
    "unknown model_type": (EXTEND, config(model_type="llamma")),
    "model_type a list": (EXTEND, config(model_type=["llama"])),
    "encoder-decoder by a flag": (EXTEND, config(is_encoder_decoder=True)),
    "remote code": (EXTEND, config(model_type="internlm2", auto_map={"AutoModel": "modeling.Model"})),
    "encoder": (EXTEND, config(model_type="t5")),
    "encoder by default": (EXTEND, config(model_type="bert")),
    "learned positions": (EXTEND, config(model_type="gpt2")),
    "rotary without a module": (EXTEND, config(model_type="gptj")),
    "several rotary modules": (EXTEND, file("config.json", MOSHI)),
    "rotary that recomputes": (EXTEND, file("config.json", PHIMOE)),
    "window of no model": (EXTEND, file("config.json", RECURRENT_GEMMA)),
    # numbers in config.json
    "head_dim odd": (EXTEND, config(head_dim=15)),
    "head_dim zero": (EXTEND, config(head_dim=0)),
    "head_dim a string": (EXTEND, config(head_dim="16")),
    "head_dim absurd": (EXTEND, config(head_dim=10**9)),
    "head_dim missing and no whole number": (EXTEND, config(drop=("head_dim",), hidden_size=33)),
    "head_dim missing and odd": (EXTEND, config(drop=("head_dim",), hidden_size=30)),
    "window missing": (EXTEND, config(drop=("max_position_embeddings",))),
    "window a float": (EXTEND, config(max_position_embeddings=64.0)),
    "window a string": (EXTEND, config(max_position_embeddings="64")),
    "window zero": (EXTEND, config(max_position_embeddings=0)),
    "layers absurd": (EXTEND, config(num_hidden_layers=10**9)),
    "layers zero": (EXTEND, config(num_hidden_layers=0)),
    # rope parameters
    "rope_theta a string": (EXTEND, rope(rope_type="default", rope_theta="10000")),
    "rope_theta null": (EXTEND, rope(rope_type="default", rope_theta=None)),
    "rope_theta of one": (EXTEND, rope(rope_type="default", rope_theta=1.0)),
    "rope_theta below zero": (EXTEND, rope(rope_type="default", rope_theta=-THETA)),
    "rope_type unknown": (EXTEND, rope(rope_type="wavy", rope_theta=THETA)),
    "rope factor missing": (EXTEND, rope(rope_type="linear", rope_theta=THETA)),
    "rope factor a string": (EXTEND, rope(**(LINEAR | {"factor": "2"}))),
    "rope factor zero": (EXTEND, rope(**(LINEAR | {"factor": 0.0}))),
    "rope factor absurd": (EXTEND, rope(**(YARN | {"factor": 1e300}))),
    "rope parameters a list": (EXTEND, config(rope_parameters=[1])),
    "rope already dynamic": (EXTEND, rope(**(LINEAR | {"rope_type": "dynamic"}))),
    "rope already yarn": (f"{EXTEND} --set ramp=index", rope(**YARN)),
    "rope_theta contradictory": (EXTEND, config(rope_theta=500000.0)),
    "rope_type contradictory": (EXTEND, config(rope_scaling=LINEAR)),
    "type contradictory": (EXTEND, config(rope_scaling={"type": "linear", "factor": 2.0})),
    "factor contradictory": (EXTEND, config(rope_parameters=LINEAR, rope_scaling=LINEAR | {"factor": 4.0})),
    "original window contradictory": (
        EXTEND,
        config(rope_parameters=YARN, original_max_position_embeddings=32),
    ),
    # weights
    "no weights": (EXTEND, without("model.safetensors")),
    "weights truncated": (EXTEND, truncated),
    "weights without a header": (EXTEND, file("model.safetensors", b"\xff" * 100)),
    "weights a pickle": (EXTEND, renamed("model.safetensors", "pytorch_model.bin")),
    "a link that leads outside": (EXTEND, lambda folder: (folder / "vocab.txt").symlink_to("/etc/hostname")),
    "weights of another width": (EXTEND, config(hidden_size=64)),
    "weights of fewer layers": (EXTEND, config(num_hidden_layers=3)),
    "weights of other names": (EXTEND, tensors_renamed),
    "weights with a NaN": (EXTEND, not_a_number),
    "weights that config.json names": (EXTEND, config(transformers_weights="other.safetensors")),
    "shard missing": (EXTEND, sharded(lambda folder: second_shard(folder).unlink())),
    "shard truncated": (EXTEND, sharded(lambda folder: second_shard(folder).write_bytes(b""))),
    "index no JSON": (EXTEND, sharded(file(INDEX, "{"))),
    "index without a map": (EXTEND, sharded(file(INDEX, "{}"))),
    "index names a tensor that is not there": (EXTEND, placed("model.ghost.weight")),
    "index leads outside": (EXTEND, placed("model.norm.weight", "../x.safetensors")),
    # the other files
    "tokenizer_config.json no JSON": (EXTEND, file("tokenizer_config.json", "{")),
    "tokenizer_config.json a list": (EXTEND, file("tokenizer_config.json", "[]")),
    "generation_config.json no JSON": (EXTEND, file("generation_config.json", "{")),
    "ropepatch.json no JSON": (EXTEND, file("ropepatch.json", "{")),
    # the target folder
    "target exists": ("extend src --to 256 --out there", nothing),
    "target inside the source": ("extend src --to 256 --out src/out", nothing),
    "target below a file": ("extend src --to 256 --out there/file/out", nothing),
    "target of too long a name": (f"extend src --to 256 --out {'o' * 300}", nothing),
    "target of nobody's home": ("extend src --to 256 --out ~nobody-of-that-name/out", nothing),
    # eval
    "no text": ("eval src --text missing.txt", nothing),
    "text not UTF-8": ("eval src --text src/latin.txt", file("latin.txt", "é".encode("latin-1"))),
    "text empty": ("eval src --text src/empty.txt", file("empty.txt", "")),
    "text too short": ("eval src --text src/short.txt", file("short.txt", "word1 word2")),
    "eval without a target": ("eval src --text src --method yarn", file("short.txt", "word1")),
    "eval set without a method": ("eval src --text src --set beta=3", file("short.txt", "word1")),
    "eval of no text": ("eval src", nothing),
    "eval lengths": ("eval src --text src --lengths 1k,,2k", file("short.txt", "word1")),
    "eval lengths beyond the target": (
        "eval src --text src --lengths 1k --method yarn --to 256",
        file("short.txt", "word1"),
    ),
    "eval of one token": ("eval src --text src --lengths 1", file("short.txt", "word1")),
    "eval without a model": ("eval --text src", nothing),
    "eval of no dataset": ("eval src --text no-such/dataset", nothing),
    "eval of a broken line": ("eval src --text src/lines.jsonl", file("lines.jsonl", '{"text": "a"}\n{"')),
    "eval of another field": ("eval src --text src/lines.jsonl", file("lines.jsonl", '{"body": "a"}')),
    "eval with a stride as long as its window": (
        "eval src --text src --lengths 4 --stride 4",
        file("short.txt", "word1"),
    ),
    "eval of joined documents without bos": ("eval src --text src --no-bos", nothing),
    "gain beside a stride": ("eval src --text src --gain --stride 4", nothing),
    "unknown suite": ("eval tiny --suite standart", nothing),
    "suite and method": ("eval tiny --suite demo --method yarn --to 1k", nothing),
    "suite without a text": ("eval src --suite demo", nothing),
    "suite no YAML": ("eval tiny --suite src/mine.yaml", file("mine.yaml", "{")),
    "recipe no YAML": ("extend tiny --recipe src/mine.yaml", file("mine.yaml", "method: yarn\n  to: 1k\n")),
    "results in a file": ("eval tiny --out there/file", nothing),
    "report exists": ("eval tiny --report there/file", nothing),
    # compare and plot
    "compare of no text": ("compare src --to 256", nothing),
    "map beyond its reach": ("plan tiny --to 1k --method string", nothing),
    "map that does not fit the window": ("plan tiny --to 1k --method rerope --set window=256", nothing),
    "map beside a recipe": ("extend tiny --to 2k --method rerope --recipe tiny --out new", nothing),
    "map in a recipe": (
        "extend tiny --recipe src/mapped.yaml --out new",
        file("mapped.yaml", MAPPED),
    ),
    "code of a method that is named": ("extend tiny --to 1k --method yarn --allow-code --out new", nothing),
    "code beside a recipe": (
        "extend tiny --to 2k --method auto --recipe tiny --allow-code --out new",
        nothing,
    ),
    "compare of an unknown method": ("compare tiny --to 1k --methods yarn,ntkk", nothing),
    "compare of what the model reads": ("compare tiny --to 256", nothing),
    "plot of no result": ("plot src/config.json", nothing),
    "plot of nothing": ("plot missing.json", nothing),
    "plot of a folder without results": ("plot there", nothing),
    "plot methods without a target": ("plot tiny --methods yarn", nothing),
    "plot of two models": ("plot tiny src --to 4x", nothing),
    # attention maps
    "on top of a map": ("plan src --to 1k", mapped),
    "quantised, with a map": (
        "extend src --to 256 --method rerope",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    "distil beside a recipe": ("extend tiny --to 1k --distil --recipe tiny", nothing),
    "a text to distil by and to measure on": ("extend tiny --to 1k --distil --text t --eval demo", nothing),
    "weights linked beside distil": ("extend tiny --to 1k --distil --link-weights", nothing),
    "a map with a recipe": ("extend tiny --to 1k --method rerope --recipe tiny", nothing),
    "a map beside code of others": (
        "extend src --to 256 --method rerope",
        file("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["their.T", null]}}'),
    ),
    "a map that nothing describes": ("eval src --text src", config(model_type="llama-attention-map")),
    # tiny and the demo
    "tiny has no revisions": ("plan tiny --to 1k --revision main", nothing),
    "tiny reaches its window": ("plan tiny --to 256", nothing),
    "demo exists": ("demo --out there", nothing),
    "page exists": ("explore --no-tiny --out there/file", nothing),
}


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("template") / "tiny-llama")


@pytest.fixture
def here(template, tmp_path, monkeypatch, capsys) -> Path:
    """An empty folder with a sound checkpoint in `src`, and something in `there`."""
    shutil.copytree(template, tmp_path / "src")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()
    return tmp_path


def run(monkeypatch, capsys, words: str) -> tuple[int | str | None, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["ropepatch", *words.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def stored() -> dict[str, str]:
    blocks = re.findall(r"^# (.*)\n((?:[^#\n].*\n)+)", SNAPSHOTS.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(blocks)


def check_snapshot(name: str, words: str, message: str) -> None:
    text = f"$ ropepatch {words}\n{message}"
    for pattern, replacement in NORMALISED:
        text = re.sub(pattern, replacement, text)
    if UPDATE:
        blocks = (stored() if SNAPSHOTS.exists() else {}) | {name: text}
        order = [*CASES, *DISKS]
        kept = sorted((case for case in blocks if case in order), key=order.index)
        SNAPSHOTS.parent.mkdir(exist_ok=True)
        written = SNAPSHOTS.with_suffix(f".{os.getpid()}")
        written.write_text("\n".join(f"# {case}\n{blocks[case]}" for case in kept), encoding="utf-8")
        written.replace(SNAPSHOTS)
    assert stored()[name] == text


def refusal(words: str, here: Path, monkeypatch, capsys) -> str:
    """What a command that ends as a user error should prints, proven to have changed nothing."""
    before = {path: data for path, (_, data) in contents(here).items()}
    code, out, err = run(monkeypatch, capsys, words)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line and not line.startswith("warning: ")]
    assert [line.partition(": ")[0] for line in lines] == ["error", "hint"]
    assert {path: data for path, (_, data) in contents(here).items()} == before
    return "".join(f"{line}\n" for line in lines).replace(str(here), "/here")


@pytest.mark.parametrize("name", CASES)
def test_a_user_error_is_one_line_and_a_hint_with_exit_code_2(name, here, monkeypatch, capsys):
    words, damage = CASES[name]
    damage(here / "src")
    message = refusal(words, here, monkeypatch, capsys)
    if name not in OTHERWISE:
        check_snapshot(name, words, message)


DISKS = {
    "disk full": (errno.ENOSPC, "write_text"),
    "disk read-only": (errno.EROFS, "mkdir"),
    "folder closed to the user": (errno.EACCES, "mkdir"),
    "quota used up": (errno.EDQUOT, "write_text"),
}


@pytest.mark.parametrize("name", DISKS)
def test_a_disk_that_cannot_be_written_is_one_line_and_a_hint(name, here, monkeypatch, capsys):
    """Root may write anywhere, so the system's refusal is played."""
    code, step = DISKS[name]

    def refuse(path: Path, *arguments, **options):
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as play:
        play.setattr(Path, step, refuse)
        message = refusal(EXTEND, here, play, capsys)
    check_snapshot(name, EXTEND, message)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(2, "No such file", "/a/b\x1b[2J"),
            "error: /a/b\\x1b[2J: No such file\nhint: look at that path\n",
        ),
        (OSError(errno.ENOSPC, "No space left"), "error: No space left\nhint: free some space\n"),
        (OSError("odd"), "error: odd\n"),
    ],
)
def test_what_the_system_refuses_unforeseen_names_its_path(error, said, here, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr("ropepatch.extension.planning.plan", refuse)
    assert run(monkeypatch, capsys, "plan src --to 256") == (2, "", said)


def test_the_snapshots_hold_these_cases_and_no_others():
    assert [*stored()] == [*CASES, *DISKS]


def test_an_interrupted_extension_exits_130_and_leaves_nothing(here, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropepatch.extension.writing.clone_files", interrupt)
    before = contents(here).keys()
    code, out, err = run(monkeypatch, capsys, EXTEND)
    assert (code, out, "Traceback" in err) == (130, "", False)
    assert contents(here).keys() == before
