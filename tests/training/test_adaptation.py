"""A model is trained by a recipe: what comes out, and that interruptions change nothing."""

import errno
import itertools
import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from run_recipes import STEPS, run_python, small_recipe
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.model.source import TINY
from ropepatch.training import adaptation, progress, trainer
from ropepatch.training.adaptation import adapt
from ropepatch.training.adapter import trainable
from ropepatch.training.recipe import read_recipe
from ropepatch.training.sections import Lora, Watch
from ropepatch.training.trainer import LongContextTrainer

IDS = torch.arange(3, 403)[None]


def yarn():
    return ropepatch.plan("tiny", to=512, method="yarn")


@torch.inference_mode()
def logits(model):
    return model.eval()(IDS, use_cache=False).logits


def weights(folder):
    return load_file(folder / "model.safetensors")


def history(folder):
    return json.loads((folder / "adaptation" / "history.json").read_text())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """What an uninterrupted run of the small recipe makes."""
    return adapt(yarn(), small_recipe(), tmp_path_factory.mktemp("adapted") / "out").folder


def test_stock_transformers_loads_it_at_the_target(adapted):
    model = AutoModelForCausalLM.from_pretrained(adapted)
    assert model.config.max_position_embeddings == 512
    assert model.config.rope_parameters["rope_type"] == "yarn"
    record = json.loads((adapted / "ropepatch.json").read_text())
    assert record["verified"] == {
        "frequencies": "equal",
        "logits": "equal",
        "compared": True,
        "difference": 0.0,
    }


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
    rows = history(adapted)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all("loss" in row and "learning_rate" in row for row in rows[1:])
    assert [row["step"] for row in rows if "short_loss" in row] == [0, 3, 6]
    assert all("target_loss" in row for row in rows if "short_loss" in row)


@pytest.mark.slow
def test_pass_keys_at_the_target_are_in_the_history_where_they_are_asked_for(tmp_path):
    recipe = small_recipe(trainer={"max_steps": 1}, watch=Watch(every=1, windows=1, passkey_trials=1))
    rows = history(adapt(yarn(), recipe, tmp_path / "out").folder)
    assert [0 <= row["target_passkey"] <= 1 for row in rows] == [True, True]


def test_the_source_is_not_touched(tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    plan = ropepatch.plan(source, to=512, method="yarn")
    adapt(plan, small_recipe(trainer={"max_steps": 1}), tmp_path / "out")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


class Interrupt(TrainerCallback):
    """Raises at a point of a step, as if the process were gone."""

    def __init__(self, point, step):
        self.point, self.step = point, step

    def _at(self, point, state):
        if (point, state.global_step) == (self.point, self.step):
            raise KeyboardInterrupt

    def on_step_begin(self, args, state, control, **kwargs):
        self._at("begin", state)

    def on_step_end(self, args, state, control, **kwargs):
        self._at("end", state)

    def on_save(self, args, state, control, **kwargs):
        self._at("save", state)


def interrupted(out, callback):
    """Run until the callback raises."""
    made = LongContextTrainer.__init__

    def with_callback(self, **arguments):
        made(self, **arguments)
        self.add_callback(callback)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LongContextTrainer, "__init__", with_callback)
        with pytest.raises(KeyboardInterrupt):
            adapt(yarn(), small_recipe(), out)


