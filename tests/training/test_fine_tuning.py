"""A model is trained by a recipe: what comes out, and that interruptions change nothing."""

import errno
import functools
import itertools
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import with_other_weights
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model
from run_recipes import (
    fine_tune,
    history_of,
    interrupted,
    logits,
    model_bytes,
    record_of,
    small_recipe,
    tiny_with,
    train,
    trainers,
    yarn,
)
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import TINY
from ropepatch.processes import ALONE, Processes
from ropepatch.training import fine_tuning, trainer
from ropepatch.training.adapter import trainable
from ropepatch.training.fine_tuning import merged_model
from ropepatch.training.recipe import Distil, Lora, Watch, read_recipe
from ropepatch.training.run import PARTIAL, Run, checkpoints, newest
from ropepatch.training.supply import read_supply

TRAINED = 256


def steps_with(folder, *keys):
    """The steps of the history that have these values."""
    return [row["step"] for row in history_of(folder) if {*keys} <= row.keys()]


def changed_weights(source, folder, dtype=torch.float32):
    """The names of the weights that a training changed; none is new or missing."""
    before, after = (load_file(at / "model.safetensors") for at in (source, folder))
    assert before.keys() == after.keys()
    return {
        name
        for name, weight in before.items()
        if not torch.equal(weight.to(dtype), after[name])
    }


def test_what_comes_out_loads_in_stock_transformers_at_the_target(fine_tuned):
    model = AutoModelForCausalLM.from_pretrained(fine_tuned)
    assert model.config.max_position_embeddings == 512
    assert model.config.rope_parameters["rope_type"] == "yarn"
    verified = record_of(fine_tuned)["verified"]
    assert (verified["logits"], verified["difference"]) == ("equal", 0.0)
    assert [path.name for path in fine_tuned.parent.iterdir()] == [fine_tuned.name]
    assert read_recipe(str(fine_tuned / "training" / "recipe.yaml")) == small_recipe()
    changed = {name.split(".")[-2] for name in changed_weights(TINY, fine_tuned)}
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"} | norms


def test_the_history_holds_losses_and_evaluations(fine_tuned):
    """Logged every five steps and at every save."""
    assert steps_with(fine_tuned, "loss", "learning_rate") == [2, 4, 5, 6]
    assert steps_with(fine_tuned, "short_loss", "target_loss") == [0, 3, 6]


