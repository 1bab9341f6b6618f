"""Frequencies that are trained with the weights, and adaptation that starts from fitted ones."""

import json
import math
import shutil
from functools import partial
from types import SimpleNamespace

import made_results
import numpy as np
import pytest
import torch
import yaml
from fake_fits import DIVISORS, fake_fits
from run_recipes import STEPS, history_of, interrupted, logits, model_bytes, record_of, small_recipe, trainers
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import RULE, Ranked, Ranking
from ropepatch.evaluation.results import as_read
from ropepatch.fitting.examples import read_splits
from ropepatch.fitting.fitting import Fitted
from ropepatch.model.source import TINY
from ropepatch.pipeline.choice import Choice
from ropepatch.pipeline.results import Results
from ropepatch.scaling.file import write_scaling
from ropepatch.training import adaptation
from ropepatch.training.adaptation import adapt
from ropepatch.training.recipe import Data, FrequencyTraining, Lora, read_recipe
from ropepatch.training.supply import RecipeReader
from ropepatch.training.trained_frequencies import FILE, TrainedRope, frozen, train_frequencies

RATE = 0.02
YARN = ropepatch.plan("tiny", to=512, method="yarn")


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer(tiny):
    """Every run makes its rows with the same tokenizer, and what they are made from but once."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("ropepatch.training.run.load_tokenizer", lambda folder: tiny[1])
        yield


def learning(**changes):
    """The small recipe with trained frequencies, whose rate is far from that of the weights."""
    return small_recipe(frequencies=FrequencyTraining(learning_rate=RATE), **changes)


def moved(folder):
    """ln of the divisors and of the attention factor, after the training over before."""
    ends = record_of(folder)["adaptation"]["frequencies"]
    flat = {when: np.array([*end["divisors"], end["attention_factor"]]) for when, end in ends.items()}
    return np.log(flat["end"] / flat["start"])


def patched(method="yarn"):
    """A tiny model with eight rotary pairs, and the plan to 256 tokens that it is patched with."""
    model = tiny_model("llama")
    ropepatch.patch(model, plan := ropepatch.plan(model, to=256, method=method))
    return model, plan


# The module


@pytest.mark.parametrize("method", ["yarn", "linear", "p-rope", "cope"])
def test_untrained_it_computes_what_the_plan_does_to_the_bit(method):
    model, plan = patched(method)
    x, positions = torch.zeros(1, 256, 8), torch.arange(256)[None]
    before = model.model.rotary_emb(x, positions)
    rope = train_frequencies(model, plan, 1e-3)
    assert model.model.rotary_emb is rope
    assert all(torch.equal(*pair) for pair in zip(before, rope(x, positions), strict=True))


def test_the_gradient_is_that_of_the_formula():
    """Of sum(w cos(p f e^-u) a e^v) in NumPy, at a point away from the start."""
    model, plan = patched()
    rope = train_frequencies(model, plan, 1e-3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        rope.log_divisors.copy_(0.3 * torch.randn(8, generator=generator))
        rope.log_attention.fill_(0.2)
    weights = torch.randn(1, 50, 16, generator=generator)
    cos, _ = rope(torch.zeros(1, 50, 16), torch.arange(50)[None])
    (cos * weights).sum().backward()
    start, u = plan.frequencies(), rope.log_divisors.detach().double().numpy()
    angles = np.arange(50)[:, None] * (start.inv_freq.double().numpy() * np.exp(-u))
    a, w = start.attention_factor * math.exp(0.2), weights[0].double().numpy()
    both = w[:, :8] + w[:, 8:]  # each pair stands twice
    assert rope.log_divisors.grad.numpy() == pytest.approx(
        (both * a * np.sin(angles) * angles).sum(0), rel=1e-4
    )
    assert rope.log_attention.grad.item() == pytest.approx((both * a * np.cos(angles)).sum(), rel=1e-4)


def test_a_cast_of_the_model_leaves_the_frequencies_in_float32_and_no_state_dict_holds_them():
    model, plan = patched()
    before = set(model.state_dict())
    rope = train_frequencies(model, plan, 1e-3)
    with torch.no_grad():
        rope.log_divisors.fill_(0.1)
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in rope.parameters()} == {torch.float32}
    assert rope.log_divisors.tolist() == pytest.approx([0.1] * 8, rel=1e-7)
    assert set(model.state_dict()) == before
    assert {"model.rotary_emb.log_divisors", "model.rotary_emb.log_attention"} <= dict(
        model.named_parameters()
    ).keys()


@pytest.mark.parametrize("method", ["yarn", "p-rope"])
def test_a_frozen_plan_has_the_trained_frequencies_and_reads_back_to_the_bit(tmp_path, method):
    model, plan = patched(method)
    rope = train_frequencies(model, plan, 1e-3)
    with torch.no_grad():
        rope.log_divisors.copy_(torch.linspace(-1, 1, 8))
        rope.log_attention.fill_(-0.1)
    rope.save(tmp_path)
    other = train_frequencies(patched(method)[0], plan, 1e-3)
    other.restore(tmp_path)
    assert torch.equal(other.log_divisors, rope.log_divisors)
    assert torch.equal(other.log_attention, rope.log_attention)
    start, end = plan.frequencies(), frozen(plan, tmp_path).frequencies()
    expected = start.inv_freq.double() * torch.exp(-torch.linspace(-1, 1, 8).double())
    assert end.inv_freq.tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-29)
    assert end.attention_factor == pytest.approx(start.attention_factor * math.exp(-0.1), rel=1e-6)


def test_frequencies_of_a_model_that_is_scaled_already_are_frozen_relative_to_those_it_has(tmp_path):
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    plan = ropepatch.plan(config, to=256, method="linear")
    (tmp_path / FILE).write_text(json.dumps({"log_divisors": [0.5] * 8, "log_attention": 0.0}))
    end = frozen(plan, tmp_path)
    assert end.scaling.divisors == pytest.approx([4 * math.exp(0.5)] * 8, rel=1e-6)
    assert end.rope.is_scaled


def test_a_model_whose_rope_lets_no_gradient_through_is_refused():
    model, plan = patched()
    with torch.no_grad(), pytest.raises(RopepatchError, match="no gradient reaches the frequencies of llama"):
        train_frequencies(model, plan, 1e-3)


# Training


def kept_run(recipe, out):
    """The folder that a recipe makes, and its trainer."""
    with trainers() as made:
        return SimpleNamespace(folder=adapt(YARN, recipe, out).folder, trainer=made[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An uninterrupted run, and the model as its last step left it, in memory."""
    return kept_run(learning(), tmp_path_factory.mktemp("trained") / "out")


