"""A model is trained by a recipe: what comes out, and that interruptions change nothing."""

import errno
import functools
import itertools
import json
import re
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from peft import LoraConfig, get_peft_model
from run_recipes import (
    STEPS,
    history_of,
    interrupted,
    logits,
    model_bytes,
    record_of,
    run_two_processes,
    small_recipe,
    trainers,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaModel

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.model.precision import Precision
from ropepatch.model.source import TINY, find_source
from ropepatch.training import trainer
from ropepatch.training.adaptation import adapt, merged_model
from ropepatch.training.adapter import trainable
from ropepatch.training.recipe import Lora, Watch, read_recipe

TRAINED = 256


def yarn():
    return ropepatch.plan("tiny", to=512, method="yarn")


def weights(folder):
    return load_file(folder / "model.safetensors")


def source_with(folder, **keys):
    """A copy of the bundled checkpoint with other keys in its configuration."""
    source = shutil.copytree(TINY, folder)
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | keys))
    return source


@pytest.fixture
def one_second_a_step(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def test_stock_transformers_loads_it_at_the_target(adapted):
    model = AutoModelForCausalLM.from_pretrained(adapted)
    assert model.config.max_position_embeddings == 512
    assert model.config.rope_parameters["rope_type"] == "yarn"
    verified = record_of(adapted)["verified"]
    assert verified == {"frequencies": "equal", "logits": "equal", "compared": True, "difference": 0.0}


def test_nothing_else_is_left_and_the_recipe_inside_reads_back_as_the_one_it_was_made_by(adapted):
    assert [path.name for path in adapted.parent.iterdir()] == [adapted.name]
    assert read_recipe(str(adapted / "adaptation" / "recipe.yaml")) == small_recipe()


def test_training_has_changed_the_weights_that_it_trains_and_no_others(adapted):
    before, after = load_file(TINY / "model.safetensors"), weights(adapted)
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name].float(), after[name])}
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"} | norms


def test_the_history_holds_every_step_and_what_was_measured(adapted):
    rows = history_of(adapted)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all("loss" in row and "learning_rate" in row for row in rows[1:])
    assert [row["step"] for row in rows if "short_loss" in row] == [0, 3, 6]
    assert all("target_loss" in row for row in rows if "short_loss" in row)


def test_where_the_target_is_not_watched_no_row_is_longer_than_the_old_context(tmp_path, monkeypatch):
    read, lengths = LlamaModel.forward, []

    @functools.wraps(read)
    def counted(self, input_ids=None, **arguments):
        lengths.append(input_ids.shape[1])
        return read(self, input_ids=input_ids, **arguments)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    recipe = small_recipe(trainer={"max_steps": 1}, watch=Watch(every=1, windows=2, target=False))
    source = source_with(tmp_path / "source")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    plan = ropepatch.plan(source, to=512, method="yarn")
    rows = history_of(adapt(plan, recipe, tmp_path / "out").folder)
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before  # which is not touched
    assert ["short_loss" in row for row in rows] == [True, True]
    assert not any("target_loss" in row or "target_passkey" in row for row in rows)
    assert max(lengths) == TRAINED


@pytest.mark.slow
def test_one_passkey_at_each_of_five_depths_of_the_target_is_in_the_history_where_asked_for(tmp_path):
    recipe = small_recipe(trainer={"max_steps": 1}, watch=Watch(every=1, windows=1, passkey_trials=1))
    rows = history_of(adapt(yarn(), recipe, tmp_path / "out").folder)
    assert [row["target_passkey"] in (0, 0.2, 0.4, 0.6, 0.8, 1) for row in rows] == [True, True]