def test_a_run_ended_by_a_signal_resumes_with_other_times(tmp_path, fine_tuned):
    """Step 3 is saved and logged, so the losses are means over other steps."""
    seldom, lines = small_recipe(trainer={"save_steps": 100, "logging_steps": 2}), []
    send = functools.partial(os.kill, os.getpid(), signal.SIGINT)
    handler = signal.getsignal(signal.SIGINT)
    interrupted(yarn(), seldom, tmp_path / "out", "step_begin", 2, end=send)
    assert signal.getsignal(signal.SIGINT) is handler
    (saved,) = checkpoints(tmp_path / "out.run")
    assert saved.name == "checkpoint-3"
    (tmp_path / "out.run" / "runs").mkdir()
    (tmp_path / "out.run" / "runs" / "events").touch()
    other = {
        "save_steps": 3,
        "save_total_limit": 3,
        "logging_steps": 1,
        "dataloader_num_workers": 1,
        "ddp_timeout": 60,
    }
    again = train(tmp_path / "out", lines.append, trainer=other).path
    assert "resuming from checkpoint-3" in lines
    assert model_bytes(again) == model_bytes(fine_tuned)
    assert (again / "training" / "runs" / "events").exists()
    assert steps_with(again, "loss") == [2, 3, 4, 5, 6]
    evaluations = [
        [
            (row["step"], row["short_loss"])
            for row in history_of(place)
            if "short_loss" in row
        ]
        for place in (again, fine_tuned)
    ]
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "step", "last"),
    [("step_begin", 0, 0), ("step_end", 4, 2), ("save", 6, 6)],
)
def test_an_interrupted_run_ends_like_another(
    monkeypatch, tmp_path, fine_tuned, point, step, last
):
    ticks = itertools.count()  # one second a step
    monkeypatch.setattr(
        trainer, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )
    interrupted(yarn(), small_recipe(), tmp_path / "out", point, step)
    assert not (tmp_path / "out").exists()
    lines = []
    resumed = train(tmp_path / "out", lines.append).path
    assert (f"resuming from checkpoint-{last}" in lines) == (last > 0)
    assert model_bytes(resumed) == model_bytes(fine_tuned)
    assert history_of(resumed) == history_of(fine_tuned)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(
    monkeypatch, tmp_path, fine_tuned
):
    stock = torch.save

    def full(*args, **kwargs):
        if "checkpoint-4" in str(args):
            raise OSError(errno.ENOSPC, "No space left on device")
        return stock(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(
            RopepatchError,
            match=r"cannot save the checkpoint of step 4: .*No space left",
        ) as error:
            train(tmp_path / "out")
    assert "run the same command again" in error.value.hint
    assert [path.name for path in (tmp_path / "out.run").glob("checkpoint-*")] == [
        "checkpoint-2"
    ]
    assert model_bytes(train(tmp_path / "out").path) == model_bytes(fine_tuned)


def first_step(out, *, trainer=None, **changes):
    """What a run without dropout logs of its first step, at which it ends."""
    logged = []

    def note(args, state, control, logs, **_):
        if "grad_norm" in logs:
            logged.append(logs)
            raise KeyboardInterrupt

    callback = TrainerCallback()
    callback.on_log = note
    changes["trainer"] = {"logging_steps": 1} | (trainer or {})
    watch = Watch(windows=1, target=False)
    recipe = small_recipe(lora=Lora(r=4), watch=watch, **changes)
    with trainers(callback), pytest.raises(KeyboardInterrupt):
        fine_tune(yarn(), recipe, out)
    return logged[0]


def test_a_step_reads_segments_apart_at_positions_that_jump(tmp_path):
    recipe = small_recipe(lora=Lora(r=4))
    batch = read_supply(Run(yarn(), recipe, tmp_path / "out")).batches[0]
    causal = [torch.ones(n, n).tril() for n in batch["cu_seq_lens_q"].diff().tolist()]
    mask = torch.block_diag(*causal).log()[None, None]
    model = patched(512)
    model.set_attn_implementation("eager")
    inputs = {
        "position_ids": batch["position_ids"],
        "attention_mask": mask,
        "use_cache": False,
    }
    with torch.no_grad():
        logits = model(batch["input_ids"], **inputs).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:]).item()
    assert batch["position_ids"].diff().max() > 1
    loss = first_step(tmp_path / "out")["loss"]
    assert loss == pytest.approx(expected, rel=1e-4)


def test_the_watched_losses_are_those_of_both_lengths(tmp_path):
    run, model = Run(yarn(), small_recipe(), tmp_path / "out"), patched(512)
    pieces = read_supply(run).pieces
    unwatched = small_recipe(watch=Watch(windows=2, target=False))
    short = Run(yarn(), unwatched, tmp_path / "out")
    short_pieces = read_supply(short).pieces
    assert {len(piece) for piece in short_pieces} == {TRAINED}
    assert trainer.measure(short, short_pieces, model).keys() == {"short_loss"}
    curve = ropepatch.perplexity(model, None, pieces)
    assert trainer.measure(run, pieces, model) == {
        "short_loss": curve.at(256).value,
        "target_loss": curve.between(256, 512).value,
    }


def test_the_mean_over_processes_is_the_loss_of_the_step():
    model, batch = patched(512), {"input_ids": torch.arange(20)[None]}
    batch["labels"] = batch["input_ids"]

    def loss(processes):
        step = SimpleNamespace(teacher=None, head=None)
        step.run = SimpleNamespace(processes=processes)
        compute = trainer.LongContextTrainer.compute_loss
        return compute(step, model, batch, num_items_in_batch=38)

    assert torch.equal(loss(Processes(0, 2)), 2 * loss(ALONE))


def test_an_adapter_is_drawn_from_the_seed_of_its_recipe(tmp_path, monkeypatch):
    drawn = []

    def stop(*given):
        drawn.append(torch.initial_seed())
        raise KeyboardInterrupt

    monkeypatch.setattr(fine_tuning, "trainable", stop)
    for seed in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / f"{seed}", seed=seed)
    assert drawn == [1, 2]


