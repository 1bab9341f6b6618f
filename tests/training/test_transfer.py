"""The adaptation of a base is put onto its sibling: what comes out, and what is refused."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_json
from run_recipes import record_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.model.source import TINY
from ropepatch.publishing.card.writing import write_card
from ropepatch.training.transfer import transfer

ROPE = {"rope_type": "default", "rope_theta": 5e5}
WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tales(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "tales.txt"
    file.write_text("Ann went to the garden. She found a red ball there. " * 200)
    return file


@pytest.fixture
def both(adapted, adapter):
    return {"merged": adapted, "adapter": adapter}


def sibling(folder, **changes):
    """A copy of tiny with a chat template whose weights were fine-tuned, and other keys in its config."""
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / WEIGHTS)
    noise = torch.Generator().manual_seed(1)
    tuned = {n: w + 0.01 * torch.randn(w.shape, generator=noise).to(w.dtype) for n, w in tensors.items()}
    save_file(tuned, folder / WEIGHTS, {"format": "pt"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    return sibling(tmp_path_factory.mktemp("sibling") / "tuned")


@pytest.fixture(scope="module", params=["adapted", "adapter"])
def onto(request, tuned, tales, tmp_path_factory):
    """What was trained, merged or apart, and the sibling with it."""
    trained = request.getfixturevalue(request.param)
    out = tmp_path_factory.mktemp("onto") / "out"
    return trained, transfer(trained, "tiny", tuned, out, text=tales, max_short_loss_increase=0.9)


def test_put_onto_its_own_base_it_is_the_adapted_model(adapted, tales, tmp_path):
    done = transfer(adapted, "tiny", "tiny", tmp_path / "out", text=tales)
    before, after = load_file(adapted / WEIGHTS), load_file(done.folder / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_weight_is_the_siblings_plus_what_the_adaptation_changed(onto, tuned):
    trained, done = onto
    base, own, now = (load_file(folder / WEIGHTS) for folder in (TINY, tuned, done.folder))
    if (trained / WEIGHTS).exists():
        change = {
            n: w.double().numpy() - base[n].double().numpy() for n, w in load_file(trained / WEIGHTS).items()
        }
    else:
        change = adapter_change(trained)
    changed = {name for name, difference in change.items() if np.abs(difference).max() > 0}
    assert QUERY in changed
    assert "model.layers.0.mlp.up_proj.weight" in own.keys() - changed
    for name, weight in own.items():
        expected = torch.from_numpy(weight.double().numpy() + change.get(name, 0.0)).to(weight.dtype)
        assert torch.allclose(now[name].double(), expected.double(), rtol=2**-8, atol=1e-7), name
        assert name in changed or torch.equal(now[name], weight), name
    assert not torch.equal(now[QUERY], own[QUERY])


def adapter_change(folder):
    """B A alpha / r of every matrix, and the difference of every norm, from the adapter's own file."""
    config = json.loads((folder / "adapter_config.json").read_text())
    base, found, change = load_file(TINY / WEIGHTS), load_file(folder / "adapter_model.safetensors"), {}
    for name, tensor in found.items():
        plain = name.removeprefix("base_model.model.")
        if ".lora_A." in name:
            other = found[name.replace("lora_A", "lora_B")].double().numpy()
            scale = config["lora_alpha"] / config["r"]
            change[plain.replace(".lora_A", "")] = scale * other @ tensor.double().numpy()
        elif ".lora_B." not in name:
            change[plain] = tensor.double().numpy() - base[plain].double().numpy()
    return change


def test_stock_transformers_loads_it_at_the_target_with_the_siblings_chat_template(onto, tuned):
    trained, done = onto
    model = AutoModelForCausalLM.from_pretrained(done.folder)
    assert model.config.max_position_embeddings == 512
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert AutoTokenizer.from_pretrained(done.folder).chat_template == TEMPLATE
    record = record_of(done.folder)
    assert record["model"] == str(tuned)
    assert record["verified"]["logits"] == "equal"
    assert record["transfer"]["base"] == "tiny"
    assert record["transfer"]["target_loss"] == done.target_loss
    assert record["adaptation"]["steps"] == record_of(trained)["adaptation"]["steps"]
    write_card(done.folder)
    card = (done.folder / "README.md").read_text()
    assert "with what tiny learned in training for 6 steps" in card
    assert "arXiv:2212.04089" in card


def test_a_loss_that_rose_too_far_fails_the_check_and_is_on_record(onto, tuned, tales, tmp_path):
    trained, done = onto
    failed = transfer(trained, "tiny", tuned, tmp_path / "out", text=tales, max_short_loss_increase=0.0).gate
    assert done.gate.passed
    assert failed.increase == done.gate.increase > 0
    assert not failed.passed
    assert record_of(tmp_path / "out")["adaptation"]["gate"]["passed"] is False


