"""What a recipe costs, against transformers' models, the schedule of the training and published figures."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Llama

from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.training.adapter import trainable
from ropepatch.training.estimates import (
    GIB,
    SHAPES,
    DecoderShape,
    activation_bytes,
    estimate,
    estimate_gpu,
    flops_per_token,
    longest_row,
)
from ropepatch.training.positions import TrueLength
from ropepatch.training.recipe import Recipe
from ropepatch.training.recipe_sections import Data, Distil, Lora
from ropepatch.training.rows import Schedule

SMALL = DecoderShape(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=256,
)


def config(shape: DecoderShape, kind=LlamaConfig, **more):
    return kind(
        **{key: value for key, value in vars(shape).items() if key != "qkv_bias"},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        **more,
    )


def recipe(*, windows=(256,), per_batch=256, lora=Lora(), checkpointing=True, **trainer) -> Recipe:  # noqa: B008
    data = Data(sources=(Texts(text="x"),), windows=windows, tokens_per_batch=per_batch)
    arguments = {"max_steps": 1, "learning_rate": 1e-3, "bf16": True} | trainer
    return Recipe(
        model="x",
        to=1024,
        data=data,
        positions=TrueLength(),
        lora=lora,
        trainer=arguments,
        gradient_checkpointing=checkpointing,
    )


@pytest.mark.parametrize(
    ("name", "weights"),
    [  # as the models' authors state them
        ("tiny", 1_967_808),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-8B", 8_190_735_360 - 36 * 2 * 128),  # less the norms of queries and keys
    ],
)
def test_the_shapes_are_those_of_the_published_models(name, weights):
    assert SHAPES[name].parameters == weights


@pytest.mark.parametrize(
    "lora",
    [
        None,
        Lora(r=3),
        Lora(r=3, train_norms=False),
        Lora(r=3, train_embeddings=True),
        Lora(r=3, target_modules="all-linear"),
        Lora(r=3, target_modules=("down_proj", "k_proj", "k_proj"), use_dora=True),
    ],
    ids=str,
)
def test_what_is_trained_is_counted_as_the_training_makes_it(lora):
    tied = replace(SMALL, tie_word_embeddings=True)
    model = trainable(Llama(config(tied)), lora)
    weights = sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
    assert estimate(recipe(lora=lora), tied).trained == weights


@given(
    windows=st.lists(st.integers(2, 300), min_size=1, max_size=3),
    spare=st.integers(0, 700),
    steps=st.integers(1, 7),
    accumulated=st.integers(1, 3),
    processes=st.integers(1, 3),
)
def test_the_tokens_are_those_of_the_schedule_that_is_trained_on(
    windows, spare, steps, accumulated, processes
):
    wanted = recipe(
        windows=tuple(windows),
        per_batch=max(windows) + spare,
        max_steps=steps,
        gradient_accumulation_steps=accumulated,
    )
    schedule = Schedule.of(wanted.data, trained=256, steps=steps, per_step=accumulated * processes, seed=0)
    assert estimate(wanted, SMALL, processes=processes).tokens == schedule.tokens(0)


def test_target_modules_of_another_architecture_are_refused():
    with pytest.raises(RopepatchError, match="unknown target module 'qkv_proj'"):
        estimate(recipe(lora=Lora(target_modules=("q_proj", "qkv_proj"))), SMALL)


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products, and of attention as the full one."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "bmm"):
            *_, inner = arguments[0].shape
            self.flops += 2 * out.numel() * inner
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("lora", "tied"),
    [(None, False), (Lora(r=4), True), *((Lora(r=4, train_embeddings=True), tied) for tied in (True, False))],
)
def test_the_work_is_what_torch_multiplies(lora, tied, checkpointing):
    shape = replace(SMALL, num_key_value_heads=4, tie_word_embeddings=tied)
    model = Llama(config(shape, attn_implementation="eager", use_cache=False)).train()
    model = trainable(model, lora)
    if checkpointing:
        base = model.get_base_model() if lora else model
        (getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable)()
    ids = torch.randint(shape.vocab_size, (1, 256))
    with Products() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    attention = 2 * shape.num_hidden_layers * shape.hidden_size * 256
    forward = 2 if checkpointing else 1
    # Eager multiplies the whole square, twice what is causal, and backward twice as much as forward.
    difference = attention * 2 * (forward + 2) - attention * (forward + 2.5)
    # Checkpointing leaves out the last product of a layer, down_proj, the second time.
    left_out = 2 * 128 * 352 * shape.num_hidden_layers * (forward - 1)
    counted_as = flops_per_token(recipe(lora=lora, checkpointing=checkpointing), shape, 256)
    assert counted.flops == pytest.approx(256 * (counted_as + difference - left_out), rel=0.005)


def test_a_teacher_is_one_more_forward_pass_of_the_base_model():
    model = Llama(config(SMALL, attn_implementation="eager"))
    with Products() as counted, torch.no_grad():
        model(input_ids=torch.randint(SMALL.vocab_size, (1, 256)))
    half = 2 * SMALL.num_hidden_layers * SMALL.hidden_size * 256  # of the square that eager multiplies
    distilled = recipe().model_copy(update={"distil": Distil()})
    more = flops_per_token(distilled, SMALL, 256) - flops_per_token(recipe(), SMALL, 256)
    assert counted.flops == pytest.approx(256 * (more + half), rel=0.005)


def peak_of_allocations(step) -> int:
    """Bytes allocated on the CPU at the peak of a step, above what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    events = watched.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize("mixed", [True, False], ids=["bf16", "float32"])