def test_accumulated_batches_are_one_step(tmp_path):
    steps = []
    for room, accumulated in ((128, 1), (64, 2)):
        data = small_recipe().data.model_copy(update={"tokens_per_batch": room})
        trainer = {"gradient_accumulation_steps": accumulated}
        changes = {"data": data, "positions": "true-length", "trainer": trainer}
        steps.append(first_step(tmp_path / str(room), **changes))
    for key in ("loss", "grad_norm"):
        assert steps[0][key] == pytest.approx(steps[1][key], rel=1e-4)


# Settings that decide the weights


def of_texts(place, **changes):
    """The small recipe on texts, which are watched on another."""
    data = small_recipe().data.model_copy(
        update={"sources": (Texts(text=str(place / "read.txt")),)}
    )
    watch = Watch(every=3, text=str(place / "watched.txt"), windows=1, passkey_trials=0)
    return small_recipe(data=data, watch=watch, **changes)


def write_texts(place, **changed):
    for name in ("read", "watched"):
        file = place / f"{name}.txt"
        file.write_text(
            f"Once there were {changed.get(name, 'ten')} mice. They ate cheese. " * 90
        )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder with the texts and the base of a run that was interrupted after three steps."""
    place = tmp_path_factory.mktemp("begun")
    write_texts(place)
    tiny_with(place / "base")
    with pytest.MonkeyPatch.context() as patching:
        patching.setenv("ROPEPATCH_CACHE", str(place / "cache"))
        interrupted(
            scaled(place / "base"), of_texts(place), place / "out", "step_end", 3
        )
        yield place


def scaled(base, to=512):
    return ropepatch.plan(base, to=to, method="yarn")


OTHER_RECIPES = {
    "seed": {"seed": 1},
    "learning rate": {"trainer": {"learning_rate": 2e-3}},
    "teacher": {"distil": Distil()},
}


def refused(place, differs, base=None, how=None, **changes):
    plan = base or scaled(place / "base")
    said = rf"out\.run belongs to another run: it differs in .*{differs}"
    with pytest.raises(RopepatchError, match=said):
        fine_tune(plan, of_texts(place, **changes), place / "out", **(how or {}))


@pytest.mark.parametrize("changes", OTHER_RECIPES.values(), ids=OTHER_RECIPES)
def test_a_run_resumes_only_with_its_recipe(begun, changes):
    refused(begun, "recipe", **changes)


def test_a_run_resumes_only_with_its_texts(begun):
    for name in ("read", "watched"):
        write_texts(begun, **{name: "two"})
        refused(begun, "text")
    write_texts(begun)


def test_a_run_resumes_only_with_its_base_and_method(begun, tmp_path):
    others = {
        "method": scaled(begun / "base", to=1024),
        "config": scaled(tiny_with(tmp_path / "config", rms_norm_eps=1e-3)),
        "weights": scaled(other_weights(tmp_path / "weights")),
    }
    for differs, plan in others.items():
        refused(begun, differs, plan)


def test_a_run_goes_on_in_as_many_processes_alone(begun, monkeypatch):
    monkeypatch.setattr(Processes, "deal", ALONE.deal)
    refused(begun, "processes", how={"processes": Processes(0, 2)})


def test_a_finished_checkpoint_is_that_of_its_run_alone(fine_tuned):
    for changes in ({"seed": 1}, {"save": "adapter"}):
        with pytest.raises(RopepatchError, match="already exists"):
            train(fine_tuned, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [None, Lora(r=4, train_embeddings=True)], ids=["all weights", "embeddings"]
)
def test_whole_trained_weights_are_written_and_embeddings_stay_tied(tmp_path, lora):
    folder = train(tmp_path / "out", lora=lora, trainer={"max_steps": 3}).path
    changed = changed_weights(TINY, folder)
    assert "model.embed_tokens.weight" in changed
    assert lora or changed == load_file(TINY / "model.safetensors").keys()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert record_of(folder)["verified"]["logits"] == "equal"


@pytest.mark.slow
def test_recomputed_activations_change_nothing(tmp_path, fine_tuned):
    interrupted(yarn(), small_recipe(), tmp_path / "out", "step_end", 3)
    folder = train(tmp_path / "out", gradient_checkpointing=True).path
    assert model_bytes(folder) == model_bytes(fine_tuned)


def test_an_adapter_is_loaded_with_its_rope(adapter):
    names = {path.name for path in adapter.iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "ropepatch.json",
        "training",
    }
    loaded, _ = ropepatch.load_adapter(adapter)
    expected = PeftModel.from_pretrained(patched(512), adapter)
    unpatched = PeftModel.from_pretrained(patched(None), adapter)
    assert torch.equal(logits(loaded), logits(expected))
    assert not torch.equal(logits(loaded), logits(unpatched))


def patched(target):
    model, _ = ropepatch.load("tiny", device="cpu")
    if target:
        ropepatch.patch(model, ropepatch.plan("tiny", to=target, method="yarn"))
    return model


def other_weights(folder):
    with_other_weights(shutil.copytree(TINY, folder))
    return folder


def test_an_incomplete_or_pickled_adapter_is_refused(adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(next(name for name in tensors if "lora_A" in name))
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(RopepatchError, match="missing adapter keys"):
        ropepatch.load_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(RopepatchError, match=r"adapter_model\.safetensors"):
        ropepatch.load_adapter(folder)


def test_an_adapter_is_refused_where_it_does_not_belong(adapter, fine_tuned, tmp_path):
    with pytest.raises(RopepatchError, match="contains no adapter of ropepatch"):
        ropepatch.load_adapter(fine_tuned)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    other = tiny_with(tmp_path / "rope", rope_parameters=rope, rope_theta=5e5)
    for base in (other, other_weights(tmp_path / "base")):
        with pytest.raises(RopepatchError, match="not have the weights and the RoPE"):
            ropepatch.load_adapter(adapter, base=base)


def test_an_adapter_of_another_trainer_keeps_its_rope(tmp_path):
    model, _ = ropepatch.load("tiny", device="cpu")
    handle = ropepatch.patch(model, "yarn", to=512)
    fine_tuned = trainable(model, Lora(r=4))
    arguments = TrainingArguments(
        str(tmp_path / "out"),
        max_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": torch.arange(3, 403), "labels": torch.arange(3, 403)}]
    other = Trainer(fine_tuned, arguments, train_dataset=rows)
    other.train()
    with pytest.raises(RopepatchError, match=r"no adapter_config\.json"):
        handle.record(tmp_path)
    other.save_model()
    handle.record(tmp_path / "out")
    loaded, _ = ropepatch.load_adapter(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(fine_tuned))
    handle.remove()
    assert not torch.equal(logits(loaded), logits(fine_tuned))


def test_the_check_compares_with_the_base_model_within_its_context(fine_tuned):
    check = train(fine_tuned).record.training.short_context
    losses = []
    for checkpoint in ("tiny", fine_tuned):
        model, tokenizer = ropepatch.load(checkpoint, device="cpu")
        (tale,) = held_out_tales(tokenizer, length=512, count=1)
        losses.append(ropepatch.perplexity(model, None, [tale.ids[:256]]).at(256).value)
    assert [check.base, check.now] == pytest.approx(losses, abs=1e-6)
    assert history_of(fine_tuned)[-1]["short_loss"] == pytest.approx(
        check.now, abs=1e-4
    )
    assert check.passed
    strict = Watch(every=3, windows=1, passkey_trials=0, max_short_loss_increase=0.0)
    judged = train(fine_tuned, watch=strict).record.training
    assert not judged.short_context.passed


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(RopepatchError, match=r"the loss is (nan|inf) at step \d"):
        train(
            tmp_path / "out",
            lora=None,
            trainer={"learning_rate": 1e30, "logging_steps": 1},
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_precision(tmp_path, monkeypatch):
    recipe = small_recipe(
        trainer={"max_steps": 2}, watch=Watch(every=2, windows=1, passkey_trials=0)
    )
    open_ = recipe.model_copy(
        update={"trainer": {k: v for k, v in recipe.trainer.items() if k != "bf16"}}
    )
    for dtype in (
        "bfloat16",
        "float32",
    ):  # as on a machine with AMX, and on one without
        monkeypatch.setattr("ropepatch.training.run.fastest", lambda dtype=dtype: dtype)
        if dtype == "bfloat16":
            interrupted(yarn(), open_, tmp_path / "out", "step_end", 1)
        else:
            fine_tune(yarn(), open_, tmp_path / "out")
    assert record_of(tmp_path / "out")["training"]["precision"] == {"dtype": "bfloat16"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_trained_too_and_in_float32(tied):
    model = trainable(
        tiny_model("llama", tie_word_embeddings=tied).bfloat16(),
        Lora(train_embeddings=True),
    )
    assert model.get_output_embeddings().weight.requires_grad == tied
    assert model.get_input_embeddings().weight.requires_grad
    dtypes = {
        parameter.requires_grad: parameter.dtype for parameter in model.parameters()
    }
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert {
        one.dtype
        for one in trainable(tiny_model("llama").bfloat16(), None).parameters()
    } == {torch.float32}


def test_an_adapter_on_one_end_of_tied_embeddings_is_refused():
    lora = Lora(target_modules=("lm_head", "q_proj"))
    with pytest.raises(RopepatchError, match="embeddings and head share their weights"):
        trainable(tiny_model("llama", tie_word_embeddings=True), lora)
    trainable(tiny_model("llama", tie_word_embeddings=False), lora)


@pytest.mark.slow
def test_a_qlora_adapter_is_merged_into_the_unquantised_weights(tmp_path, monkeypatch):
    """bitsandbytes also runs on a CPU, where no recipe is let: the same path, without a GPU's kernels."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("ropepatch.training.run.check_machine", lambda recipe: None)
    # Or it repacks the weights in the first evaluation, and has no gradient of that.
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    source = tiny_with(tmp_path / "source", dtype="bfloat16")
    plan = scaled(source)
    recipe = small_recipe(
        quantization="4bit",
        gradient_checkpointing=True,
        trainer={"max_steps": 4, "bf16": True},
    )
    with trainers() as made:
        folder = fine_tune(plan, recipe, tmp_path / "four").path
    layers = [
        part
        for part in made[0].model.modules()
        if isinstance(part, bitsandbytes.nn.Linear4bit)
    ]
    assert [layer.weight.quant_type for layer in layers] == ["nf4"] * 4 * 7
    assert changed_weights(source, folder, torch.bfloat16) == {
        name
        for name in load_file(source / "model.safetensors")
        if "norm" in name or "self_attn" in name
    }
    assert record_of(folder)["verified"]["logits"] == "equal"


