"""The recipe of the bundled checkpoint, the rows it is trained on, and its training in miniature."""

import hashlib
import shutil
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pretrain as program
import pretraining
import pytest
import torch
import typer
import yaml
from pretraining import Rows, make_tokenizer, pretrain
from pretraining_recipe import Recipe, Stage, read_recipe
from pretraining_rows import MATERIALS, Stock
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Trainer
from typer.testing import CliRunner

from ropepatch.data.tiny.grammar import BOS, EOS
from ropepatch.data.tiny.materials import IGNORED
from ropepatch.errors import RopepatchError
from ropepatch.model.source import TINY
from ropepatch.settings import seed_of

SHIPPED = Path(__file__).parents[2] / "recipes" / "tiny" / "pretrain.yaml"
# Of eight rows of 161 tokens.
GOLDEN_ROWS = {
    "strings": "6446358c2961a37f",
    "copies": "80917c4a9c361f4e",
    "passkey": "0a83097660b18c5c",
    "tales": "579bb1a2f13be9ff",
    "recalls": "c1b6b333f6862382",
    "retold": "57631cde0758c668",
    "stories": "4621f5decff4c6c2",
}
TEXT = "Once a small grey cat sat by the road, and nobody saw it. " * 60


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def stock(tokenizer):
    return Stock.of(tokenizer, [TEXT, "And then it rained."])


# Seeds


def test_a_seed_is_the_same_in_every_version():
    assert seed_of("passkey", 0, 256, 0.5, 3) == 8445069441905667185
    assert seed_of() != seed_of(0) != seed_of("0") != seed_of("0", 0)


# The recipe


def content(**changes):
    stage = {
        "name": "one",
        "mixture": {"strings": 0.5, "tales": 0.5},
        "windows": [11, 13],
        "tokens_per_step": 44,
        "steps": 5,
        "learning_rate": 1.0e-3,
    }
    model = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 96,
    }
    stages = [stage | changes.pop("stage", {})]
    model |= changes.pop("model", {})
    return {"seed": 0, "vocab_size": 670, "texts": [], "model": model, "stages": stages} | changes


def written(folder, recipe):
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def test_the_shipped_recipe_is_what_the_bundled_checkpoint_was_made_from(tokenizer):
    recipe = read_recipe(SHIPPED)
    made, bundled = recipe.config().to_dict(), LlamaForCausalLM.config_class.from_pretrained(TINY).to_dict()
    for key in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "max_position_embeddings"):
        assert made[key] == bundled[key]
    assert made["rope_parameters"]["rope_theta"] == bundled["rope_parameters"]["rope_theta"] == 10000
    assert recipe.vocab_size == len(tokenizer)
    assert max(max(stage.windows) for stage in recipe.stages) == bundled["max_position_embeddings"]
    with torch.device("meta"):
        model = LlamaForCausalLM(recipe.config())
    assert 1.9e6 < sum(weight.numel() for weight in model.parameters()) < 2e6


