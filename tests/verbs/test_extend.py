"""`extend`: the folder it writes, the files of the source, resuming, and the returned extension."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from checkpoint_folders import (
    RECORDS,
    SMALL,
    edit_json,
    with_other_weights,
    write_checkpoint,
)
from gguf_files import write_gguf
from run_recipes import small_recipe
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension.record import amend
from ropepatch.files import read_json
from ropepatch.model.checkpoint import TINY


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    plan, out = ropepatch.plan("tiny", to=512), tmp_path_factory.mktemp("plain") / "out"
    return ropepatch.extend(plan, out, reading=False, command="ropepatch test")


def test_a_plan_is_extended_without_training(plain):
    assert (plain.plan.target, plain.check) == (512, None)
    assert plain.record["command"] == "ropepatch test"
    assert ropepatch.plot(plain.plan)._repr_png_().startswith(b"\x89PNG")
    far = replace(plain, plan=ropepatch.plan("tiny", to=512, method="rerope"))
    plots = [ropepatch.plot(extension.plan) for extension in (plain, far)]
    titles = [plot.axes[0].get_title(loc="left") for plot in plots]
    assert titles == ["tokens per rotation", "effective distance, tokens"]
    assert "logits equal" in plain.outcome()


def test_extend_accepts_length_multiples_and_method_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    how = {"method": "ntk-by-parts", "beta": 16.0, "reading": False}
    extension = ropepatch.extend("tiny", to="2x", say=lines.append, **how)
    assert (extension.plan.target, extension.plan.method.beta) == (512, 16.0)
    assert (extension.folder.name, lines) == ("tiny-ntk-by-parts-512", [])
    shutil.rmtree(extension.folder)
    with pytest.raises(RopepatchError, match="no parameter 'betta'"):
        ropepatch.extend("tiny", to="2x", betta=16.0)
    with pytest.raises(RopepatchError, match="a plan already sets target, method"):
        ropepatch.extend(ropepatch.plan("tiny", to=512), tmp_path / "out", to=1024)
    assert not list(tmp_path.iterdir())


def test_only_the_same_call_keeps_a_checkpoint(tmp_path):
    once = ropepatch.extend("tiny", tmp_path / "out", to=512, reading=False)
    assert not (once.folder / "reading.json").exists()
    for other in ({"to": 1024}, {"to": 512, "method": "ntk"}):
        with pytest.raises(RopepatchError, match=f"{tmp_path / 'out'} already exists"):
            ropepatch.extend("tiny", tmp_path / "out", **other)
    lines = []
    again = ropepatch.extend("tiny", tmp_path / "out", to=512, say=lines.append)
    assert lines[-1].endswith("out is already written")
    assert again.record == once.record
    # Which the first call was told to leave out
    assert (once.folder / "reading.json").is_file()


def trained(folder):
    amend(folder, training=RECORDS["trained"]["training"])


@pytest.mark.parametrize("change", [with_other_weights, trained])
def test_a_checkpoint_that_was_changed_since_is_not_kept(change, tmp_path):
    folder = ropepatch.extend("tiny", tmp_path / "out", to=512, reading=False).folder
    change(folder)
    with pytest.raises(RopepatchError, match="out already exists"):
        ropepatch.extend("tiny", folder, to=512, reading=False)


def test_a_folder_called_tiny_is_not_the_bundled_checkpoint(
    plain, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(plain.folder)
    made = ropepatch.plan(Path("tiny"), to="1k", method="linear")
    assert made.config.rope.original_max_position_embeddings == 512


# Files of the source


OTHERS = "credentials.json", "params.json", "pytorch_model.bin", "tokens.PY", "x.pkl"


@pytest.fixture
def untidy(tmp_path):
    """A checkpoint folder that also contains other files."""
    shutil.copytree(TINY, tmp_path / "model")
    added = [*OTHERS, ".env", "notes.md", "examples/a.txt", "special_tokens_map.json"]
    for name in added:
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path / "model"


def test_other_files_are_listed_and_copied_only_with_include(untidy, tmp_path):
    file, lines = untidy / "tokenizer_config.json", []
    auto_map = {"AutoTokenizer": ["id_mine.Mine", None]}
    edit_json(file, tokenizer_class="M", auto_map=auto_map)
    extend = partial(ropepatch.extend, untidy, to="2k", reading=False, say=lines.append)
    out = extend(tmp_path / "out", include=["examples/*", "note*"]).folder
    assert not any((out / name).exists() for name in (*OTHERS, ".env"))
    for name in ("notes.md", "examples/a.txt", "special_tokens_map.json"):
        assert (out / name).exists()
    (line,) = [line for line in lines if line.startswith("not copied")]
    assert f": {', '.join(sorted(OTHERS))} (`include`" in line
    assert (
        "warning: the tokenizer needs id_mine.py; add `include=id_mine.py` to copy it"
        in lines
    )
    # Weights of another format, rewritten or missing
    for pattern in ("*.bin", "config.json", "nothing.md"):
        with pytest.raises(RopepatchError, match="names no file in"):
            extend(tmp_path / "again", include=[pattern])


def test_a_file_with_an_access_token_is_rejected(untidy, tmp_path):
    (untidy / "notes.md").write_text("hf_" + "Zz9" * 11 + "A")
    with pytest.raises(RopepatchError, match=r"notes\.md contains a Hub access token"):
        ropepatch.extend(untidy, tmp_path / "out", to="2k", include=["notes.md"])
    assert not (tmp_path / "out").exists()


def test_a_remapping_of_a_model_with_layers_without_rope_resumes(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    tiny_model("smollm3", **SMALL, no_rope_layers=[1, 0]).save_pretrained(source)
    for _ in range(2):
        ropepatch.extend(source, tmp_path / "out", to=256, method="rerope")
    layers = read_json(tmp_path / "out" / "config.json")["position_remapping"]["layers"]
    assert layers is not None


def test_options_of_a_checkpoint_do_not_fit_gguf(tmp_path):
    write_gguf(tmp_path / "a.gguf", "qwen3")
    with pytest.raises(RopepatchError, match="do not apply to a GGUF file"):
        ropepatch.extend(tmp_path / "a.gguf", to="2x", link_weights=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "tiny", "to": "1k"},
            "data.windows contains 2048 tokens, more than the target length of 1024",
        ),
        ({"recipe": small_recipe(), "out": "shut"}, "shut already exists"),
        (
            {"recipe": small_recipe(), "out": "begun"},
            "begun.run exists and is not a run",
        ),
        ({"out": "file/out"}, "cannot write .*file/out: Not a directory"),
        ({"include": ["key"]}, "key contains a Hub access token"),
        ({"model": "cut"}, "missing keys, for instance"),
        ({"model": "both"}, "both contains a model and a PEFT adapter"),
    ],
    ids=str,
)
def test_a_dry_run_reports_the_error_of_the_call(
    options, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("shut", "begun.run/other"):
        Path(name).mkdir(parents=True)
    for name in ("file", "begun.run/.lock"):
        Path(name).touch()
    for name in ("cut", "both", "model"):
        shutil.copytree(TINY, name)
    tensors = load_file(TINY / "model.safetensors")
    tensors.popitem()
    save_file(tensors, "cut/model.safetensors")
    Path("both/adapter_config.json").write_text("{}")
    Path("model/key").write_text("hf_" + 34 * "a")
    monkeypatch.setattr("ropepatch.model.checkpoint.Checkpoint.load", None)
    options = {"model": "model", "to": 512, "say": lambda line: None} | options
    before = sorted(tmp_path.rglob("*"))
    verb = ropepatch.extend
    if "recipe" in options:
        verb = ropepatch.train
        first, *_ = verb(**options, dry_run=True).obstacles
        assert re.search(message, str(first))
        message = re.escape(str(first))
    with pytest.raises(RopepatchError, match=message):
        verb(**options)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kept", [[], ["model.safetensors"]])
def test_a_dry_run_prints_missing_files_and_the_output_folder(kept, tmp_path, run_here):
    (tmp_path / "src").mkdir()
    for name in ("config.json", *kept):
        shutil.copy(TINY / name, tmp_path / "src")
    train = "train", "src", "--recipe", "tiny", "--to", "2x", "--dry-run"
    done = run_here(*train, cwd=tmp_path)
    assert f"to be written: {tmp_path}/src-yarn-512-tiny" in done.stdout
    assert done.returncode == 2
    error, _ = done.stderr.splitlines()
    assert ("no weights in src" in error) == (not kept)
    assert "transformers cannot load the tokenizer of src" in error
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