def test_the_source_is_not_touched(tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    plan = ropepatch.plan(source, to=512, method="yarn")
    adapt(plan, small_recipe(trainer={"max_steps": 1}), tmp_path / "out")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


@pytest.mark.parametrize(
    ("point", "step", "last"),
    [
        pytest.param("step_begin", 0, 0, marks=pytest.mark.slow),
        ("step_end", 4, 2),
        pytest.param("save", 6, 6, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_goes_on_and_ends_like_one_that_was_not(
    one_second_a_step, tmp_path, adapted, point, step, last
):
    interrupted(yarn(), small_recipe(), tmp_path / "out", point, step)
    assert not (tmp_path / "out").exists()
    lines = []
    resumed = adapt(yarn(), small_recipe(), tmp_path / "out", say=lines.append).folder
    assert (f"resuming from checkpoint-{last}" in lines) == (last > 0)
    assert model_bytes(resumed) == model_bytes(adapted)
    assert history_of(resumed) == history_of(adapted)
    assert record_of(resumed)["adaptation"]["seconds"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("module", "function"), [(torch, "save"), (trainer, "seal")])
def test_a_full_disk_is_said_clearly_and_leaves_the_last_checkpoint_whole(
    monkeypatch, tmp_path, adapted, module, function
):
    stock = getattr(module, function)

    def full(*args, **kwargs):
        if "checkpoint-4" in str(args):
            raise OSError(errno.ENOSPC, "No space left on device")
        return stock(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(module, function, full)
        with pytest.raises(
            RopepatchError, match=r"cannot save the checkpoint of step 4: .*No space left"
        ) as error:
            adapt(yarn(), small_recipe(), tmp_path / "out")
    assert "run the same command again" in error.value.hint
    assert sorted(path.name for path in (tmp_path / "out.run").glob("checkpoint-*")) == ["checkpoint-2"]
    resumed = adapt(yarn(), small_recipe(), tmp_path / "out").folder
    assert model_bytes(resumed) == model_bytes(adapted)


def test_a_finished_checkpoint_is_no_finished_adapter(adapted):
    with pytest.raises(RopepatchError, match="already exists"):
        adapt(yarn(), small_recipe(save="adapter"), adapted)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """What a run leaves that was interrupted after three steps."""
    out = tmp_path_factory.mktemp("begun") / "out"
    interrupted(yarn(), small_recipe(), out, "step_end", 3)
    return out


@pytest.mark.parametrize(
    ("differs", "recipe", "target", "config"),
    [("recipe", {"seed": 1}, 512, {}), ("method", {}, 1024, {}), ("config", {}, 512, {"rms_norm_eps": 1e-3})],
)
def test_another_run_neither_goes_on_nor_counts_as_finished(
    tmp_path, adapted, begun, differs, recipe, target, config
):
    plan = ropepatch.plan(source_with(tmp_path / "source", **config), to=target, method="yarn")
    with pytest.raises(RopepatchError, match="already exists"):
        adapt(plan, small_recipe(**recipe), adapted)
    with pytest.raises(RopepatchError, match=rf"out\.run is of another run: it differs in {differs}"):
        adapt(plan, small_recipe(**recipe), begun)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [
        Lora(r=4, use_rslora=True),
        Lora(r=4, use_dora=True),
        Lora(r=4, loraplus_lr_ratio=16.0, train_norms=False),
        Lora(r=4, target_modules="all-linear"),
        Lora(r=4, train_embeddings=True),
    ],
    ids=["rslora", "dora", "lora+", "all-linear", "embeddings"],
)
def test_merged_equals_adapter(tmp_path, lora):
    recipe = small_recipe(lora=lora, trainer={"max_steps": 3})
    merged = adapt(yarn(), recipe, tmp_path / "merged").folder
    adapter = adapt(yarn(), recipe.model_copy(update={"save": "adapter"}), tmp_path / "adapter").folder
    model, _ = ropepatch.load_adapter(adapter)
    stock = AutoModelForCausalLM.from_pretrained(merged)
    base, _ = ropepatch.load("tiny", device="cpu")
    assert torch.allclose(logits(model), logits(stock), atol=1e-4)
    assert not torch.allclose(logits(stock), logits(base), atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, Lora(r=4, train_embeddings=True)], ids=["all weights", "embeddings"])
def test_what_is_trained_whole_is_in_the_checkpoint_and_embeddings_stay_tied(tmp_path, lora):
    folder = adapt(yarn(), small_recipe(lora=lora, trainer={"max_steps": 3}), tmp_path / "out").folder
    before, after = load_file(TINY / "model.safetensors"), weights(folder)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name])}
    assert "model.embed_tokens.weight" in changed
    assert lora or changed == before.keys()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert record_of(folder)["verified"]["logits"] == "equal"


@pytest.mark.slow
def test_recomputed_activations_change_nothing(tmp_path, adapted):
    folder = adapt(yarn(), small_recipe(gradient_checkpointing=True), tmp_path / "out").folder
    assert model_bytes(folder) == model_bytes(adapted)