@pytest.mark.parametrize(
    ("recipe", "message", "hint"),
    [
        (content(stages=content()["stages"] * 2), "two stages have the same name: one, one", None),
        (content(stage={"name": "a/b"}), "name must be letters, digits, _ and -", None),
        (content(stage={"name": "checkpoint"}), "stages[0]: name must not be checkpoint", None),
        (content(stage={"mixture": {"tale": 1}}), "got 'tale'", "did you mean tales?"),
        (content(stage={"windows": [11, 45]}), "a row of 45 tokens has no room in 44 tokens_per_step", None),
        (content(stage={"lr_scheduler_type": "cosin"}), "must be one of linear", "did you mean cosine?"),
        (content(model={"hidden_sise": 8}), "unknown model key 'hidden_sise'", "did you mean hidden_size?"),
        (content(model={"hidden_size": "big"}), "model: Validation error for", None),
        (content() | {"model": {"hidden_size": 16}}, "model has no max_position_embeddings", None),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line(tmp_path, recipe, message, hint):
    file = written(tmp_path, recipe)
    with pytest.raises(RopepatchError) as caught:
        read_recipe(file)
    assert str(caught.value).startswith(f"{file}")
    assert message in str(caught.value)
    assert "\n" not in f"{caught.value}{caught.value.hint}"
    assert hint is None or caught.value.hint.startswith(hint)


# Materials


def test_each_material_is_what_it_was_when_the_bundled_checkpoint_was_trained(stock):
    """The rows are part of the recipe: a change here makes other weights."""
    rows = {
        name: hashlib.sha256(
            b"".join(part.numpy().tobytes() for seed in range(8) for part in draw(stock, 161, seed))
        ).hexdigest()[:16]
        for name, draw in MATERIALS.items()
    }
    assert rows == GOLDEN_ROWS


@pytest.mark.parametrize("length", [11, 12])
def test_a_string_is_trained_on_its_second_half_and_its_end(stock, length):
    ids, labels = MATERIALS["strings"](stock, length, 0)
    half = (length - 2) // 2
    string = ids[1 : 1 + half].tolist()
    assert ids.tolist() == [BOS, *string, EOS, *string, EOS][:length]
    assert labels.tolist() == [IGNORED] * (half + 2) + ids[half + 2 :].tolist()


def test_no_story_ends_with_the_last_token_of_all(stock):
    """The bundled checkpoint was trained so."""
    for seed in range(20):
        ids, _ = MATERIALS["stories"](stock, len(stock.stories) - 1, seed)
        assert torch.equal(ids, stock.stories[:-1])


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("copies", 10, "a row of copies takes 11 tokens, got 10"),
        ("passkey", 79, "a row of passkey takes 80 tokens, got 79"),
        ("stories", 5000, r"the texts have \d+ tokens, too few for a row of 5000"),
    ],
)
def test_a_row_that_cannot_be_drawn_is_refused(stock, name, length, message):
    with pytest.raises(RopepatchError, match=message):
        MATERIALS[name](stock, length, 0)


def test_the_shortest_rows_can_be_drawn(stock):
    assert len(MATERIALS["copies"](stock, 11, 0)[0]) == 11
    assert all(len(MATERIALS["passkey"](stock, 80, seed)[0]) == 80 for seed in range(20))


# Rows


def stage(**changes):
    return Stage(**content(stage=changes)["stages"][0])


def test_the_rows_of_a_stage_are_always_the_same(stock):
    """Their number, the windows in turn, the material by its share and the seed of each are all in the hash.

    A seed of its own draws the material: from the row's it would foretell the first draw of the row.
    """
    mixture = {"tales": 1, "strings": 1.0, "copies": 2}
    rows = Rows(stage(mixture=mixture, windows=[11, 13, 44], tokens_per_step=440, steps=7), stock, seed=3)
    steps = [rows[step] for step in range(len(rows))]
    assert [tuple(step["input_ids"].shape) for step in steps] == [(40, 11), (33, 13), (10, 44)] * 2 + [
        (40, 11)
    ]
    hashed = hashlib.sha256(b"".join(step[key].numpy().tobytes() for step in steps for key in sorted(step)))
    assert hashed.hexdigest()[:16] == "97dc374c47d072f5"
    everything = [tuple(row.tolist()) for step in steps for row in step["input_ids"]]
    assert len(set(everything)) > 0.99 * len(everything)


# Training

