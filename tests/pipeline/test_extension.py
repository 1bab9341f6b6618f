"""`extend` from Python: the same files as the command, resuming, and the returned extension."""

import json
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_folders import SMALL, write_checkpoint
from run_recipes import write_recipe_and_suite
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedConfig

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, read_text
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.source import TINY
from ropepatch.publishing.contents import judge
from ropepatch.settings import RECIPES, find_shipped


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and a suite."""
    return write_recipe_and_suite(tmp_path_factory.mktemp("place"))


def call(place, out="called", **options):
    """Extend with a recipe and a suite, from Python."""
    words = {"recipe": place / "six.yaml", "evaluate": place / "suite.yaml"}
    return ropepatch.extend("tiny", place / out, **words | options)


@pytest.fixture(scope="module")
def interrupted(place):
    """The output lines of a call that was interrupted between two checkpoints."""
    lines = []

    def until_the_fifth(line):
        lines.append(line)
        if line.startswith("step 5/6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(place, say=until_the_fifth)
    assert not (place / "called").exists()
    return lines


@pytest.fixture(scope="module")
def resumed(place, interrupted):
    """The result of the same call afterwards, with its output lines and stages."""
    lines, stages = [], []

    @contextmanager
    def progress(name):
        stages.append(name)
        yield lambda done, total: None

    return call(place, say=lines.append, progress=progress), lines, stages


@pytest.fixture(scope="module")
def extension(resumed):
    return resumed[0]


def test_an_interrupted_call_resumes_from_its_last_checkpoint(resumed):
    _, lines, stages = resumed
    assert "resuming from checkpoint-4" in lines
    assert not any(line.startswith("step 4/6") for line in lines)
    assert "perplexity, yarn + six, 512" in stages


def test_a_repeated_call_reports_that_it_is_finished_and_measures_nothing(resumed, place):
    def unmeasured(name):
        raise AssertionError(f"{name} is measured again")

    lines = []
    again = call(place, say=lines.append, progress=unmeasured)
    assert f"{again} is finished" in lines
    assert again.record == resumed[0].record


def test_a_call_interrupted_while_measuring_resumes_only_with_the_same_arguments(place, monkeypatch):
    def after_the_first(line):
        if line.startswith("perplexity, baseline"):
            raise KeyboardInterrupt

    def failed(folder, repo, **_):
        raise RopepatchError("no network")

    measured = {"recipe": None, "to": 512}
    with pytest.raises(KeyboardInterrupt):
        call(place, out := "measured", say=after_the_first, **measured)
    assert read_json(place / out / "ropepatch.json")["evaluation"] == {}
    assert any("evaluation is incomplete" in note for note in judge(place / out).notes)
    for other in ({"evaluate": None}, {"to": 1024}, {"method": "ntk"}, {"dry_run": True, "to": 1024}):
        if other.get("dry_run"):
            (refusal,) = call(place, out, **measured | other).obstacles
        else:
            with pytest.raises(RopepatchError) as caught:
                call(place, out, **measured | other)
            refusal = caught.value
        assert str(refusal) == f"{place / out} already exists"
    assert not call(place, out, **measured | {"dry_run": True}).obstacles
    lines = []
    once = call(place, "once", **measured)
    again = call(place, out, say=lines.append, **measured)
    assert f"{again} is already written" in lines
    assert again.record == once.record
    assert not any("evaluation is incomplete" in note for note in judge(again.folder).notes)
    files = [{file.name for file in one.folder.rglob("*")} for one in (once, again)]
    assert files[0] == files[1]
    monkeypatch.setattr("ropepatch.publishing.hub.check_repo", lambda repo, private: None)
    monkeypatch.setattr("ropepatch.publishing.hub.push", failed)
    for _ in range(2):
        with pytest.raises(RopepatchError, match="no network"):
            call(place, "pushed", push="local/pushed", **measured | {"evaluate": None})


@pytest.mark.slow
def test_the_extend_command_writes_the_same_files_as_the_python_call(extension, place, run_here):
    words = ("--recipe", "six.yaml", "--eval", "suite.yaml", "--out", "commanded")
    done = run_here("extend", "tiny", *words, cwd=place)
    assert done.returncode == 0, done.stderr
    commanded = place / "commanded"
    for file in ("config.json", "model.safetensors", "tokenizer_config.json"):
        assert (commanded / file).read_bytes() == (extension / file).read_bytes()
    record = read_json(commanded / "ropepatch.json")
    assert record.pop("command").startswith("ropepatch extend tiny --recipe six.yaml")
    ours = read_json(extension / "ropepatch.json")
    for written in (record, ours):
        del written["adaptation"]["seconds"]
    assert record == ours
    names = [
        {file.name for file in (folder / "evaluation").iterdir()} for folder in (commanded, extension.folder)
    ]
    assert names[0] == names[1]


def test_an_extension_is_a_path_with_record_results_and_short_context_check(extension, place):
    assert os.fspath(extension) == str(extension) == str(place / "called")
    assert extension / "config.json" == place / "called" / "config.json"
    assert AutoModelForCausalLM.from_pretrained(extension).config.max_position_embeddings == 512
    plan = ropepatch.plan(extension, to=1024, method="linear")
    assert plan.rope.original_max_position_embeddings == 512
    assert extension.record == read_json(place / "called" / "ropepatch.json")
    assert {result.label for result in extension.results} == {"floor", "baseline", "yarn", "yarn + six"}
    assert extension.gate.to_dict() == extension.record["adaptation"]["gate"]
    assert extension.pushed is None
    frame = extension.results.to_pandas("loss")
    rows = frame[(frame.label == "yarn + six") & frame.length.notna()]
    assert list(rows.length) == [128, 256, 512]
    (result,) = (r for r in extension.results if (r.task, r.label) == ("perplexity", "yarn + six"))
    assert list(rows.value) == [row.value for row in result.of("loss", "length")]
    assert set(extension.results.to_pandas("found").task) == {"retrieval"}


@pytest.mark.parametrize(
    ("method", "module", "hint"),
    [("to_pandas", "pandas", "pip install pandas"), ("plot", "matplotlib", 'pip install "ropepatch[plot]"')],
)
def test_the_error_of_a_missing_package_contains_the_pip_command(
    extension, monkeypatch, method, module, hint
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RopepatchError, match=f"needs? {module}") as caught:
        getattr(extension.results, method)()
    assert caught.value.hint == hint


# Without a recipe


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    plan = ropepatch.plan("tiny", to=512)
    return ropepatch.extend(plan, tmp_path_factory.mktemp("plain") / "out", record={"why": "a test"})


def test_a_plan_is_extended_without_training(plain):
    assert (plain.plan.target, plain.record["why"], plain.gate) == (512, "a test", None)
    assert len(plain.results) == 0
    assert plain.plot()._repr_png_().startswith(b"\x89PNG")
    far = replace(plain, plan=ropepatch.plan("tiny", to=512, method="rerope"))
    titles = [extension.plot().axes[0].get_title(loc="left") for extension in (plain, far)]
    assert titles == ["tokens per rotation", "effective distance, tokens"]
    assert "logits equal" in plain._repr_html_()


def test_extend_accepts_length_multiples_and_method_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    extension = ropepatch.extend(
        "tiny", to="2x", method="ntk-by-parts", beta=16.0, dry_run=True, say=lines.append
    )
    assert (extension.plan.target, extension.plan.scaling.beta) == (512, 16.0)
    assert (extension.folder.name, extension.record, lines) == ("tiny-ntk-by-parts-512", {}, [])
    with pytest.raises(RopepatchError, match="no parameter 'betta'"):
        ropepatch.extend("tiny", to="2x", betta=16.0)
    with pytest.raises(RopepatchError, match="a plan already sets target, method"):
        ropepatch.extend(ropepatch.plan("tiny", to=512), tmp_path / "out", to=1024)
    assert not list(tmp_path.iterdir())


def test_the_folder_name_ends_with_the_full_recipe_name(tmp_path):
    recipe = tmp_path / "tiny-2.5.yaml"
    recipe.write_bytes(find_shipped("tiny", RECIPES, "recipe").read_bytes())
    for given, name in (("tiny", "tiny"), (str(recipe), "tiny-2.5")):
        made = ropepatch.extend("tiny", to="1k", recipe=given, dry_run=True, say=print)
        assert made.folder.name.endswith(f"-1k-{name}")


def test_config_json_is_opened_once_by_ropepatch_and_once_by_stock_transformers(tmp_path, monkeypatch):
    opened = []

    def noted(read, at):
        def reading(*arguments):
            if Path(arguments[at]).name == "config.json":
                opened.append("source" if Path(arguments[at]).parent == TINY else "written")
            return read(*arguments)

        return reading

    stock = PreTrainedConfig._dict_from_json_file.__func__
    monkeypatch.setattr("ropepatch.files.read_text", noted(read_text, 0))
    ropepatch.extend("tiny", tmp_path / "out", to="2x", reading=False, say=lambda line: None)
    assert [*map(opened.count, ("source", "written"))] == [1, 1]
    opened.clear()
    monkeypatch.setattr(PreTrainedConfig, "_dict_from_json_file", classmethod(noted(stock, 1)))
    ropepatch.load("tiny", device="cpu")
    assert opened == ["source", "source"]  # once by ropepatch, once by stock transformers


def test_a_folder_called_tiny_is_not_the_bundled_checkpoint(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(plain.folder)
    made = ropepatch.extend(Path("tiny"), to="1k", method="linear", dry_run=True)
    assert made.plan.rope.original_max_position_embeddings == 512


# Files of the source


@pytest.fixture
def untidy(tmp_path):
    """A checkpoint folder that also contains other files."""
    shutil.copytree(TINY, tmp_path / "model")
    others = ["credentials.json", "id_rsa", "tokens.PY", "x.pkl", "notes.md", "examples/a.txt", "params.json"]
    for name in [*others, ".env", "pytorch_model.bin", "special_tokens_map.json"]:
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path / "model"


def test_files_outside_the_checkpoint_format_are_listed_and_copied_only_with_include(untidy, tmp_path):
    file, lines = untidy / "tokenizer_config.json", []
    auto_map = {"AutoTokenizer": ["id_mine.Mine", None]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "M", "auto_map": auto_map}))
    out = ropepatch.extend(
        untidy, tmp_path / "out", to="2k", include=["examples/*", "note*"], say=lines.append
    )
    stays = {"credentials.json", "id_rsa", "tokens.PY", "x.pkl", "params.json", "pytorch_model.bin"}
    assert not any((out / name).exists() for name in stays | {".env"})
    assert all((out / name).exists() for name in ("notes.md", "examples/a.txt", "special_tokens_map.json"))
    (line,) = [line for line in lines if line.startswith("not copied")]
    assert f": {', '.join(sorted(stays))} (`include`" in line
    assert "warning: the tokenizer needs id_mine.py; add `include=id_mine.py` to copy it" in lines
    for pattern in (
        "*.bin",
        "config.json",
        "nothing.md",
    ):  # weights of another format, rewritten or missing
        with pytest.raises(RopepatchError, match="names no file in"):
            ropepatch.extend(untidy, tmp_path / "again", to="2k", include=[pattern])


def test_a_file_with_an_access_token_is_rejected_and_no_output_is_left(untidy, tmp_path):
    (untidy / "notes.md").write_text("hf_" + "Zz9" * 11 + "A")
    with pytest.raises(RopepatchError, match=r"notes\.md contains a Hub access token"):
        ropepatch.extend(untidy, tmp_path / "out", to="2k", include=["notes.md"])
    assert not (tmp_path / "out").exists()
    ropepatch.extend(untidy, tmp_path / "out", to="2k")


@pytest.mark.parametrize(
    ("how", "missing", "problem"),
    [
        ({"method": "dynamic", "recipe": "tiny"}, None, "follows the length"),
        ({"recipe": "tiny"}, "ropepatch.training.adaptation", "a recipe needs"),
    ],
    ids=["trainable", "installed"],
)
def test_errors_from_the_config_are_raised_before_weights_are_downloaded(
    tmp_path, monkeypatch, how, missing, problem
):
    monkeypatch.setattr(Checkpoint, "complete", lambda *_, **__: pytest.fail("downloaded"))
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RopepatchError, match=problem):
        ropepatch.extend("tiny", tmp_path / "out", to="2k", **how)


def test_a_remapping_of_a_model_with_layers_without_rope_resumes(tmp_path, monkeypatch):
    def failed(folder, repo, **_):
        raise RopepatchError("no network")

    monkeypatch.setattr("ropepatch.publishing.hub.check_repo", lambda repo, private: None)
    monkeypatch.setattr("ropepatch.publishing.hub.push", failed)
    source = write_checkpoint(tmp_path / "source")
    tiny_model("smollm3", **SMALL, no_rope_layers=[1, 0]).save_pretrained(source)
    for _ in range(2):
        with pytest.raises(RopepatchError, match="no network"):
            ropepatch.extend(source, tmp_path / "out", to=256, method="rerope", push="local/out")
    layers = read_json(tmp_path / "out" / "config.json")["position_remapping"]["layers"]
    assert layers is not None