@pytest.mark.slow
def test_a_merge_that_changes_what_the_model_computes_is_refused(monkeypatch, tmp_path):
    from peft.tuners.lora import Linear

    monkeypatch.setattr(
        Linear, "get_delta_weight", lambda self, adapter: torch.ones_like(self.weight)
    )
    with pytest.raises(
        RopepatchError, match=r"merging the adapter changes the logits by"
    ):
        train(tmp_path / "out", trainer={"max_steps": 1})
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_merged_in_float32_and_rounded_once(tmp_path):
    source = tiny_with(tmp_path / "source", dtype="bfloat16")
    plan = ropepatch.plan(source, to=512, method="yarn")
    fine_tuned = get_peft_model(
        LlamaForCausalLM.from_pretrained(source, dtype=torch.float32),
        LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False
        ),
    )
    fine_tuned.save_pretrained(tmp_path / "trained")
    run = Run(plan, small_recipe(), tmp_path / "out")
    merged = merged_model(run, tmp_path / "trained").state_dict()
    layer = fine_tuned.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight + layer.get_delta_weight("default")
    found = merged["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, exact.bfloat16())
    assert not torch.equal(
        found,
        layer.base_layer.weight.bfloat16()
        + layer.get_delta_weight("default").bfloat16(),
    )


def test_two_runs_do_not_train_in_one_folder(tmp_path):
    (tmp_path / "out.run").mkdir()
    with (
        FileLock(tmp_path / "out.run" / ".lock"),
        pytest.raises(RopepatchError, match="another process is training"),
    ):
        train(tmp_path / "out")


def test_the_newest_checkpoint_counts_and_what_was_not_finished_goes(tmp_path):
    assert newest(tmp_path) is None
    for name in (
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-best",
        "trained",
        f"{PARTIAL}/checkpoint-11",
    ):
        (tmp_path / name).mkdir(parents=True)
    assert newest(tmp_path).name == "checkpoint-10"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("checkpoint-9", "checkpoint-10", "checkpoint-best", "trained")
    }