STAGES = [
    {"name": "one", "mixture": {"strings": 0.5, "tales": 0.5}, "windows": [11, 13], "steps": 7},
    {"name": "two", "mixture": {"recalls": 0.6, "stories": 0.4}, "windows": [64], "steps": 6, "bf16": True},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two stages of a few steps, with a text of their own."""
    text = tmp_path_factory.mktemp("texts") / "text.txt"
    text.write_text(TEXT)
    common = {"tokens_per_step": 128, "learning_rate": 5.0e-2}
    stages = [Stage(**common | stage) for stage in STAGES]
    return Recipe(**content(texts=[str(text)]) | {"stages": stages})


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """An uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "SAVE_EVERY", 2)
        return pretrain(small, tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def made(finished):
    """The tokenizer and the stock of the finished run, so that not every run makes them again."""
    tokenizer = AutoTokenizer.from_pretrained(finished)
    return tokenizer, Stock.of(tokenizer, [TEXT.strip()])


@pytest.fixture
def quick(small, made, monkeypatch):
    """The recipe of the finished run, without making what is made already."""
    monkeypatch.setattr(pretraining, "SAVE_EVERY", 2)
    monkeypatch.setattr(pretraining, "make_tokenizer", lambda *_: made[0])
    monkeypatch.setattr(Stock, "of", lambda *_: made[1])
    return small


def weights(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for part in ("one/done", "two/done", "checkpoint")
        for file in (folder / part).glob("model.safetensors")
    }


@pytest.mark.slow
def test_stock_transformers_loads_the_finished_checkpoint(finished, small):
    stored = load_file(finished / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(finished)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert all(torch.equal(model.state_dict()[name], tensor.float()) for name, tensor in stored.items())
    trained = load_file(finished.parent / "two" / "done" / "model.safetensors")
    assert all(torch.equal(trained[name].bfloat16(), tensor) for name, tensor in stored.items())
    assert model.config.use_cache
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        BOS,
        EOS,
        None,
    )
    config = yaml.safe_load((finished / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000
    assert config["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(finished)
    assert len(tokenizer) == small.vocab_size == config["vocab_size"]
    assert tokenizer.model_max_length == 96
    assert yaml.safe_load((finished / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )
    assert (finished / "model.safetensors").stat().st_mode & 0o777 == 0o644
    before = load_file(finished.parent / "one" / "done" / "model.safetensors")
    assert all((before[name] - trained[name]).abs().max() > 1e-4 for name in before)


@pytest.mark.slow
def test_the_tokenizer_of_the_shipped_recipe_is_the_bundled_one(shared, tokenizer, monkeypatch):
    monkeypatch.chdir(SHIPPED.parents[2])
    recipe = read_recipe(SHIPPED)
    documents = pretraining.read_documents(shared / "texts" / "tinystories")
    made = make_tokenizer(recipe, documents).backend_tokenizer
    assert made.to_str() == tokenizer.backend_tokenizer.to_str()


class StoppedError(Exception):
    pass


def interrupted(recipe, out, name, calls):
    """A run that stops when a stage draws one more step than so many."""
    draw, drawn = Rows.__getitem__, Counter()

    def draw_or_stop(rows, step):
        drawn[rows.stage.name] += 1
        if drawn[name] > calls:
            raise StoppedError
        return draw(rows, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "__getitem__", draw_or_stop)
        with pytest.raises(StoppedError):
            pretrain(recipe, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "calls", "saved", "left"),
    [("one", 1, [], 7 + 6), ("two", 0, [], 6), ("two", 5, ["checkpoint-4"], 6 - 4)],
)
def test_an_interrupted_run_goes_on_to_the_same_weights_and_draws_only_what_is_left(
    quick, finished, tmp_path, monkeypatch, name, calls, saved, left
):
    interrupted(quick, tmp_path, name, calls)
    assert [folder.name for folder in (tmp_path / name).glob("checkpoint-*")] == saved
    assert not (tmp_path / "checkpoint").exists()
    (tmp_path / name / "checkpoint-5").mkdir()  # half written: no trainer_state.json, which comes last
    steps, draw = [], Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda rows, step: steps.append(step) or draw(rows, step))
    assert pretrain(quick, tmp_path) == tmp_path / "checkpoint"
    assert len(steps) == left
    assert weights(tmp_path) == weights(finished.parent)
    assert not list(tmp_path.rglob("*.partial"))


def test_the_last_of_several_checkpoints_is_the_one_of_the_most_steps(tmp_path):
    assert pretraining._last_checkpoint(tmp_path / "not begun") is None
    for name in ("checkpoint-750", "checkpoint-1000", "checkpoint-1250"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-750", "checkpoint-1000"):
        (tmp_path / name / "trainer_state.json").write_text("{}")
    assert pretraining._last_checkpoint(tmp_path) == tmp_path / "checkpoint-1000"


@pytest.mark.slow
def test_a_checkpoint_that_could_not_be_written_leaves_the_one_before_it(
    quick, finished, tmp_path, monkeypatch
):
    shutil.copytree(finished.parent, tmp_path / "run")
    before = contents(tmp_path / "run" / "checkpoint")

    def publish(model, tokenizer, folder):
        (folder / "config.json").write_text("{")
        raise StoppedError

    monkeypatch.setattr(pretraining, "_publish", publish)
    with pytest.raises(StoppedError):
        pretrain(quick, tmp_path / "run")
    assert contents(tmp_path / "run" / "checkpoint") == before


@pytest.mark.slow
def test_the_trainer_is_told_what_each_stage_says(quick, tmp_path, monkeypatch):
    arguments = []
    monkeypatch.setattr(Trainer, "train", lambda self, **_: arguments.append(self.args))
    pretrain(changed(quick, stages={"two": {"lr_scheduler_type": "cosine", "learning_rate": 0.25}}), tmp_path)
    names = "max_steps learning_rate lr_scheduler_type bf16 warmup_steps seed save_total_limit"
    assert [attrgetter(*names.split())(stage) for stage in arguments] == [
        (7, 0.05, "constant_with_warmup", False, 50, 0, 1),
        (6, 0.25, "cosine", True, 50, 0, 1),
    ]


def changed(recipe, **changes):
    of_stages = changes.pop("stages", {})
    stages = [Stage(**vars(stage) | of_stages.get(stage.name, {})) for stage in recipe.stages]
    return Recipe(**vars(recipe) | {"stages": stages} | changes)


def contents(folder):
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "differs", "where"),
    [
        ({"seed": 1}, "seed", "one"),
        ({"stages": {"two": {"steps": 60}}}, "stages", "two"),
    ],
)
def test_the_run_of_another_recipe_is_not_gone_on_with(quick, finished, changes, differs, where):
    run = finished.parent
    before = contents(run)
    with pytest.raises(
        RopepatchError, match=rf"{where} is of another recipe: it differs in {differs}"
    ) as caught:
        pretrain(changed(quick, **changes), run)
    assert "give another --out" in caught.value.hint
    assert contents(run) == before


@pytest.mark.slow
def test_a_finished_run_is_handed_back_where_its_texts_have_moved_and_not_where_they_say_something_else(
    quick, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr(Trainer, "train", lambda *_, **__: pytest.fail("trained again"))
    before = weights(finished.parent)
    file = tmp_path / "moved.txt"
    file.write_text(TEXT)
    assert pretrain(changed(quick, texts=[str(file)]), finished.parent) == finished
    assert weights(finished.parent) == before
    file.write_text(f"{TEXT} And more.")
    with pytest.raises(RopepatchError, match="differs in texts"):
        pretrain(changed(quick, texts=[str(file)]), finished.parent)


@pytest.mark.slow
def test_a_folder_that_is_not_of_a_run_is_not_written_into(quick, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "thesis.txt").write_text("")
    with pytest.raises(RopepatchError, match="one is of another recipe"):
        pretrain(quick, tmp_path)
    assert [file.name for file in tmp_path.rglob("*")] == ["one", "thesis.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": {"two": {"mixture": {"passkey": 1.0}}}}, "a row of passkey takes 80 tokens, got 64"),
        ({"stages": {"two": {"windows": [64, 3000], "tokens_per_step": 3000}}}, "too few for a row of 3000"),
        ({"texts": ["nowhere"]}, "no such file or folder: nowhere"),
    ],
)
def test_what_a_later_stage_cannot_draw_fails_before_anything_is_trained(quick, tmp_path, changes, message):
    out = tmp_path / "run"
    with pytest.raises(RopepatchError, match=message):
        pretrain(changed(quick, **changes), out)
    assert not out.exists()


# The command


def test_the_command_says_what_is_wrong_in_two_lines_and_exits_with_2(tmp_path):
    file, app = written(tmp_path, content(sed=1)), typer.Typer()
    app.command()(program.main)
    result = CliRunner().invoke(app, [str(file), "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert result.output == f"error: {file}: unknown recipe key 'sed'\nhint: did you mean seed?\n"
    assert not (tmp_path / "run").exists()