def test_training_moves_every_divisor_and_the_attention_factor(run):
    assert (np.abs(moved(run.folder)) > 1e-3).all()
    assert (np.abs(moved(run.folder)) < RATE * STEPS).all()
    record = record_of(run.folder)
    ends = record["adaptation"]["frequencies"]
    assert (record["method"], record["parameters"]) == ("custom", ends["end"])
    start = ends["start"]
    frequencies = YARN.frequencies()
    divided = YARN.rope.inv_freq() / torch.tensor(start["divisors"])
    assert divided.tolist() == pytest.approx(frequencies.inv_freq.tolist(), rel=1e-6)
    assert start["attention_factor"] == pytest.approx(frequencies.attention_factor)


def test_stock_transformers_computes_what_the_trained_model_does(run):
    stock = AutoModelForCausalLM.from_pretrained(run.folder)
    assert stock.config.rope_parameters["rope_type"] == "longrope"
    assert record_of(run.folder)["verified"]["frequencies"] == "equal"
    trained = logits(run.trainer.model)
    assert torch.allclose(logits(stock), trained, atol=1e-3 * trained.abs().max())
    start = AutoModelForCausalLM.from_pretrained(run.folder, rope_parameters=YARN.rope_parameters)
    assert (logits(start) - trained).abs().max() > 0.01 * trained.abs().max()