@pytest.mark.slow
def test_a_bfloat16_checkpoint_is_trained_in_mixed_precision_and_saved_as_it_was(tmp_path):
    source = source_with(tmp_path / "source", dtype="bfloat16")
    plan = ropepatch.plan(source, to=512, method="yarn")
    folder = adapt(plan, small_recipe(trainer={"max_steps": 3, "bf16": True}), tmp_path / "out").folder
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.bfloat16}
    losses = [row["loss"] for row in history_of(folder) if "loss" in row]
    full = adapt(plan, small_recipe(trainer={"max_steps": 3}), tmp_path / "full").folder
    assert losses == pytest.approx([row["loss"] for row in history_of(full) if "loss" in row], rel=0.05)


@pytest.mark.slow
def test_an_adapter_holds_what_it_needs_and_no_base_weights(adapter):
    names = {path.name for path in adapter.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "ropepatch.json", "adaptation"}
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"


def test_an_adapter_goes_on_a_model_with_its_patch(adapter):
    model, _ = ropepatch.load("tiny", device="cpu")
    ropepatch.patch(model, yarn())
    patched, _ = ropepatch.load_adapter(adapter, model)
    loaded, _ = ropepatch.load_adapter(adapter)
    assert torch.equal(logits(patched), logits(loaded))


def test_an_adapter_goes_on_the_extended_checkpoint_which_has_the_same_rope(adapter, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(ropepatch.extend(yarn(), tmp_path / "out").folder)
    stock, _ = ropepatch.load_adapter(adapter, model)
    loaded, _ = ropepatch.load_adapter(adapter)
    assert torch.equal(logits(stock), logits(loaded))


def patched(target):
    model, _ = ropepatch.load("tiny", device="cpu")
    if target:
        ropepatch.patch(model, ropepatch.plan("tiny", to=target, method="yarn"))
    return model


def with_other_weights(folder):
    source = shutil.copytree(TINY, folder)
    negated = {name: -tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(negated, source / "model.safetensors", {"format": "pt"})
    return source


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda given: (patched(None), given["adapter"]), "takes the adapter's folder first, got Llama"),
        (lambda given: (given["adapted"],), "holds no adapter of ropepatch"),
        (lambda given: (given["adapter"], patched(None)), "this model has its own rope"),
        (lambda given: (given["adapter"], patched(1024)), "yarn to 512 tokens; this model has yarn to 1024"),
        (
            lambda given: (given["adapter"], None, with_other_weights(given["place"] / "base")),
            "has other weights than the adapter was trained on",
        ),
    ],
)
def test_an_adapter_is_refused_where_it_does_not_belong(adapter, adapted, tmp_path, load, said):
    given = {"adapter": adapter, "adapted": adapted, "place": tmp_path}
    folder, model, base = (*load(given), None, None)[:3]
    with pytest.raises(RopepatchError, match=said):
        ropepatch.load_adapter(folder, model, base=base)


def test_an_adapter_is_refused_by_a_model_of_its_frequencies_with_other_factors_of_queries(tmp_path):
    model, _ = ropepatch.load("tiny", device="cpu")
    given = {"factor": 2.0, "divisors": (2.0,) * 16}
    scaling = ropepatch.make_scaling("custom", queries=[[[(1.0, 0.5)] * 16] * 6] * 4, **given)
    handle = ropepatch.patch(model, scaling)
    adapted = trainable(model, Lora(r=4))
    adapted.save_pretrained(tmp_path)
    handle.record(tmp_path)
    other, _ = ropepatch.load("tiny", device="cpu")
    with (
        ropepatch.patch(other, ropepatch.make_scaling("custom", **given)),
        pytest.raises(RopepatchError, match="custom with other queries than this model"),
    ):
        ropepatch.load_adapter(tmp_path, other)
    ropepatch.patch(other, scaling)
    assert torch.equal(logits(ropepatch.load_adapter(tmp_path, other)[0]), logits(adapted))