@pytest.mark.parametrize(
    "lora", [None, Lora(r=4), Lora(r=4, train_norms=False), Lora(r=4, train_embeddings=True)]
)
def test_the_activations_are_what_torch_allocates(lora, mixed):
    # As many key as query heads: on the CPU, older torch takes others through [T, T] scores.
    shape = replace(SMALL, num_hidden_layers=6, num_key_value_heads=4, vocab_size=32)
    tokens = 1024
    model = Llama(config(shape, attn_implementation="sdpa", use_cache=False))
    model = trainable(model.bfloat16() if mixed else model, lora).train()
    base = model.get_base_model() if lora else model
    (getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable)()
    for weights in model.parameters():
        if weights.requires_grad:
            weights.grad = torch.zeros_like(weights)
    ids = torch.randint(shape.vocab_size, (1, tokens))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            states = base.model(input_ids=ids).last_hidden_state
        states.sum().backward()

    step()  # the first allocates more
    logits = 12 * tokens * shape.vocab_size
    wanted = recipe(lora=lora, bf16=mixed)
    assert activation_bytes(wanted, shape, tokens) - logits == pytest.approx(
        peak_of_allocations(step), rel=0.15
    )


def test_without_checkpointing_every_layer_is_held():
    chunk = 12 * 256 * SMALL.vocab_size
    one = replace(SMALL, num_hidden_layers=1)
    kept = activation_bytes(recipe(checkpointing=False), SMALL, 256) - chunk
    assert kept == 3 * (activation_bytes(recipe(checkpointing=False), one, 256) - chunk)
    assert activation_bytes(recipe(), SMALL, 256) - chunk == kept / 3 + 2 * 256 * 128 * 3


def test_memory_is_the_sum_of_what_each_weight_takes():
    base = SMALL.parameters
    lora = estimate(recipe(lora=Lora(r=4, target_modules=("q_proj", "o_proj", "k_proj"))), SMALL)
    trained = 3 * 4 * (256 + 256 + 192) + SMALL.norms
    assert lora.weights_gib * GIB == 2 * base + 4 * trained
    assert lora.optimizer_gib * GIB == 12 * trained
    full = estimate(recipe(lora=None), SMALL)
    assert (full.weights_gib + full.optimizer_gib) * GIB == 18 * base  # with autocast's copies
    assert estimate(recipe(lora=None, bf16=False), SMALL).weights_gib * GIB == 4 * base
    assert lora.total_gib == lora.weights_gib + lora.optimizer_gib + lora.activations_gib


@pytest.mark.parametrize(
    ("window", "hours", "gigabytes"),
    [(8192, 6.0, 25.7), (16384, 14.0, 34.7), (32768, 36.5, 46.5), (65536, 92.5, 71.1)],
)
def test_it_agrees_with_what_longlora_measured(window, hours, gigabytes):
    """Table 12 of arXiv:2309.12307: Llama-2-7B, LoRA, 1000 steps of 64 rows, 8 A100 (312 TFLOP/s each)."""
    wanted = recipe(
        windows=(window,),
        per_batch=window,
        lora=Lora(r=8, train_embeddings=True),
        max_steps=1000,
        gradient_accumulation_steps=8,
    )
    cost = estimate(wanted, SHAPES["meta-llama/Llama-2-7b-hf"], processes=8)
    assert cost.total_gib * GIB / 1e9 == pytest.approx(gigabytes, rel=0.17)
    assert 0.4 < cost.hours(8 * 312e12) / hours < 0.6  # the share of the peak that they had


def test_a_batch_is_as_long_as_its_rows():
    whole, spare = (estimate(recipe(windows=(100,), per_batch=room), SMALL) for room in (200, 256))
    assert whole == spare


@pytest.mark.parametrize("lora", [None, Lora()])
def test_gpus_that_share_rows_hold_a_part_of_what_one_holds_and_what_they_exchange(lora):
    one, two = (estimate_gpu(recipe(lora=lora), SMALL, 4096, gpus) for gpus in (1, 2))
    assert one.optimizer_gib == estimate(recipe(lora=lora), SMALL).optimizer_gib == 2 * two.optimizer_gib
    assert one.exchange_gib == 2 * two.exchange_gib
    assert one.seconds == 2 * two.seconds
    layer = 2 * sum(inputs * outputs for inputs, outputs in SMALL.linear.values()) / GIB
    assert one.weights_gib - 2 * layer == pytest.approx(2 * (two.weights_gib - 2 * layer))


def test_the_longest_row_fits_and_the_next_one_does_not():
    room, asked = 1.0, recipe(lora=None)
    longest = longest_row(asked, SMALL, 2, room)
    memory = [estimate_gpu(asked, SMALL, tokens, 2).total_gib for tokens in (longest, longest + 2048)]
    assert memory[0] <= room < memory[1]
