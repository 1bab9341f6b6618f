"""The RoPE of a loaded model: random damage is reported and repaired, and sound models have no findings."""

import copy
import random

import pytest
import torch
from oldest import needs
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention.remapped import remap_positions
from ropepatch.doctor.findings import MEMORY

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
    "garbage": (garbage, "rope-rescaled"),
    "zeros": (lambda table, draw: table.zero_(), "rope-rescaled"),
    "another scale": (
        lambda table, draw: table.mul_(draw.choice([0.25, 0.9, 1.5])),
        "rope-rescaled",
    ),
    "rounded": (
        lambda table, draw: table.copy_(
            table.to(draw.choice([torch.bfloat16, torch.float16])).float()
        ),
        "rope-rounded",
    ),
}


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_to_one_buffer_is_the_only_finding_and_repaired_exactly(seed):
    draw = random.Random(seed)
    model = made(draw.choice([*FLAT, *BY_LAYER]), draw.choice([*ROPES]))
    with torch.no_grad():
        sound, before = (
            model(ids(40)).logits,
            copy.deepcopy(dict(model.named_buffers())),
        )
    key = draw.choice(sorted(buffers(model)))
    damage, code = DAMAGES[draw.choice([*DAMAGES])]
    module, name = buffers(model)[key]
    damage(getattr(module, name), draw)
    assert [
        (one.code, one.key, one.file) for one in ropepatch.diagnose(model).findings
    ] == [(code, key, MEMORY)]
    repaired = ropepatch.diagnose(model, repair=True)
    assert not repaired.findings
    assert [one.key for one in repaired.repaired] == [key]
    assert all(
        torch.equal(table, before[name]) for name, table in model.named_buffers()
    )
    with torch.no_grad():
        assert torch.equal(model(ids(40)).logits, sound)


def after(model, *lengths):
    with torch.no_grad():
        for length in lengths:
            model(ids(length))
    return model


def patched(**given):
    model = made(rope="default")
    ropepatch.patch(model, to=256, **given)
    return model


def reloaded(folder, dtype, *kind):
    made(*kind).save_pretrained(folder)
    model = made(*kind)
    return type(model).from_pretrained(folder, dtype=dtype)


def fine_tuned(model):
    return get_peft_model(
        model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )


def swapped():
    model = made(rope="default")
    ropepatch.swap(model, "alibi")
    return model


def remapped():
    model = made(rope="default")
    remap_positions(model, "rerope", to=256)
    return model


SOUND = {
    "yarn": lambda folder: made(),
    "patched": lambda folder: patched(method="yarn"),
    "patched by another method, rounded since": lambda folder: patched(method="ntk").to(
        torch.bfloat16
    ),
    "a copy of a patched model": lambda folder: copy.deepcopy(patched(method="yarn")),
    "patched and fine_tuned": lambda folder: fine_tuned(patched(method="yarn")),
    "fine-tuned": lambda folder: fine_tuned(made()),
    "compiled": lambda folder: torch.compile(made()),
    "copied": lambda folder: copy.deepcopy(made()),
    "bfloat16": lambda folder: reloaded(folder, torch.bfloat16),
    "float16": lambda folder: reloaded(folder, torch.float16, "qwen3", "llama3"),
    "bfloat16 by layer type": lambda folder: reloaded(
        folder, torch.bfloat16, "gemma3_text"
    ),
    "float64": lambda folder: made().double(),
    "longrope": lambda folder: made(rope="longrope"),
    "longrope after a long prompt": lambda folder: after(made(rope="longrope"), 100),
    "longrope after a long and a short prompt": lambda folder: after(
        made("qwen2", "longrope"), 100, 20
    ),
    "dynamic": lambda folder: made(rope="dynamic"),
    "dynamic after a long prompt": lambda folder: after(made(rope="dynamic"), 100),
    "dynamic after long and short prompts": lambda folder: after(
        made(rope="dynamic"), 100, 20, 80
    ),
    "two tables": lambda folder: made("gemma3_text"),
    "swapped": lambda folder: swapped(),
    "remapped": lambda folder: remapped(),
    "no RoPE": lambda folder: tiny_model("gpt2"),
}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_models_have_no_findings(kind, tmp_path):
    assert not ropepatch.diagnose(SOUND[kind](tmp_path)).findings