def test_an_adapter_of_another_trainer_keeps_the_rope_that_the_patch_writes_beside_it(tmp_path):
    model, _ = ropepatch.load("tiny", device="cpu")
    handle = ropepatch.patch(model, "yarn", to=512)
    adapted = trainable(model, Lora(r=4))
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    rows = [{"input_ids": torch.arange(3, 403), "labels": torch.arange(3, 403)}]
    other = Trainer(adapted, arguments, train_dataset=rows)
    other.train()
    with pytest.raises(RopepatchError, match=r"no adapter_config\.json"):
        handle.record(tmp_path)
    other.save_model()
    handle.record(tmp_path / "out")
    loaded, _ = ropepatch.load_adapter(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(adapted))
    handle.remove()
    assert not torch.equal(logits(loaded), logits(adapted))


def test_the_gate_compares_with_the_base_model_within_its_context(adapted):
    gate = adapt(yarn(), small_recipe(), adapted).gate
    (before, tokenizer), (after, _) = (
        ropepatch.load("tiny", device="cpu"),
        ropepatch.load(adapted, device="cpu"),
    )
    (tale,) = held_out_tales(tokenizer, length=512, count=1)
    losses = [ropepatch.perplexity(model, None, [tale.ids[:256]]).at(256).mean for model in (before, after)]
    assert [gate.base, gate.now] == pytest.approx(losses, abs=1e-6)
    assert history_of(adapted)[-1]["short_loss"] == pytest.approx(gate.now, abs=1e-4)
    assert gate.passed
    assert not adapt(yarn(), small_recipe(), adapted, max_short_loss_increase=0.0).gate.passed


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(RopepatchError, match=r"the loss is (nan|inf) at step \d"):
        adapt(yarn(), small_recipe(lora=None, trainer={"learning_rate": 1e30}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_is_trained_on_and_its_beginning_is_held_out(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "stories.txt"
    file.write_text(
        "<|endoftext|>".join(f"Once there were {n} mice. They ate cheese. " * 30 for n in range(40))
    )
    data = small_recipe().data.model_copy(update={"sources": (Texts(text=str(file)),)})
    lines = []
    recipe = small_recipe(data=data, trainer={"max_steps": 2})
    folder = adapt(yarn(), recipe, tmp_path / "out", say=lines.append).folder
    assert re.match(rf"{file}: .*documents.*tokens", lines[0])
    assert "short_loss" in history_of(folder)[0]


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "mine.txt").write_text("mine")
    with pytest.raises(RopepatchError, match=r"out\.run exists and is no run"):
        adapt(yarn(), small_recipe(), tmp_path / "out")
    assert (tmp_path / "out.run" / "mine.txt").read_text() == "mine"


TWO = """
import sys
from run_recipes import small_recipe
from ropepatch.training.recipe import Lora
import ropepatch
from ropepatch.training.adaptation import adapt, merged_model
adapt(ropepatch.plan("tiny", to=512, method="yarn"), small_recipe(lora=Lora(r=4)), sys.argv[1])
"""


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_the_precision_that_it_began_with(tmp_path, monkeypatch):
    recipe = small_recipe(trainer={"max_steps": 2}, watch=Watch(every=2, windows=1, passkey_trials=0))
    open_ = recipe.model_copy(update={"trainer": {k: v for k, v in recipe.trainer.items() if k != "bf16"}})
    lines, steps = [], []

    @contextmanager
    def bar(name):
        yield lambda done, total: steps.append((name, done, total))

    for dtype in ("bfloat16", "float32"):  # as on a machine with AMX, and on one without
        monkeypatch.setattr("ropepatch.training.preparation.fastest", lambda dtype=dtype: Precision(dtype))
        if dtype == "bfloat16":
            interrupted(yarn(), open_, tmp_path / "out", "step_end", 1)
        else:
            adapt(yarn(), open_, tmp_path / "out", say=lines.append, progress=bar)
    made = record_of(tmp_path / "out")["adaptation"]
    assert made["precision"] == {"dtype": "bfloat16"}
    assert steps == [("training", 1, 2), ("training", 2, 2)]
    base = f"from the base model's {made['gate']['base']:.4f}"
    measured = [line for line in lines if "measured" in line and "step" in line]
    assert measured
    assert all("short-context loss" in line and base in line for line in measured)


@pytest.mark.slow
def test_two_processes_make_what_one_makes(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(TWO)
    run_two_processes(str(file), str(tmp_path / "two"))
    alone = small_recipe(lora=Lora(r=4), trainer={"gradient_accumulation_steps": 2})
    adapt(yarn(), alone, tmp_path / "one")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    base = load_file(TINY / "model.safetensors")
    for name in one:
        moved = (one[name] - base[name].float()).abs().max()
        assert (one[name] - two[name]).abs().max() <= 1e-3 * moved + 1e-6, name
    ours, theirs = history_of(tmp_path / "one"), history_of(tmp_path / "two")
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=1e-3)


def llama(**changes):
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, **changes))


