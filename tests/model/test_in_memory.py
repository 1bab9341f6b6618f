"""A loaded model whose RoPE is not its configuration's is neither measured nor patched."""

import copy
import random
import re

import pytest
import torch
from oldest import needs
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.in_memory import check_rope

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = PLAIN | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0],
}
ROPES = {
    "default": PLAIN,
    "linear": PLAIN | {"rope_type": "linear", "factor": 2.0},
    "dynamic": PLAIN | {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "llama3": YARN | {"rope_type": "llama3"} | BANDS,
    "longrope": YARN | {"rope_type": "longrope"} | LISTS,
}
LAYERS = {"sliding_attention": PLAIN, "full_attention": YARN}
FLAT, BY_LAYER = (
    ("llama", "mistral", "qwen3", "qwen2", "gpt_neox"),
    ("gemma3_text", "olmo3"),
)


def made(model_type="llama", rope="yarn"):
    needs(model_type)
    parameters = LAYERS if model_type in BY_LAYER else ROPES[rope]
    more = {"partial_rotary_factor": 1.0} if model_type == "gpt_neox" else {}
    sizes = {"max_position_embeddings": 64 if rope in ("default", "dynamic") else 256}
    return tiny_model(
        model_type, rope_parameters=copy.deepcopy(parameters), **sizes, **more
    )


def buffers(model):
    return {
        f"{path}.{name}": (module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    }


def ids(length):
    return torch.randint(
        3, 128, (1, length), generator=torch.Generator().manual_seed(length)
    )


def garbage(table, draw):
    table.copy_(
        torch.tensor([draw.randrange(2**31) for _ in table], dtype=torch.int32).view(
            torch.float32
        )
    )
    table[draw.randrange(len(table))] = draw.choice([torch.nan, -3.0, 4e-41, torch.inf])


DAMAGES = {
    "garbage": garbage,
    "zeros": lambda table, draw: table.zero_(),
    "another scale": lambda table, draw: table.mul_(draw.choice([0.25, 0.9, 1.5])),
}


def damaged(seed):
    """A model, a draw, and one of its tables to damage, by its name."""
    draw = random.Random(seed)
    model = made(draw.choice([*FLAT, *BY_LAYER]), draw.choice([*ROPES]))
    key = draw.choice(
        [name for name in sorted(buffers(model)) if "original" not in name]
    )
    module, name = buffers(model)[key]
    return model, draw, key, getattr(module, name)


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_to_one_buffer_is_refused_by_its_name(seed):
    model, draw, key, table = damaged(seed)
    DAMAGES[draw.choice([*DAMAGES])](table, draw)
    with pytest.raises(RopepatchError, match=rf"{re.escape(key)} is \["):
        check_rope(model)


@pytest.mark.parametrize("seed", range(6))
def test_rounding_to_16_bits_is_no_error(seed):
    model, draw, key, table = damaged(seed)
    kind = draw.choice([torch.bfloat16, torch.float16])
    table.copy_(table.to(kind).float())
    (found,) = check_rope(model)
    assert found.startswith(f"{key} is rounded, ")


def after(model, *lengths):
    with torch.no_grad():
        for length in lengths:
            model(ids(length))
    return model


def patched(**given):
    model = made(rope="default")
    ropepatch.patch(model, to=256, **given)
    return model


def by_layer(folder):
    made("gemma3_text").save_pretrained(folder)
    return type(made("gemma3_text")).from_pretrained(folder, dtype=torch.bfloat16)


def fine_tuned(model):
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def swapped():
    model = made(rope="default")
    ropepatch.swap(model, "alibi")
    return model


SOUND = {
    "a copy of a patched model": lambda folder: copy.deepcopy(patched(method="yarn")),
    "patched by another method, rounded since": lambda folder: patched(method="ntk").to(
        torch.bfloat16
    ),
    "patched and fine_tuned": lambda folder: fine_tuned(patched(method="yarn")),
    "bfloat16 by layer type": by_layer,
    "longrope after a long prompt": lambda folder: after(made(rope="longrope"), 100),
    "dynamic after long and short prompts": lambda folder: after(
        made(rope="dynamic"), 100, 20, 80
    ),
    "swapped": lambda folder: swapped(),
    "remapped": lambda folder: patched(method="rerope"),
    "no RoPE": lambda folder: tiny_model("gpt2"),
}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_models_have_no_findings(kind, tmp_path):
    assert not check_rope(SOUND[kind](tmp_path))


@pytest.mark.parametrize(
    ("rope", "name"), [("dynamic", "inv_freq"), ("longrope", "original_inv_freq")]
)
def test_frequencies_left_over_from_a_longer_prompt_are_an_error(rope, name):
    model, late = (
        made(rope=rope),
        after(made(rope=rope), 128 if rope == "dynamic" else 65),
    )
    getattr(model.model.rotary_emb, name).copy_(late.model.rotary_emb.inv_freq)
    with pytest.raises(RopepatchError, match=rf"rotary_emb\.{name} is"):
        check_rope(model)


@pytest.mark.parametrize("layer", ["", "full_attention_"])
def test_a_wrong_attention_factor_is_an_error(layer):
    model = made("gemma3_text" if layer else "llama")
    name = f"{layer}attention_scaling"
    setattr(model.model.rotary_emb, name, 1.0)
    with pytest.raises(RopepatchError, match=rf"{name} is 1\.0; .* computes 1\.13862"):
        check_rope(model)


def test_frequencies_are_compared_with_the_current_config_of_the_model():
    """Soup#793."""
    model = made(rope="default")
    model.config = made().config
    with pytest.raises(RopepatchError, match=r"the config \(yarn\) computes \[1\.0,"):
        check_rope(model)


@pytest.mark.parametrize("damage", ["inv_freq", "original_inv_freq"])
def test_a_model_with_zeroed_frequencies_is_not_used(damage, tiny):
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    getattr(model.model.rotary_emb, damage).zero_()
    verbs = [
        lambda: ropepatch.perplexity(model, tokenizer, ["the fox"]),
        lambda: ropepatch.passkey(model, tokenizer, lengths=[200], haystacks=3),
        lambda: ropepatch.patch(model, "yarn", to="2x"),
        lambda: ropepatch.patch(model, "rerope", to=512),
    ]
    for verb in verbs:
        if damage == "original_inv_freq":  # not used by a RoPE that never changes
            verb()
            if held := ropepatch.active(model):
                held.remove()
            continue
        with pytest.raises(
            RopepatchError,
            match=r"inv_freq is \[0\.0, .*; the config \(default\) computes \[1\.0,",
        ):
            verb()


def test_measuring_a_model_with_rounded_inv_freq_gives_a_warning(tiny, caplog):
    model = copy.deepcopy(tiny[0]).to(torch.bfloat16)
    ropepatch.perplexity(model, tiny[1], ["the fox"])
    assert "inv_freq is rounded, 0.046 radians off at 256 tokens" in caplog.text


class Shard(torch.Tensor):
    """Like a DTensor of which this process has only a part."""

    placements = (type("Shard", (), {"is_replicate": lambda self: False})(),)


def test_tables_that_cannot_be_compared_give_no_error():
    model = made()
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[:4].as_subclass(Shard)
    assert not check_rope(model)
    rotary.__class__ = type("Own", (type(rotary),), {"__init__": lambda s: None})
    assert not check_rope(model)