def test_a_scaling_written_after_loading_is_an_error_with_both_tables():
    """Soup#793."""
    model = made(rope="default")
    model.config.rope_parameters = dict(YARN)
    found = {
        one.key.rpartition(".")[2]: one for one in ropepatch.diagnose(model).findings
    }
    assert found.keys() == {"inv_freq", "original_inv_freq", "attention_scaling"}
    assert all(one.code == "rope-rescaled" for one in found.values())
    assert (
        "is 1; the config (yarn) computes 1.13863" in found["attention_scaling"].problem
    )
    assert (
        "... 8 frequencies]; the config (yarn) computes [1,"
        in found["inv_freq"].problem
    )
    assert found["original_inv_freq"].severity == "warning"  # static RoPE never uses it


@pytest.mark.parametrize(
    ("rope", "name"), [("dynamic", "inv_freq"), ("longrope", "original_inv_freq")]
)
def test_frequencies_left_over_from_a_longer_prompt_are_an_error(rope, name):
    model, late = (
        made(rope=rope),
        after(made(rope=rope), 128 if rope == "dynamic" else 65),
    )
    getattr(model.model.rotary_emb, name).copy_(late.model.rotary_emb.inv_freq)
    (found,) = ropepatch.diagnose(model).findings
    assert (found.code, found.severity) == ("rope-rescaled", "error")


@pytest.mark.parametrize("layer", ["", "full_attention_"])
def test_a_wrong_attention_factor_is_reported_and_repaired(layer):
    model = made("gemma3_text" if layer else "llama")
    name, rotary = f"{layer}attention_scaling", model.model.rotary_emb
    right = getattr(rotary, name)
    setattr(rotary, name, 1.0)
    assert [
        one.key.rpartition(".")[2]
        for one in ropepatch.diagnose(model, repair=True).repaired
    ] == [name]
    assert getattr(rotary, name) == right


def test_frequencies_are_compared_with_the_current_config_of_the_model():
    model = made(rope="default")
    model.config = made().config
    assert ropepatch.diagnose(model, repair=True).repaired
    assert torch.equal(
        model.model.rotary_emb.inv_freq, made().model.rotary_emb.inv_freq
    )


@pytest.mark.parametrize("damage", ["inv_freq", "original_inv_freq"])
def test_a_model_with_zeroed_inv_freq_cannot_be_measured_or_patched(damage, tiny):
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    getattr(model.model.rotary_emb, damage).zero_()
    verbs = [
        lambda: ropepatch.perplexity(model, tokenizer, ["the fox"]),
        lambda: ropepatch.passkey(model, tokenizer, lengths=[200], haystacks=3),
        lambda: ropepatch.patch(model, "yarn", to="2x"),
        lambda: remap_positions(model, "rerope", to=512),
    ]
    for verb in verbs:
        if damage == "original_inv_freq":  # not used by a RoPE that never changes
            verb()
            if held := ropepatch.active(model):
                held.remove()
            continue
        with pytest.raises(
            RopepatchError,
            match=r"rotary_emb.inv_freq is \[0, 0, 0, 0, .*; the config \(default\) computes \[1,",
        ) as caught:
            verb()
        assert "ropepatch.diagnose(model, repair=True)" in caught.value.hint
    if damage == "inv_freq":
        ropepatch.diagnose(model, repair=True)
        verbs[0]()


def test_measuring_a_model_with_rounded_inv_freq_gives_a_warning(tiny, caplog):
    model = copy.deepcopy(tiny[0]).to(torch.bfloat16)
    ropepatch.perplexity(model, tiny[1], ["the fox"])
    assert (
        "inv_freq is rounded to bfloat16, 0.046 radians off at 256 tokens"
        in caplog.text
    )
    rotary, before = model.model.rotary_emb, model.dtype
    ropepatch.diagnose(model, repair=True)
    assert (rotary.inv_freq.dtype, model.dtype) == (torch.float32, before)
    assert "inv_freq" not in model.state_dict()


class Shard(torch.Tensor):
    """Like a DTensor of which this process has only a part."""

    placements = (type("Shard", (), {"is_replicate": lambda self: False})(),)


def test_tables_that_cannot_be_compared_are_mentioned_and_give_no_finding():
    model = made()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4].as_subclass(
        Shard
    )
    found = ropepatch.diagnose(model)
    assert not found.findings
    assert "not inv_freq, of which this process holds no whole copy" in str(found)
    model = made()
    model.model.rotary_emb.__class__ = type(
        "Own", (type(model.model.rotary_emb),), {"__init__": lambda s: None}
    )
    found = ropepatch.diagnose(model)
    assert not found.findings
    assert "not compared" in str(found)


def test_repair_in_memory_requires_a_loaded_model():
    with pytest.raises(RopepatchError, match="`repair` needs a loaded model, got tiny"):
        ropepatch.diagnose("tiny", repair=True)