@pytest.mark.parametrize(
    ("point", "step", "last"),
    [
        pytest.param("begin", 0, 0, marks=pytest.mark.slow),
        ("end", 4, 2),
        pytest.param("save", 6, 6, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_goes_on_and_ends_like_one_that_was_not(
    monkeypatch, tmp_path, adapted, point, step, last
):
    ticks = itertools.count()  # one second a step
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    interrupted(tmp_path / "out", Interrupt(point, step))
    assert not (tmp_path / "out").exists()
    lines = []
    resumed = adapt(yarn(), small_recipe(), tmp_path / "out", say=lines.append).folder
    assert (f"going on from checkpoint-{last}" in lines) == (last > 0)
    assert (resumed / "model.safetensors").read_bytes() == (adapted / "model.safetensors").read_bytes()
    assert history(resumed) == history(adapted)
    assert json.loads((resumed / "ropepatch.json").read_text())["adaptation"]["seconds"] == STEPS


KILLED = """
import os, signal, sys
from run_recipes import small_recipe
import ropepatch
from ropepatch.training.adaptation import adapt
from ropepatch.training.trainer import LongContextTrainer
from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 3: os.kill(os.getpid(), signal.SIGKILL)

made = LongContextTrainer.__init__
def with_callback(self, **arguments):
    made(self, **arguments)
    self.add_callback(Kill())
LongContextTrainer.__init__ = with_callback
adapt(ropepatch.plan("tiny", to=512, method="yarn"), small_recipe(), sys.argv[1])
"""


@pytest.mark.slow
def test_a_run_that_was_killed_ends_like_one_that_was_not(tmp_path, adapted):
    file = tmp_path / "killed.py"
    file.write_text(KILLED)
    killed = run_python(str(file), str(tmp_path / "out"), check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "out.run" / "checkpoint-2").is_dir()
    resumed = adapt(yarn(), small_recipe(), tmp_path / "out").folder
    assert (resumed / "model.safetensors").read_bytes() == (adapted / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, adapted, caplog):
    interrupted(tmp_path / "out", Interrupt("end", 5))
    state = tmp_path / "out.run" / "checkpoint-4" / "optimizer.pt"
    state.write_bytes(state.read_bytes()[:-100])
    lines = []
    resumed = adapt(yarn(), small_recipe(), tmp_path / "out", say=lines.append).folder
    assert "going on from checkpoint-2" in lines
    assert "optimizer.pt is not what was written" in caplog.text
    assert (resumed / "model.safetensors").read_bytes() == (adapted / "model.safetensors").read_bytes()


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
    assert (resumed / "model.safetensors").read_bytes() == (adapted / "model.safetensors").read_bytes()


def test_what_is_finished_is_not_trained_again(monkeypatch, tmp_path, adapted):
    monkeypatch.setattr(LongContextTrainer, "train", lambda *args, **kwargs: pytest.fail("it trains"))
    assert adapt(yarn(), small_recipe(), adapted).folder == adapted


def test_a_finished_checkpoint_is_no_finished_adapter(adapted):
    with pytest.raises(RopepatchError, match="already exists"):
        adapt(yarn(), small_recipe(save="adapter"), adapted)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """What a run leaves that was interrupted after three steps."""
    out = tmp_path_factory.mktemp("begun") / "out"
    interrupted(out, Interrupt("end", 3))
    return out


@pytest.mark.parametrize(
    "other",
    [
        lambda: (yarn(), small_recipe(seed=1)),
        lambda: (yarn(), small_recipe(trainer={"learning_rate": 2e-3})),
        lambda: (ropepatch.plan("tiny", to=512, method="ntk"), small_recipe()),
        lambda: (ropepatch.plan("tiny", to=1024, method="yarn"), small_recipe()),
    ],
    ids=["seed", "learning rate", "method", "target"],
)
def test_another_run_neither_goes_on_nor_counts_as_finished(adapted, begun, other):
    with pytest.raises(RopepatchError, match="already exists"):
        adapt(*other(), adapted)
    with pytest.raises(RopepatchError, match=r"out\.run is of another run: it differs in"):
        adapt(*other(), begun)


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
    base, _ = ropepatch.load("tiny")
    assert torch.allclose(logits(model), logits(stock), atol=1e-4)
    assert not torch.allclose(logits(stock), logits(base), atol=1e-2)


@pytest.mark.slow
def test_trained_embeddings_stay_tied(tmp_path):
    recipe = small_recipe(lora=Lora(r=4, train_embeddings=True), trainer={"max_steps": 3})
    folder = adapt(yarn(), recipe, tmp_path / "out").folder
    before, after = load_file(TINY / "model.safetensors"), weights(folder)
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"].float(), after["model.embed_tokens.weight"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_without_an_adapter_all_weights_are_trained(tmp_path):
    folder = adapt(yarn(), small_recipe(lora=None, trainer={"max_steps": 3}), tmp_path / "out").folder
    before, after = load_file(TINY / "model.safetensors"), weights(folder)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name].float(), after[name]) for name in before)
    assert json.loads((folder / "ropepatch.json").read_text())["verified"]["logits"] == "equal"