def test_what_is_watched_is_the_model_with_its_frequencies_of_the_moment(run):
    (piece,) = run.trainer.watcher.pieces
    stock = AutoModelForCausalLM.from_pretrained(run.folder).eval()
    assert history_of(run.folder)[-1]["target_loss"] == pytest.approx(
        ropepatch.perplexity(stock, None, [piece]).between(256, 512).mean, abs=1e-4
    )


def test_the_frequencies_are_in_a_group_of_their_own_without_decay(run):
    model, optimizer = run.trainer.model, run.trainer.optimizer
    rope = next(module for module in model.modules() if isinstance(module, TrainedRope))
    ours = {id(parameter) for parameter in rope.parameters()}
    groups = [({id(p) for p in group["params"]}, group) for group in optimizer.param_groups]
    (group,) = (group for members, group in groups if members & ours)
    assert {id(parameter) for parameter in group["params"]} == ours
    assert (group["initial_lr"], group["weight_decay"]) == (RATE, 0.0)
    others = set().union(*(members for members, _ in groups)) - ours
    assert others == {id(p) for p in model.parameters() if p.requires_grad} - ours


@pytest.mark.slow
def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path, run):
    interrupted(YARN, learning(), tmp_path / "out", "step_end", 3)
    assert (tmp_path / "out.run" / "checkpoint-2" / FILE).is_file()
    resumed = adapt(YARN, learning(), tmp_path / "out").folder
    assert model_bytes(resumed) == model_bytes(run.folder)
    for key in ("parameters", "inv_freq", "attention_factor"):
        assert record_of(resumed)[key] == record_of(run.folder)[key]