@pytest.mark.parametrize("tied", [True, False])
def test_trained_embeddings_take_a_tied_head_with_them_and_no_other(tied):
    model = trainable(llama(tie_word_embeddings=tied), Lora(train_embeddings=True))
    head = model.get_output_embeddings().weight
    assert head.requires_grad == tied
    assert model.get_input_embeddings().weight.requires_grad


def test_what_is_trained_is_in_float32_and_what_is_frozen_stays_as_it_was():
    model = trainable(llama().bfloat16(), Lora(train_embeddings=True))
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    trained = {parameter.dtype for parameter in trainable(llama().bfloat16(), None).parameters()}
    assert trained == {torch.float32}


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_on_one_end_of_tied_embeddings_is_refused(end):
    with pytest.raises(RopepatchError, match="embeddings and head share their weights"):
        trainable(llama(tie_word_embeddings=True), Lora(target_modules=(end, "q_proj")))
    trainable(llama(tie_word_embeddings=False), Lora(target_modules=(end, "q_proj")))


@pytest.mark.slow
def test_with_weights_in_4_bits_an_adapter_is_trained_and_merged_into_the_unquantised_ones(
    tmp_path, monkeypatch
):
    """bitsandbytes also runs on a CPU, where no recipe is let: the same path, without a GPU's kernels."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("ropepatch.training.preparation._missing_packages", lambda recipe: ())
    # Or it repacks the weights in the first evaluation, and has no gradient of that.
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    source = source_with(tmp_path / "source", dtype="bfloat16")
    plan = ropepatch.plan(source, to=512, method="yarn")
    recipe = small_recipe(
        quantization="4bit", gradient_checkpointing=True, trainer={"max_steps": 4, "bf16": True}
    )
    with trainers() as made:
        folder = adapt(plan, recipe, tmp_path / "four").folder
    layers = [part for part in made[0].model.modules() if isinstance(part, bitsandbytes.nn.Linear4bit)]
    assert {layer.weight.quant_type for layer in layers} == {"nf4"}
    assert len(layers) == 4 * 7
    whole = adapt(plan, recipe.model_copy(update={"quantization": None}), tmp_path / "whole").folder
    losses = [[row["loss"] for row in history_of(at) if "loss" in row] for at in (folder, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert losses[0] != losses[1]
    before, after = load_file(source / "model.safetensors"), weights(folder)
    assert {name for name in before if not torch.equal(before[name].bfloat16(), after[name])} == {
        name for name in before if "norm" in name or "self_attn" in name
    }
    assert record_of(folder)["verified"]["logits"] == "equal"


@pytest.mark.slow
def test_a_merge_that_changes_what_the_model_computes_is_refused(monkeypatch, tmp_path):
    from peft.tuners.lora import Linear

    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: torch.ones_like(self.weight))
    with pytest.raises(RopepatchError, match=r"merging the adapter changes the logits by"):
        adapt(yarn(), small_recipe(trainer={"max_steps": 1}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_a_bfloat16_checkpoint_is_merged_in_float32_and_rounded_once(tmp_path):
    source = source_with(tmp_path / "source", dtype="bfloat16")
    plan = ropepatch.plan(source, to=512, method="yarn")
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(source, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "trained")
    merged = merged_model(
        plan, small_recipe(), find_source(source, weights=True), tmp_path / "trained"
    ).state_dict()
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight + layer.get_delta_weight("default")
    found = merged["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, exact.bfloat16())
    assert not torch.equal(
        found, layer.base_layer.weight.bfloat16() + layer.get_delta_weight("default").bfloat16()
    )


def test_two_runs_do_not_train_in_one_folder(tmp_path):
    (tmp_path / "out.run").mkdir()
    with (
        FileLock(tmp_path / "out.run" / ".lock"),
        pytest.raises(RopepatchError, match="another process trains"),
    ):
        adapt(yarn(), small_recipe(), tmp_path / "out")