@pytest.mark.slow
def test_recomputed_activations_change_nothing(tmp_path, adapted):
    folder = adapt(yarn(), small_recipe(gradient_checkpointing=True), tmp_path / "out").folder
    assert (folder / "model.safetensors").read_bytes() == (adapted / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_bfloat16_checkpoint_is_trained_in_mixed_precision_and_saved_as_it_was(tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    plan = ropepatch.plan(source, to=512, method="yarn")
    folder = adapt(plan, small_recipe(trainer={"max_steps": 3, "bf16": True}), tmp_path / "out").folder
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.bfloat16}
    losses = [row["loss"] for row in history(folder) if "loss" in row]
    full = adapt(plan, small_recipe(trainer={"max_steps": 3}), tmp_path / "full").folder
    assert losses == pytest.approx([row["loss"] for row in history(full) if "loss" in row], rel=0.05)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    out = tmp_path_factory.mktemp("adapter") / "out"
    return adapt(yarn(), small_recipe(save="adapter", trainer={"max_steps": 2}), out).folder


def test_an_adapter_holds_what_it_needs_and_no_base_weights(adapter):
    names = {path.name for path in adapter.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "ropepatch.json", "adaptation"}
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"


def test_an_adapter_goes_on_a_model_with_its_patch(adapter):
    model, _ = ropepatch.load("tiny")
    ropepatch.patch(model, yarn())
    patched, _ = ropepatch.load_adapter(adapter, model)
    loaded, _ = ropepatch.load_adapter(adapter)
    assert torch.equal(logits(patched), logits(loaded))


@pytest.mark.parametrize(("target", "patch"), [(None, "no patch"), (1024, "yarn to 1024")])
def test_an_adapter_is_refused_on_a_model_without_its_patch(adapter, target, patch):
    model, _ = ropepatch.load("tiny")
    if target:
        ropepatch.patch(model, ropepatch.plan("tiny", to=target, method="yarn"))
    with pytest.raises(RopepatchError, match=f"trained under yarn to 512 tokens; this model has {patch}"):
        ropepatch.load_adapter(adapter, model)


def test_an_adapter_is_refused_where_its_base_has_other_weights(tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    recipe = small_recipe(save="adapter", trainer={"max_steps": 1})
    folder = adapt(ropepatch.plan(source, to=512, method="yarn"), recipe, tmp_path / "out").folder
    save_file(
        {name: -tensor for name, tensor in load_file(source / "model.safetensors").items()},
        source / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(RopepatchError, match="has other weights than the adapter was trained on"):
        ropepatch.load_adapter(folder)


def test_a_checkpoint_is_no_adapter(adapted):
    with pytest.raises(RopepatchError, match="holds no adapter of ropepatch"):
        ropepatch.load_adapter(adapted)


def test_the_gate_compares_with_the_base_model_within_its_context(tmp_path, adapted):
    gate = adapt(yarn(), small_recipe(), adapted).gate
    model, tokenizer = ropepatch.load("tiny")
    from ropepatch.data.tiny.tales import held_out_tales

    (tale,) = held_out_tales(tokenizer, length=512, count=1)
    assert gate.base == pytest.approx(
        ropepatch.perplexity(model, None, [tale.ids[:256]]).at(256).mean, abs=1e-6
    )
    after, _ = ropepatch.load(adapted)
    written = ropepatch.perplexity(after, None, [tale.ids[:256]]).at(256).mean
    assert gate.now == pytest.approx(written, abs=1e-6)
    assert gate.passed


def test_the_time_and_the_machine_of_the_training_are_recorded(adapted):
    record = json.loads((adapted / "ropepatch.json").read_text())["adaptation"]
    assert 0 < record["seconds"] < 600
    assert record["device"] == f"CPU, {torch.get_num_threads()} threads"


def test_the_time_of_steps_between_two_logs_counts(monkeypatch, tmp_path):
    ticks = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    made = adapt(
        yarn(), small_recipe(trainer={"logging_steps": 4, "save_steps": 100}), tmp_path / "out"
    ).folder
    assert json.loads((made / "ropepatch.json").read_text())["adaptation"]["seconds"] == STEPS


def test_a_loss_that_rose_by_more_than_allowed_does_not_pass_the_gate(adapted):
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
    assert lines[0].startswith(f"{file}: ")
    assert "documents" in lines[0]
    assert "tokens" in lines[0]
    assert "short_loss" in history(folder)[0]


def quantised(folder):
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    content = json.loads((folder / "config.json").read_text())
    content |= {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("model", "method", "recipe", "message"),
    [
        (lambda folder: "tiny", "dynamic-yarn", {}, "no stock rope type can hold"),
        (lambda folder: "tiny", "dynamic", {}, "dynamic follows the length"),
        (quantised, "yarn", {}, "are quantised"),
        (
            lambda folder: "tiny",
            "yarn",
            {"lora": Lora(target_modules=("query_key_value",))},
            "no adapter on query_key_value fits this model",
        ),
    ],
)
def test_what_cannot_be_adapted_is_one_line(tmp_path, model, method, recipe, message):
    plan = ropepatch.plan(model(tmp_path / "source"), to=512, method=method)
    with pytest.raises(RopepatchError, match=message):
        adapt(plan, small_recipe(**recipe), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "mine.txt").write_text("mine")
    with pytest.raises(RopepatchError, match=r"out\.run exists and is no run"):
        adapt(yarn(), small_recipe(), tmp_path / "out")
    assert (tmp_path / "out.run" / "mine.txt").read_text() == "mine"


TWO = """
import sys
from run_recipes import small_recipe
from ropepatch.training.sections import Lora
import ropepatch
from ropepatch.training.adaptation import adapt
adapt(ropepatch.plan("tiny", to=512, method="yarn"), small_recipe(lora=Lora(r=4)), sys.argv[1])
"""


@pytest.mark.slow
def test_two_processes_make_what_one_makes(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(TWO)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_python(*torchrun, str(file), str(tmp_path / "two"))
    alone = small_recipe(lora=Lora(r=4), trainer={"gradient_accumulation_steps": 2})
    adapt(yarn(), alone, tmp_path / "one")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    base = load_file(TINY / "model.safetensors")
    for name in one:
        moved = (one[name] - base[name].float()).abs().max()
        assert (one[name] - two[name]).abs().max() <= 1e-3 * moved + 1e-6, name
    ours, theirs = history(tmp_path / "one"), history(tmp_path / "two")
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


def test_a_merge_that_changes_what_the_model_computes_is_refused(monkeypatch, tmp_path):
    from peft.tuners.lora import Linear

    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: torch.ones_like(self.weight))
    with pytest.raises(RopepatchError, match=r"merging the adapter changes the logits by"):
        adapt(yarn(), small_recipe(trainer={"max_steps": 1}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_one_line_and_the_training_is_kept(monkeypatch, tmp_path, adapted):
    def full(self, folder, **settings):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "save_pretrained", full)
        with pytest.raises(RopepatchError, match=r"cannot write .*No space left"):
            adapt(yarn(), small_recipe(), tmp_path / "out")
    monkeypatch.setattr(LongContextTrainer, "train", lambda *args, **kwargs: pytest.fail("it trains"))
    finished = adapt(yarn(), small_recipe(), tmp_path / "out").folder
    assert (finished / "model.safetensors").read_bytes() == (adapted / "model.safetensors").read_bytes()


def test_two_runs_do_not_train_in_one_folder(tmp_path):
    (tmp_path / "out.run").mkdir()
    with (
        FileLock(tmp_path / "out.run" / ".lock"),
        pytest.raises(RopepatchError, match="another process trains"),
    ):
        adapt(yarn(), small_recipe(), tmp_path / "out")


def test_a_base_whose_configuration_has_changed_is_another_run(monkeypatch, tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    plan = ropepatch.plan(source, to=512, method="yarn")
    with monkeypatch.context() as patched:
        patched.setattr(adaptation, "save_adaptation", lambda *args: pytest.skip)
        patched.setattr(adaptation.shutil, "rmtree", lambda *args, **kwargs: None)
        with pytest.raises(RopepatchError, match=r"no ropepatch\.json"):
            adapt(plan, small_recipe(trainer={"max_steps": 1}), tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    changed = ropepatch.plan(source, to=512, method="yarn")
    with pytest.raises(RopepatchError, match="it differs in config"):
        adapt(changed, small_recipe(trainer={"max_steps": 1}), tmp_path / "out")


def test_logits_are_not_compared_where_the_weights_do_not_fit_twice(monkeypatch, tmp_path):
    monkeypatch.setattr("ropepatch.extension.verification.available_bytes", lambda: 0)
    folder = adapt(yarn(), small_recipe(trainer={"max_steps": 1}), tmp_path / "out").folder
    verified = json.loads((folder / "ropepatch.json").read_text())["verified"]
    assert verified["frequencies"] == "equal"
    assert verified["logits"].startswith("not compared")


@pytest.mark.parametrize(
    "wrong",
    [
        {"report_to": "nonsense"},
        {"optim": "adamw_bnb_8bit"},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"lr_scheduler_type": "nonsense"},
        {"lr_scheduler_kwargs": {"x": 1}},
    ],
    ids=str,
)
def test_what_transformers_refuses_later_is_one_line_before_training(tmp_path, wrong):
    with pytest.raises(RopepatchError, match="transformers refuses the recipe's trainer"):
        adapt(yarn(), small_recipe(trainer=wrong), tmp_path / "out")