def test_the_matrices_b_alone_have_the_other_rate_of_lora_plus(tmp_path):
    recipe = learning(lora=Lora(r=4, loraplus_lr_ratio=16.0), trainer={"max_steps": 1, "weight_decay": 0.1})
    trainer = kept_run(recipe, tmp_path / "out").trainer
    names = {id(weights): name for name, weights in trainer.model.named_parameters()}
    rates = {
        names[id(weights)]: (group["initial_lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for weights in group["params"]
    }
    assert rates.keys() == {
        name for name, weights in trainer.model.named_parameters() if weights.requires_grad
    }
    expected = {"lora_A": (1e-3, 0.1), "lora_B": (16e-3, 0.1), "norm": (1e-3, 0.0), "log_": (RATE, 0.0)}
    for part, rate in expected.items():
        assert {found for name, found in rates.items() if part in name} == {rate}, part


FIRST = {"max_steps": 1, "learning_rate": 1e-5}


@pytest.mark.slow
def test_the_first_step_of_all_weights_is_of_the_learning_rate_of_the_frequencies(tmp_path):
    """In mixed precision, with activations that are computed again."""
    recipe = learning(lora=None, gradient_checkpointing=True, trainer=FIRST | {"bf16": True})
    folder = adapt(YARN, recipe, tmp_path / "out").folder
    assert np.abs(moved(folder)) == pytest.approx(np.full(17, RATE), rel=1e-3)
    assert load_file(folder / "model.safetensors").keys() == load_file(TINY / "model.safetensors").keys()


@pytest.mark.slow
def test_an_adapter_of_two_rates_goes_on_its_base_with_the_trained_frequencies(tmp_path):
    lora = Lora(r=4, loraplus_lr_ratio=16.0)
    made = kept_run(learning(lora=lora, save="adapter", trainer=FIRST), tmp_path / "out")
    assert np.abs(moved(made.folder)) == pytest.approx(np.full(17, RATE), rel=1e-3)
    model, _ = ropepatch.load_adapter(made.folder)
    trained = logits(made.trainer.model)
    assert torch.allclose(logits(model), trained, atol=1e-3 * trained.abs().max())


def test_they_are_not_trained_where_the_model_is_split(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RopepatchError, match="frequencies cannot be trained where FSDP or DeepSpeed split"):
        adapt(YARN, learning(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# The keys of a recipe


def test_the_keys_are_read_as_they_are_written(tmp_path):
    keys = {"frequencies": {"learning_rate": 0.01}, "method": {"name": "fit", "steps": 20, "init": "yarn"}}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(as_read(small_recipe().to_dict()) | keys))
    recipe = read_recipe(str(file))
    assert recipe.frequencies == FrequencyTraining(learning_rate=0.01)
    assert (recipe.method.name, recipe.method.parameters) == ("fit", {"steps": 20, "init": "yarn"})
    file.write_text(yaml.safe_dump(as_read(recipe.to_dict())))
    assert read_recipe(str(file)) == recipe


# A fit first


def texts(folder, **settings):
    """A recipe that reads two texts, and holds pieces of the first out."""
    sources = []
    for name in ("mice", "cats"):
        file = folder / f"{name}.txt"
        file.write_text(
            "<|endoftext|>".join(f"Once there were {n} {name}. They ate. " * 5 for n in range(400))
        )
        sources.append(Texts(text=str(file), weight=1.0 if name == "mice" else 2.0))
    return small_recipe(data=Data(sources=tuple(sources), windows=(64,), tokens_per_batch=128), **settings)


def test_a_fit_learns_from_what_is_trained_on_and_never_from_what_is_held_out(tmp_path, tiny):
    shape = {"trained": 256, "target": 512, "vocabulary": 1024, "cache": tmp_path / "cache", "folder": TINY}
    reader = RecipeReader(recipe=texts(tmp_path), tokenizer=tiny[1], **shape)
    reader.write_windows(tmp_path / "windows.jsonl")
    rows = [tuple(ids) for ids in stream_documents(tmp_path / "windows.jsonl", field="input_ids")]
    assert {len(row) for row in rows} == {512}
    assert len(set(rows)) == len(rows) > 80
    first = [int(ids) for piece in reader.supply(per_step=1).pieces for ids in piece]
    assert tuple(first) not in rows
    decoded = [tiny[1].decode(row) for row in rows]
    assert [sum(name in text for text in decoded[:30]) for name in ("mice", "cats")] == [10, 20]
    joined = " ".join(decoded)
    assert "Once there were 39 mice" in joined
    assert "Once there were 39 cats" in joined
    assert "Once there were 0 mice" not in joined  # in the piece that is held out
    assert "Once there were 0 cats" in joined


def test_a_fit_knows_of_what_document_each_window_of_a_recipe_is(tmp_path, tiny):
    """Its interval is over documents; three novels are three, however many windows they make."""
    novels = ("mouse", "cat", "dog")
    (tmp_path / "novels.txt").write_text(
        "<|endoftext|>".join(f"Once there was a {name}. " * 900 for name in novels)
    )
    data = Data(sources=(Texts(text=str(tmp_path / "novels.txt")),), windows=(64,), tokens_per_batch=128)
    shape = {"trained": 256, "target": 512, "vocabulary": 1024, "cache": tmp_path / "cache", "folder": TINY}
    reader = RecipeReader(recipe=small_recipe(data=data), tokenizer=tiny[1], **shape)
    reader.write_windows(tmp_path / "windows.jsonl")
    splits = read_splits(
        tiny[1], tmp_path / "windows.jsonl", field="input_ids", split="train", length=512, spare=0
    )
    first = [tiny[1].decode(window[:40]) for window in splits.test]
    told = [{name for name in novels if name in text} for text in first]
    assert len(splits.test) > len(set(splits.sources)) > 1
    assert all(
        told[i] & told[j]
        for i, a in enumerate(splits.sources)
        for j, b in enumerate(splits.sources)
        if a == b
    )


def test_too_little_text_for_a_fit_is_said(tmp_path, tiny):
    shape = {"trained": 256, "target": 8192, "vocabulary": 1024, "cache": tmp_path / "cache", "folder": TINY}
    with pytest.raises(RopepatchError, match=r"make \d windows of 8192 tokens, and a fit needs"):
        RecipeReader(recipe=texts(tmp_path), tokenizer=tiny[1], **shape).write_windows(
            tmp_path / "windows.jsonl"
        )
    assert not (tmp_path / "windows.jsonl").exists()


@pytest.fixture
def fits(monkeypatch):
    """The arguments of every fit, which takes no time."""
    monkeypatch.setattr(Fitted, "__str__", lambda self: "fitted")
    return fake_fits(monkeypatch)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_fitted_checkpoint_holds_what_was_found_and_how(place, fits):
    ropepatch.extend("tiny", "out", to=512, method="fit", steps=7, init="ntk")
    record = record_of(place / "out")
    assert (record["method"], record["parameters"]["attention_factor"]) == ("custom", 1.1)
    assert record["fit"] == {"start": "yarn", "text": "None"}
    assert (record["start"]["asked"]["steps"], record["start"]["asked"]["init"]) == (7, "ntk")
    (call,) = fits
    assert (call["steps"], call["init"], call["text"], call["split"]) == (7, "ntk", None, "train")
    assert [path.name for path in place.iterdir()] == ["out"]


def test_the_text_of_the_command_line_is_what_is_learned_from(place, fits, run_here):
    (place / "a.txt").write_text("text")
    words = ("--text", "a.txt", "--field", "body", "--split", "validation")
    run_here("extend", "tiny", "--to", "512", "--method", "fit", *words, "--dry-run")
    (call,) = fits
    assert (call["text"], call["field"], call["split"]) == ("a.txt", "body", "validation")
    assert [path.name for path in place.iterdir()] == ["a.txt"]


@pytest.mark.slow
def test_a_recipe_starts_from_a_fit_that_neither_an_interruption_nor_a_second_call_repeats(
    place, fits, monkeypatch
):
    recipe = texts(place, trainer={"max_steps": 4}, frequencies=FrequencyTraining())
    content = as_read(recipe.to_dict()) | {"method": {"name": "fit", "steps": 3}, "seed": 5}
    (place / "mine.yaml").write_text(yaml.safe_dump(content))
    extend = partial(ropepatch.extend, "tiny", "out", recipe="mine.yaml")

    def gone(*arguments, **options):
        raise RopepatchError("gone")

    with monkeypatch.context() as patching:
        patching.setattr(adaptation, "_train", gone)
        with pytest.raises(RopepatchError, match="gone"):
            extend()
    assert (place / "out.fit" / "start.json").is_file()
    (call,) = fits
    assert (call["steps"], call["seed"], call["field"]) == (3, 5, "input_ids")
    assert "input_ids" in call["text"].read_text()
    with pytest.raises(RopepatchError, match=r"out\.fit holds .*: it differs in steps"):
        extend(steps=4)
    for _ in range(2):  # goes on, and then finds it finished
        extend()
        record = record_of(place / "out")
        assert record["fit"]["text"] == ", ".join(source.text for source in recipe.data.sources)
        assert record["start"]["parameters"]["divisors"] == [*DIVISORS]
        assert record["parameters"]["divisors"] != [*DIVISORS]  # but those that were trained from them
        trained = record["adaptation"]["frequencies"]
        assert trained["start"]["divisors"] == pytest.approx(DIVISORS, rel=1e-6)
        assert not list(place.glob("out.*"))
    with pytest.raises(RopepatchError, match="already exists"):
        extend(steps=4)
    assert len(fits) == 1


def test_a_folder_of_that_name_that_is_not_ours_is_left_alone(place, fits):
    (place / "out.fit").mkdir()
    (place / "out.fit" / "mine.txt").write_text("mine")
    with pytest.raises(RopepatchError, match="holds other files"):
        ropepatch.extend("tiny", "out", to=512, method="fit")
    assert not fits
    assert (place / "out.fit" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stesp": 3}, "unknown parameter of fit 'stesp'"),
        ({"steps": "many"}, "steps must be a whole number above 0, got 'many'"),
        ({"evaluate": "demo", "text": "a.txt"}, "--text is what --eval measures"),
        ({"to": 256}, "already covers 256 tokens"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_fitted_or_written(place, fits, options, message):
    (place / "a.txt").write_text("Once there were mice. " * 1000)
    with pytest.raises(RopepatchError, match=message):
        ropepatch.extend("tiny", "out", **{"to": 512, "method": "fit"} | options)
    assert not fits
    assert [path.name for path in place.iterdir()] == ["a.txt"]


RECOMMENDED = "ntk-by-parts"
LOSS, GAIN = Mean(((15.0, 10.0),) * 3), Mean(((2.5, 10.0),) * 2)  # the gain of too few texts
RANKED = Ranked(
    label="ntk-by-parts",
    loss=LOSS,
    loss_gain=GAIN,
    short_context_loss=LOSS,
    short_context_cost=GAIN,
    log_prob=None,
    log_prob_gain=None,
    found=None,
    helps=True,
)


@pytest.fixture
def chosen(monkeypatch):
    """How the choice was asked for, each time; what it gives."""
    calls = []

    def choose(model, *, to, out, **options):
        out.mkdir(parents=True)
        calls.append((model, to, out, options))
        return Choice(
            ranking=Ranking((RANKED,), RECOMMENDED, ("Take it.",)),
            method="ntk-by-parts",
            parameters={"beta": 16.0},
            results=Results((made_results.reading(RECOMMENDED, (1.0, 2.0, 3.0)),)),
            fitted=SimpleNamespace(record={"text": "read", "seconds": 0.0}),
            left_out={},
        )

    monkeypatch.setattr("ropepatch.pipeline.choice.choose", choose)
    return calls


def test_a_method_that_was_chosen_by_measuring_is_kept_with_its_ranking_and_its_fit(place, chosen):
    ropepatch.extend("tiny", "out", to=512, method="auto")
    ((model, to, out, options),) = chosen
    assert (model, to, out) == ("tiny", 512, place / "out.fit" / "measured")
    texts = {key: options[key] for key in ("text", "field", "split", "revision")}
    assert texts == {"text": None, "field": "text", "split": "test", "revision": None}
    record = record_of(place / "out")
    assert (record["method"], record["parameters"]["beta"]) == ("ntk-by-parts", 16.0)
    assert record["start"]["asked"]["method"] == "auto"
    assert record["ranking"]["fit"] == {"text": "read", "seconds": 0.0}  # ranked, and not chosen
    assert "fit" not in record
    assert record["ranking"]["rule"] == RULE
    assert record["ranking"]["advice"] == ["Take it."]
    (row,) = record["ranking"]["rows"]
    assert (row["label"], row["nats_per_token"]) == ("ntk-by-parts", 1.5)
    cost = [row[f"short_context_cost{end}"] for end in ("", "_low", "_high")]
    assert cost == [0.25, None, None]  # JSON has no infinity
    assert [path.name for path in place.iterdir()] == ["out"]


def test_a_fit_that_was_chosen_is_on_record_like_one_that_was_asked_for(place, chosen, monkeypatch):
    monkeypatch.setitem(globals(), "RECOMMENDED", "fit")
    ropepatch.extend("tiny", "out", to=512, method="auto")
    record = record_of(place / "out")
    assert record["fit"] == {"text": "read", "seconds": 0.0}
    assert "fit" not in record["ranking"]


@pytest.mark.slow
def test_what_was_measured_for_a_choice_outlives_an_interruption(place, chosen, monkeypatch):
    extend = partial(ropepatch.extend, "tiny", "out", to=512, method="auto")

    def cut_off(model, *, to, out, **options):
        out.mkdir(parents=True)
        (out / "a result").touch()
        raise RopepatchError("cut off")

    with monkeypatch.context() as patching:
        patching.setattr("ropepatch.pipeline.choice.choose", cut_off)
        with pytest.raises(RopepatchError, match="cut off"):
            extend()
    assert (place / "out.fit" / "measured" / "a result").exists()
    (place / "a.txt").write_text("text")
    with pytest.raises(RopepatchError, match=r"out\.fit holds .*: it differs in text"):
        extend(text="a.txt")
    shutil.rmtree(place / "out.fit" / "measured")  # which `chosen` makes
    extend()
    assert not (place / "out.fit").exists()


def test_a_scaling_file_names_the_target_and_the_folder(place):
    plan = ropepatch.plan("tiny", to=512, method="custom", divisors=[2.0] * 16)
    write_scaling(place / "learned.json", plan.scaling, plan.rope, plan.target)
    ropepatch.extend("tiny", method="learned.json")
    assert record_of(place / "tiny-learned-512")["target"] == 512