def other_tokenizer(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    Tokenizer.from_file(str(file))


def deeper(folder):
    config = AutoModelForCausalLM.from_pretrained(folder).config
    config.num_hidden_layers += 1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


REFUSED = {
    "other shapes": (None, {"vocab_size": 1000}, "no sibling of|not those of|shape"),
    "more layers": (deeper, {}, r"no sibling of tiny: 9 of its tensors .* expected none"),
    "other tokens": (other_tokenizer, {}, "its tokenizer has '"),
    "another rope": (None, {"rope_theta": 5e5, "rope_parameters": ROPE}, "another rope"),
    "another window": (None, {"max_position_embeddings": 320}, "320 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_sibling_is_refused_and_nothing_is_written(case, adapted, tales, tmp_path):
    change, keys, message = REFUSED[case]
    tuned = sibling(tmp_path / "tuned", **keys)
    if change:
        change(tuned)
    with pytest.raises(RopepatchError, match=message):
        transfer(adapted, "tiny", tuned, tmp_path / "out", text=tales)
    assert not (tmp_path / "out").exists()


def with_link(folder, outside):
    outside.write_text('{"mine": 1}')
    (folder / "adaptation" / "history.json").unlink()
    (folder / "adaptation" / "history.json").symlink_to(outside)


def with_tensors(folder, keep=lambda name: True, name=WEIGHTS, times=1.0):
    tensors = {key: times * tensor for key, tensor in load_file(folder / name).items() if keep(key)}
    save_file(tensors, folder / name, {"format": "pt"})


def of_another_model(folder, layers):
    config = AutoModelForCausalLM.from_pretrained(folder).config
    config.num_hidden_layers = layers
    if layers > 3:
        config.intermediate_size *= 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    edit_json(folder / "ropepatch.json", drop=("checksums",))


LORA = "adapter_model.safetensors"
DAMAGED = {
    "a link": ("merged", lambda folder: with_link(folder, folder.parent / "mine"), "leads out of"),
    "other weights": ("merged", lambda folder: with_tensors(folder, times=1.5), "have changed since"),
    "a layer fewer": ("merged", lambda folder: of_another_model(folder, 1), "other shapes"),
    "another model": ("merged", lambda folder: of_another_model(folder, 4), "other shapes"),
    "no LoRA": ("adapter", lambda folder: with_tensors(folder, lambda n: "lora" not in n, LORA), "lacks "),
    "half": ("adapter", lambda folder: with_tensors(folder, lambda n: "q_proj" not in n, LORA), "lacks "),
    "its weights": ("adapter", lambda folder: (folder / LORA).unlink(), LORA),
    "junk": ("adapter", lambda folder: (folder / LORA).write_bytes(b"junk"), LORA),
    "IA3": ("adapter", {"peft_type": "IA3"}, "of type 'IA3'"),
    "another rank": ("adapter", {"r": 8}, "cannot put the adapter"),
    "no modules": ("adapter", {"target_modules": ["nope"]}, "cannot put the adapter"),
    "a bad expression": ("adapter", {"target_modules": "("}, "cannot put the adapter"),
    "ranks": ("adapter", {"rank_pattern": None}, "cannot put the adapter"),
    "a revision": (
        "adapter",
        lambda folder: edit_json(folder / "ropepatch.json", parameters={"revision": "x"}),
        "parameter 'revision'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_adaptation_is_refused_and_nothing_is_written(case, both, tales, tmp_path):
    kind, damage, message = DAMAGED[case]
    folder = shutil.copytree(both[kind], tmp_path / "adapted")
    if isinstance(damage, dict):
        edit_json(folder / "adapter_config.json", **damage)
    else:
        damage(folder)
    with pytest.raises(RopepatchError, match=re.escape(message)):
        transfer(folder, "tiny", "tiny", tmp_path / "out", text=tales)
    assert not (tmp_path / "out").exists()


def test_another_base_than_it_was_adapted_from_is_refused(adapted, tales, tmp_path):
    with pytest.raises(RopepatchError, match="other weights than the adapter was trained on"):
        transfer(adapted, sibling(tmp_path / "tuned"), "tiny", tmp_path / "out", text=tales)


def test_what_was_extended_without_training_has_nothing_to_transfer(tales, tmp_path):
    free = ropepatch.extend("tiny", tmp_path / "free", to=512)
    with pytest.raises(RopepatchError, match="without training") as refused:
        transfer(free.folder, "tiny", "tiny", tmp_path / "out", text=tales)
    assert "ropepatch extend tiny --to 512 --method yarn" in refused.value.hint
