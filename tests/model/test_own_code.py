"""Custom code: measured in memory; written if its classes are registered."""

import builtins
import sys

import pytest
import torch
from checkpoint_folders import edit_json
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import ropepatch
from ropepatch.errors import RopepatchError

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class MineConfig(LlamaConfig):
    model_type = "mine"
class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


class OwnConfig(LlamaConfig):
    """A user's configuration of an architecture that transformers does not have."""

    model_type = "own"


class OwnModel(LlamaForCausalLM):
    """A user's model with its own configuration class."""

    config_class = OwnConfig


def loaded_with_trust(folder, monkeypatch):
    (folder / "mine.py").write_text(CODE)
    names = {
        "AutoConfig": "mine.MineConfig",
        "AutoModelForCausalLM": "mine.MineForCausalLM",
    }
    edit_json(folder / "config.json", model_type="mine", auto_map=names)
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE",
        str(folder.parent / "modules"),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    return model


KINDS = {
    "remote code": loaded_with_trust,
    "a user's classes": lambda folder, _: OwnModel.from_pretrained(
        folder, config=OwnConfig.from_pretrained(folder)
    ),
}


@pytest.mark.filterwarnings("ignore:You are using a model of type")
@pytest.mark.parametrize("kind", KINDS)
def test_custom_code_is_measured_as_stock_and_not_written(
    kind, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", None)  # no prompt whether code may run
    monkeypatch.setattr(builtins, "input", lambda *prompt: pytest.fail("prompted"))
    stock, tokenizer = tiny
    stock.save_pretrained(tmp_path / "own")
    model = KINDS[kind](tmp_path / "own", monkeypatch).eval()
    planned = ropepatch.plan(model, to=512)
    assert planned.changes == ropepatch.plan(stock, to=512).changes
    measured = []
    for one in (model, stock):
        with ropepatch.patch(one, "yarn", to=512), torch.no_grad():
            keys = ropepatch.passkey(one, tokenizer, lengths=[300], haystacks=1)
            curve = ropepatch.perplexity(one, None, [list(range(400))])
            measured.append((keys, curve.nll[0].tolist()))
    assert measured[0] == measured[1]
    with pytest.raises(RopepatchError, match="has code of its own"):
        ropepatch.extend(planned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_registered_type_is_extended_as_stock(tiny, tmp_path, monkeypatch):
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    AutoConfig.register("own", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnModel)
    own = tmp_path / "own"
    tiny[0].save_pretrained(own)
    edit_json(own / "config.json", model_type="own", architectures=["OwnModel"])
    extension = ropepatch.extend(own, tmp_path / "out", to=512)
    assert extension.record["verified"]["logits"] == "equal"
    with pytest.raises(RopepatchError, match="has code of its own"):
        ropepatch.extend(own, tmp_path / "mapped", to=512, method="rerope")
