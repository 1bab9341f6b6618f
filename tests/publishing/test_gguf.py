"""GGUF files: what is in them, and what llama.cpp computes from them where it is installed."""

import errno
import json
import math
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from checkpoint_folders import edit_json, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from methods import example
from records import RECORDS
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.files import read_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import load_tokenizer
from ropepatch.model.source import TINY
from ropepatch.publishing import gguf as exporter
from ropepatch.publishing.gguf import export_gguf
from ropepatch.publishing.gguf_tokenizer import read_vocabulary

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

NO_LLAMA_CPP = "llama-cpp-python is not installed"


def scaled(source: Path, folder: Path, method: str, target: int, **parameters: Any) -> Path:
    """A copy of a checkpoint with the configuration that `extend` writes."""
    shutil.copytree(source, folder)
    plan = ropepatch.plan(source, to=target, method=method, **parameters)
    (folder / "config.json").write_text(json.dumps(plan.apply(read_json(source / "config.json"))))
    return folder


class Read:
    """A GGUF file, read back."""

    def __init__(self, file: Path) -> None:
        reader = gguf.GGUFReader(file)
        self.keys = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def values(self, name: str) -> np.ndarray:
        """Rows first, as in a checkpoint; BF16 as float32."""
        tensor = self.tensors[name]
        data = tensor.data
        if tensor.tensor_type.name == "BF16":
            data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.reshape([int(n) for n in reversed(tensor.shape)])


def tensors_of(source: Path) -> list[Any]:
    return exporter.read_tensors(Checkpoint(source), exporter.check_architecture(Checkpoint(source)))


def exported(source: Path | str, folder: Path) -> Read:
    return Read(export_gguf(source, folder / "out.gguf").file)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped queries, heads of 16 in a hidden size of 32 for 4 of them, biases, an output of its own."""
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    folder = write_checkpoint(tmp_path_factory.mktemp("small") / "small", **fields)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():  # biases and norms are constants at first
        if weight.ndim == 1:
            weights[name] = weight + 0.3 * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# Tensors


def test_of_many_files_rows_of_a_rotary_pair_stand_together_and_other_tensors_are_as_they_were(
    small, tmp_path
):
    shards = tmp_path / "shards"
    LlamaForCausalLM.from_pretrained(small).save_pretrained(shards, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    read = exported(shards, tmp_path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in load_file(small / "model.safetensors").items():
        written = read.values(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if ".q_proj." in name or ".k_proj." in name:
            for head in range(len(tensor) // 16):
                for pair in range(8):
                    first, second = tensor[16 * head + pair], tensor[16 * head + pair + 8]
                    assert np.array_equal(written[16 * head + 2 * pair], first)
                    assert np.array_equal(written[16 * head + 2 * pair + 1], second)
        else:
            assert np.array_equal(written, tensor)
    assert len(read.tensors) == len(load_file(small / "model.safetensors"))


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32")])
def test_matrices_keep_their_dtype_to_the_bit_and_vectors_become_float32(small, tmp_path, dtype, kind):
    copy = shutil.copytree(small, tmp_path / "copy")
    weights = {name: t.to(getattr(torch, dtype)) for name, t in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    read = exported(copy, tmp_path)
    for name, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.1.ffn_down.bias": "model.layers.1.mlp.down_proj.bias",
    }.items():
        assert np.array_equal(read.values(name), weights[ours].float())
    kinds = {name: tensor.tensor_type.name for name, tensor in read.tensors.items()}
    vectors = {name for name, tensor in read.tensors.items() if len(tensor.shape) == 1}
    assert {kinds[name] for name in vectors} == {"F32"}
    assert {kinds[name] for name in kinds.keys() - vectors} == {kind}


def test_tied_embeddings_are_written_once_and_a_stored_head_as_transformers_loads_it(tmp_path):
    source = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    assert "output.weight" not in exported(source, tmp_path).tensors
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(48, 32)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    again = Read(export_gguf(source, tmp_path / "again.gguf").file)
    head = LlamaForCausalLM.from_pretrained(source).lm_head.weight
    assert np.array_equal(again.values("output.weight"), head.detach().numpy())
    assert not head.any()


def test_the_context_is_what_the_rope_reads_also_where_the_window_was_left_behind(tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    source = write_checkpoint(tmp_path / "source", rope_parameters=yarn)  # as Qwen documents it
    made = export_gguf(source, tmp_path / "made.gguf")
    assert made.context_length == 256
    assert Read(made.file).keys["llama.context_length"] == 256


def test_no_more_than_a_few_tensors_are_in_memory(tmp_path):
    source = write_checkpoint(tmp_path / "deep", num_hidden_layers=24, hidden_size=64, intermediate_size=512)
    sizes = [t.numel() * 4 for t in load_file(source / "model.safetensors").values()]
    tensors_of(source)  # what is imported and cached at first does not count
    found = tensors_of(source)
    tracemalloc.start()
    for tensor in found:
        tensor.read().tobytes()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * max(sizes) < sum(sizes) / 4


# The rope


@pytest.mark.parametrize("method", ["ntk", "linear", "llama3", "yarn", "longrope", "p-rope"])
def test_the_divisors_and_the_factor_are_those_that_stock_transformers_computes(method, tmp_path, small):
    folder = scaled(small, tmp_path / "scaled", method, 256, **example(method, 8).parameters())
    config = AutoConfig.from_pretrained(folder)
    stock = LlamaRotaryEmbedding(config)
    base = config.rope_parameters["rope_theta"]
    read = exported(folder, tmp_path)
    assert read.keys["llama.rope.freq_base"] == np.float32(base)
    plain = [base ** (-2 * i / 16) for i in range(8)]
    if config.rope_parameters["rope_type"] == "default":
        assert "rope_freqs.weight" not in read.tensors
        assert not any("rope.scaling" in key for key in read.keys)
        assert [*stock.inv_freq.tolist()] == pytest.approx(plain, rel=1e-6)
        return
    divisors = read.values("rope_freqs.weight")
    assert divisors.dtype == np.float32
    for theta, divisor, frequency in zip(plain, divisors, stock.inv_freq.tolist(), strict=True):
        if frequency == 0:
            assert math.cos(theta / float(divisor) * 1e9) == 1
        else:
            assert theta / float(divisor) == pytest.approx(frequency, rel=3e-7)
    assert read.keys["llama.rope.scaling.attn_factor"] == np.float32(stock.attention_scaling)
    assert read.keys["llama.rope.scaling.type"] == "none"


@pytest.mark.skipif("proportional" not in ROPE_INIT_FUNCTIONS, reason="transformers has no proportional rope")
def test_a_pair_that_does_not_rotate_is_divided_away(small, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    edit_json(
        copy / "config.json", **other_rope(rope_type="proportional", partial_rotary_factor=0.5, factor=1)
    )
    assert LlamaRotaryEmbedding(AutoConfig.from_pretrained(copy)).inv_freq[4:].tolist() == [0] * 4
    divisors = exported(copy, tmp_path).values("rope_freqs.weight")
    assert divisors[:4].tolist() == pytest.approx([1] * 4)
    assert divisors[4:].tolist() == [np.float32(1e30)] * 4


def test_what_the_model_is_and_the_licence_of_its_base_stand_in_the_keys(small, tmp_path):
    folder = scaled(small, tmp_path / "my-model", "yarn", 256)
    base = {"license": "other", "license_name": "llama3.1", "license_link": "LICENSE", "language": ["en"]}
    (folder / "ropepatch.json").write_text(json.dumps(RECORDS["extended"] | {"base": base}))
    keys = exported(folder, tmp_path).keys
    assert {name.removeprefix("llama."): keys[name] for name in keys if name.startswith("llama.")} == {
        "vocab_size": 48,
        "context_length": 256,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": np.float32(1e-6),
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "none",
        "rope.scaling.attn_factor": np.float32(0.1 * math.log(4) + 1),
    }
    assert keys["general.architecture"] == "llama"
    assert keys["general.name"] == "my-model"
    licence = {key: value for key, value in keys.items() if key.startswith("general.license")}
    assert [*licence.values()] == ["other", "llama3.1", "LICENSE"]
    assert [*licence] == ["general.license", "general.license.name", "general.license.link"]


# What llama.cpp's LLaMA cannot hold


def other_rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0, **parameters}}


LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
REFUSED = {
    "dynamic": (other_rope(rope_type="dynamic"), r"\(dynamic\) .* a GGUF file holds one table"),
    "switching": (other_rope(rope_type="longrope", **LISTS), r"\(longrope\) .* a GGUF file holds one table"),
    "part of a head": (other_rope(rope_type="linear", partial_rotary_factor=0.5), "rotates 8 of 16"),
    "attention map": ({"model_type": "llama-attention-map"}, "cannot hold an attention map, and .* has one"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is gelu"),
    "architecture": ({"model_type": "granite"}, "granite"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    "window": ({"model_type": "mistral", "sliding_window": 32}, "sliding-window"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_would_run_otherwise_is_refused_and_nothing_is_written(change, words, small, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    edit_json(copy / "config.json", **change)
    with pytest.raises(RopepatchError, match=words) as caught:
        export_gguf(copy, tmp_path / "out.gguf")
    assert caught.value.hint
    assert words != "granite" or "convert_hf_to_gguf.py" in caught.value.hint
    assert tuple(exporter.fits_gguf(Checkpoint(one)) for one in (small, copy)) == (True, False)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_an_architecture_that_has_other_tensors_is_refused_whatever_its_name(small, tmp_path, monkeypatch):
    copy = shutil.copytree(small, tmp_path / "copy")
    edit_json(copy / "config.json", model_type="qwen3")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(copy))
    model.save_pretrained(copy)
    monkeypatch.setattr(
        exporter, "IN_LLAMA_CPP", replace(exporter.IN_LLAMA_CPP, model_types=frozenset({"qwen3"}))
    )
    with pytest.raises(
        RopepatchError, match=r"it has a tensor model\.layers\.0\.self_attn\.[qk]_norm\.weight"
    ):
        export_gguf(copy, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("change", "words", "advice"),
    [
        (lambda name, t: (name, t[:1]), r"the weights are not those of config\.json", ""),
        (lambda name, t: (name.removeprefix("model."), t), "the weights have no model", "save_pretrained"),
        (lambda name, t: (name, t.double()), "F64, expected one of F32, F16, BF16", "before it was"),
    ],
    ids=["of another shape", "under other names", "in float64"],
)
def test_weights_that_do_not_fit_are_refused_with_advice(change, words, advice, small, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    weights = dict(change(name, t) for name, t in load_file(copy / "model.safetensors").items())
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RopepatchError, match=words) as caught:
        export_gguf(copy, tmp_path / "out.gguf")
    assert advice in str(caught.value.hint)


# Whole or not at all


def test_weights_that_are_shortened_while_they_are_read_are_one_line_and_leave_nothing(small, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    weights = copy / "model.safetensors"

    def shorten(done: int, total: int) -> None:
        with weights.open("r+b") as opened:
            opened.truncate(weights.stat().st_size // 2)

    with pytest.raises(RopepatchError, match=r"model\.safetensors was shortened while it was read"):
        export_gguf(copy, tmp_path / "out.gguf", progress=shorten)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(small, tmp_path, monkeypatch):
    (tmp_path / "mine.gguf").write_text("mine")
    with pytest.raises(RopepatchError, match="already exists"):
        export_gguf(small, tmp_path / "mine.gguf")
    with pytest.raises(RopepatchError, match="No such file") as caught:
        export_gguf(small, tmp_path / "no" / "out.gguf")
    assert "make the folder" in str(caught.value.hint)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(RopepatchError, match="kB free"):
        export_gguf(small, tmp_path / "out.gguf")
    monkeypatch.undo()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_gguf(small, tmp_path / "out.gguf", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.gguf"]
    assert (tmp_path / "mine.gguf").read_text() == "mine"


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), OSError("8 requested and 3 written")])
def test_a_full_disk_is_one_line_and_leaves_nothing(fault, small, tmp_path, monkeypatch):
    write, calls = gguf.GGUFWriter.write_tensor_data, []

    def fail(self: Any, tensor: np.ndarray) -> None:
        calls.append(tensor)
        if len(calls) == 5:
            raise fault
        write(self, tensor)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    with pytest.raises(RopepatchError, match=r"cannot write .*out\.gguf: (not all of it fits|No space left)"):
        export_gguf(small, tmp_path / "out.gguf")
    assert not [*tmp_path.iterdir()]


def lose(write: Any, *arguments: Any) -> None:
    """What should be written is not."""


def rename(write: Any, writer: Any, name: str, *rest: Any) -> None:
    write(writer, name.replace("blk.1.attn_v", "blk.1.attn_x"), *rest)


def zero(write: Any, writer: Any, tensor: np.ndarray) -> None:
    write(writer, np.zeros_like(tensor))


@pytest.mark.parametrize(
    ("method", "damage"),
    [
        ("add_float32", lose),  # the attention factor
        ("add_context_length", lose),
        ("add_tokenizer_model", lose),
        ("add_tensor_info", rename),
        ("write_tensor_data", zero),  # the frequencies
    ],
)
def test_what_is_damaged_on_the_way_is_found_when_the_file_is_read_back(
    method, damage, small, tmp_path, monkeypatch
):
    folder = scaled(small, tmp_path / "scaled", "yarn", 256)
    write = getattr(gguf.GGUFWriter, method)
    monkeypatch.setattr(gguf.GGUFWriter, method, lambda *arguments: damage(write, *arguments))
    with pytest.raises(RopepatchError, match="read back"):
        export_gguf(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


# Tokenizers

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = [*"▁abc"]
SPM_TOKENS = [*SPECIAL, *BYTES, *LETTERS, "ab", "▁a", "▁ab", "▁▁", "abc"]
SPM_MERGES = [("a", "b"), ("▁", "a"), ("▁a", "b"), ("▁", "ab"), ("▁", "▁"), ("ab", "c")]


def sentencepiece(
    *,
    tokens: list[str] = SPM_TOKENS,
    merges: list[tuple[str, str]] = SPM_MERGES,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    template: str = "<s> $A",
) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if pre_tokenizer is None:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        raw.normalizer = normalizer or normalizers.Sequence(steps)
    else:
        raw.pre_tokenizer = pre_tokenizer
    pairs = [(token, vocabulary[token]) for token in SPECIAL]
    raw.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
    raw.add_special_tokens(SPECIAL)
    return raw


def saved(raw: Tokenizer, folder: Path, **more: Any) -> Path:
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **(special | more)).save_pretrained(folder)
    return folder


def metaspace(scheme: str, *, split: bool = False) -> Any:
    return pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=split)


def test_the_vocabulary_of_a_sentencepiece_tokenizer_is_written_as_it_is(tmp_path):
    source = write_checkpoint(tmp_path / "model", vocab_size=len(SPM_TOKENS) + 2)
    saved(sentencepiece(), source, pad_token="</s>", chat_template="{{ messages }}")
    keys = exported(source, tmp_path).keys
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.tokens"] == [*SPM_TOKENS, "[PAD268]", "[PAD269]"]
    kinds = [gguf.TokenType(kind).name for kind in keys["tokenizer.ggml.token_type"]]
    assert kinds == [*("UNKNOWN", "CONTROL", "CONTROL"), *["BYTE"] * 256, *["NORMAL"] * 9, *["UNUSED"] * 2]
    ids = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos", "padding")}
    assert ids == {"unknown": 0, "bos": 1, "eos": 2, "padding": 2}
    flags = ("add_bos_token", "add_eos_token", "add_space_prefix")
    assert [keys[f"tokenizer.ggml.{flag}"] for flag in flags] == [True, False, True]
    scores = dict(zip(SPM_TOKENS, keys["tokenizer.ggml.scores"], strict=False))
    assert scores["ab"] > scores["▁a"] > scores["▁ab"] > scores["▁▁"] > scores["abc"] > scores["b"]


def test_the_vocabulary_of_a_byte_level_tokenizer_is_written_as_it_is(tmp_path, tiny):
    keys = exported("tiny", tmp_path).keys
    stated = read_json(TINY / "tokenizer.json")["model"]
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == "qwen2"
    assert keys["tokenizer.ggml.tokens"] == sorted(stated["vocab"], key=stated["vocab"].get)
    assert keys["tokenizer.ggml.merges"] == [f"{left} {right}" for left, right in stated["merges"]]
    assert keys["tokenizer.ggml.token_type"] == [3, 3, *[1] * 1022]
    assert keys["tokenizer.ggml.bos_token_id"] == tiny[1].bos_token_id
    assert keys["tokenizer.ggml.eos_token_id"] == tiny[1].eos_token_id
    assert [keys[f"tokenizer.ggml.add_{name}_token"] for name in ("bos", "eos")] == [True, False]


RUNS = ["▁▁", "▁▁▁", "▁▁▁▁"]
RUN_TOKENS = [*SPECIAL, *BYTES, *LETTERS, *RUNS]
RUN_MERGES = [(run[:cut], run[cut:]) for run in RUNS for cut in range(1, len(run))]


# `abcd` is cut into a|bcd by this list, and into abc|d if both merges into abc come before bcd.
MIXED = [("ab", "c"), ("b", "c"), ("bc", "d"), ("a", "b"), ("a", "bc")]
MIXED_TOKENS = [*SPECIAL, *BYTES, *LETTERS, "d", "ab", "bc", "abc", "bcd"]


def byte_level(
    steps: list[Any], merges: tuple[tuple[str, str], ...] = (("a", "b"),), **model: Any
) -> Tokenizer:
    """A byte-level tokenizer with the word `abab`, which no merge makes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet, "ab", "abab", "Ġab", "11"])}
    raw = Tokenizer(models.BPE(vocabulary, list(merges), **model))
    raw.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    raw.add_special_tokens(SPECIAL)
    return raw


def cut(pattern: str) -> list[Any]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


GPT_2 = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
DIGITS = pre_tokenizers.Digits(individual_digits=True)
LLAMA_3, QWEN_2 = (  # as in the tokenizer.json of Llama 3 and of Qwen2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
MERGES = (("a", "b"), ("Ġ", "ab"), ("1", "1"))
BYTE_LEVEL = {
    "gpt-2": byte_level(GPT_2, merges=MERGES),
    "smollm": byte_level([DIGITS, *GPT_2], merges=MERGES),
    "llama-bpe": byte_level(cut(LLAMA_3), merges=MERGES, ignore_merges=True),
    "smaug-bpe": byte_level(cut(LLAMA_3), merges=MERGES),
    "qwen2": byte_level(cut(QWEN_2), merges=MERGES),
}


@pytest.mark.parametrize(("name", "raw"), BYTE_LEVEL.items(), ids=BYTE_LEVEL)
def test_a_byte_level_tokenizer_is_known_by_its_pre_tokenizer(name, raw, tmp_path):
    vocabulary = read_vocabulary(saved(raw, tmp_path), 263)
    assert (vocabulary.model, vocabulary.pre, vocabulary.notes) == ("gpt2", name, ())


def normalised(raw: Tokenizer, normalizer: Any) -> Tokenizer:
    raw.normalizer = normalizer
    return raw


def test_a_normalisation_that_llama_cpp_does_not_make_is_named(tmp_path):
    vocabulary = read_vocabulary(saved(normalised(byte_level(GPT_2), normalizers.NFC()), tmp_path), 263)
    assert (vocabulary.model, len(vocabulary.notes)) == ("gpt2", 1)
    assert "NFC" in vocabulary.notes[0]


OTHERS: dict[str, tuple[Tokenizer, str]] = {
    "missing merge": (sentencepiece(merges=SPM_MERGES[:2] + SPM_MERGES[3:]), "all the ways"),
    "other order": (sentencepiece(tokens=MIXED_TOKENS, merges=MIXED), "another order"),
    "twice": (sentencepiece(tokens=[*SPM_TOKENS, "[PAD280]"]), "the same text"),
    "split at all spaces": (sentencepiece(pre_tokenizer=metaspace("never", split=True)), "no SentencePiece"),
    "character": (sentencepiece(tokens=[*SPM_TOKENS, "aé"]), "all the ways"),
    "split": (sentencepiece(pre_tokenizer=metaspace("always", split=True)), "no SentencePiece"),
    "lower case": (sentencepiece(normalizer=normalizers.Lowercase()), "no SentencePiece"),
    "template": (sentencepiece(template="</s> $A"), "around a text"),
    "no bytes": (sentencepiece(tokens=[t for t in SPM_TOKENS if t != "<0x41>"]), "255 of the 256"),
    "words": (Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>")), "WordLevel"),
    "numbers": (byte_level([pre_tokenizers.Digits(individual_digits=False), *GPT_2]), "pre-tokenizer"),
    "spaces": (byte_level([pre_tokenizers.ByteLevel(add_prefix_space=True)]), "pre-tokenizer"),
    "skipped merges": (byte_level(GPT_2, ignore_merges=True), "pre-tokenizer"),
    "small letters": (normalised(byte_level(GPT_2), normalizers.Lowercase()), "does not normalise"),
    "drop-out": (byte_level(GPT_2, dropout=0.1), "a BPE tokenizer of a form"),
    "no merges": (byte_level(GPT_2, merges=()), "no merges"),
}


@pytest.mark.parametrize(("raw", "reason"), OTHERS.values(), ids=OTHERS)
def test_a_tokenizer_that_llama_cpp_would_apply_otherwise_is_left_out_with_the_reason(raw, reason, tmp_path):
    vocabulary = read_vocabulary(saved(raw, tmp_path), 300)
    assert vocabulary.model == "no_vocab"
    (note,) = vocabulary.notes
    assert reason in note
    assert "token ids only" in note


@pytest.mark.parametrize("longest_first", [False, True])
def test_runs_of_spaces_are_cut_alike_whatever_the_order_of_their_merges(longest_first, tmp_path):
    merges = sorted(RUN_MERGES, key=lambda pair: (len(pair[0]), len(pair[1])), reverse=longest_first)
    vocabulary = read_vocabulary(saved(sentencepiece(tokens=RUN_TOKENS, merges=merges), tmp_path), 300)
    assert (vocabulary.model, vocabulary.notes) == ("llama", ())


@pytest.mark.parametrize(("scheme", "prefix"), [("first", True), ("always", True), ("never", False)])
def test_the_space_before_a_text_is_that_of_metaspace(scheme, prefix, tmp_path):
    vocabulary = read_vocabulary(saved(sentencepiece(pre_tokenizer=metaspace(scheme)), tmp_path), 268)
    assert vocabulary.flags["add_space_prefix"] is prefix
    assert len(vocabulary.notes) == prefix


@pytest.mark.parametrize(("template", "flags"), [("$A </s>", (False, True)), ("$A", (False, False))])
def test_the_tokens_around_a_text_are_those_of_the_tokenizer(template, flags, tmp_path):
    vocabulary = read_vocabulary(saved(sentencepiece(template=template), tmp_path), 268)
    assert (vocabulary.flags["add_bos_token"], vocabulary.flags["add_eos_token"]) == flags


def test_a_token_beyond_the_embedding_is_left_out_and_named(tmp_path):
    raw = sentencepiece()
    raw.add_special_tokens(["[PAD]"])
    vocabulary = read_vocabulary(saved(raw, tmp_path, pad_token="[PAD]"), 268)
    assert len(vocabulary.tokens) == 268
    assert "pad" not in vocabulary.special
    assert "left out [PAD]" in vocabulary.notes[0]
    vocabulary = read_vocabulary(saved(sentencepiece(), tmp_path), 267)
    assert vocabulary.model == "no_vocab"
    assert "268 tokens, the embedding 267 rows" in vocabulary.notes[0]


def test_an_added_word_is_no_control_token_and_spaces_that_an_added_token_swallows_are_named(tmp_path):
    raw = sentencepiece()
    raw.add_tokens(["cab"])
    raw.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    vocabulary = read_vocabulary(saved(raw, tmp_path), 270)
    assert gguf.TokenType(vocabulary.types[vocabulary.tokens.index("cab")]).name == "USER_DEFINED"
    (note,) = vocabulary.notes
    assert "llama.cpp keeps spaces around special tokens" in note


def test_a_checkpoint_without_a_tokenizer_has_none_in_the_file_either(tmp_path):
    vocabulary = read_vocabulary(tmp_path, 48)
    assert (vocabulary.model, len(vocabulary.notes)) == ("no_vocab", 1)


# The command


def test_the_command_names_the_file_after_the_model_and_says_what_is_in_it(small, tmp_path, run_here):
    folder = scaled(small, tmp_path / "scaled", "yarn", 256)
    result = run_here("export", folder, "--gguf", cwd=tmp_path)
    assert (tmp_path / "scaled.gguf").exists()
    assert "256 tokens" in result.stdout
    assert "attention factor 1.1386" in result.stdout
    assert "no tokenizer in the file" in result.stderr
    assert "say what to write" in run_here("export", "tiny").stderr
    done, file = run_here("export", "tiny", "--gguf", "--json", cwd=tmp_path), tmp_path / "tiny.gguf"
    written = json.loads(done.stdout)
    assert (written["file"], written["num_bytes"]) == (str(file), file.stat().st_size)
    assert (written["num_tensors"], written["context_length"], written["scaled"]) == (38, 256, False)
    assert (written["attention_factor"], written["tokenizer"], written["notes"]) == (1.0, "gpt2", [])


def test_without_the_package_the_command_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RopepatchError) as caught:
        export_gguf("tiny", tmp_path / "out.gguf")
    assert caught.value.hint == 'pip install "ropepatch[gguf]"'


# What llama.cpp computes

# Of logits up to 30, from float32 weights. Both compute angles in float32, in another order of operations;
# the last bit of an angle of 577 radians is 6e-5.
TOLERANCE = 0.02


def in_llama_cpp(file: Path, ids: list[int]) -> np.ndarray:
    """The logits [T, vocabulary] in float32 throughout, from one thread."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=NO_LLAMA_CPP)
    model = llama_cpp.Llama(
        str(file),
        n_ctx=len(ids),
        n_batch=len(ids),
        logits_all=True,
        type_k=0,
        type_v=0,
        flash_attn=False,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )
    model.eval(ids)
    logits: np.ndarray = model.scores[: len(ids)].copy()
    model.close()
    return logits


@torch.inference_mode()
def in_transformers(folder: Path, ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.tensor([ids])).logits[0].numpy()


def difference(folder: Path, file: Path, ids: list[int]) -> float:
    return float(np.abs(in_llama_cpp(file, ids) - in_transformers(folder, ids)).max())


def tale(tokenizer: Any, length: int) -> list[int]:
    return held_out_tales(tokenizer, length=length, count=1)[0].ids.tolist()


METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("none", "yarn", "linear", "ntk", "ntk-by-parts", "ntk-mixed", "p-rope")},
    "giraffe-truncated": {},
    "custom": {"divisors": tuple(1 + i / 4 for i in range(16)), "attention_factor": 1.4},
}


@pytest.fixture(scope="module")
def tiny_in_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of tiny, which are stored in float16."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("tiny") / "tiny")
    weights = {name: tensor.float() for name, tensor in load_file(TINY / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
def test_llama_cpp_computes_the_logits_of_transformers_at_four_times_the_context(
    method, tmp_path, tiny, tiny_in_float32
):
    pytest.importorskip("llama_cpp", reason=NO_LLAMA_CPP)
    folder = scaled(tiny_in_float32, tmp_path / "scaled", method, 1024, **METHODS[method])
    made = export_gguf(folder, tmp_path / "out.gguf")
    assert difference(folder, made.file, tale(tiny[1], 1024)) < TOLERANCE


def lose_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    read = exporter.read_tensors
    monkeypatch.setattr(exporter, "read_tensors", lambda *given: read(*given)[1:])


def lose_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_float32
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_float32",
        lambda self, key, value: None if key.endswith("attn_factor") else add(self, key, value),
    )


def keep_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "interleaved", lambda rows, heads: rows)


@pytest.mark.sweep
@pytest.mark.parametrize("damage", [lose_frequencies, lose_factor, keep_halves])
def test_the_tolerance_would_show_a_rope_that_is_lost(damage, tmp_path, tiny, tiny_in_float32, monkeypatch):
    pytest.importorskip("llama_cpp", reason=NO_LLAMA_CPP)
    folder = scaled(tiny_in_float32, tmp_path / "scaled", "yarn", 1024)
    monkeypatch.setattr(exporter, "_verify", lambda *args: None)
    damage(monkeypatch)
    made = export_gguf(folder, tmp_path / "out.gguf")
    assert difference(folder, made.file, tale(tiny[1], 1024)) > 100 * TOLERANCE


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_llama_cpp_runs_every_model_type_that_is_exported(model_type, dtype, small, tmp_path):
    pytest.importorskip("llama_cpp", reason=NO_LLAMA_CPP)
    folder = shutil.copytree(small, tmp_path / "model")
    edit_json(folder / "config.json", model_type=model_type, sliding_window=None)
    names = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    stored = load_file(folder / "model.safetensors")  # with biases that not every type has
    weights = {name: stored[name].to(getattr(torch, dtype)) for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    folder = scaled(folder, tmp_path / "scaled", "yarn", 256)
    made = export_gguf(folder, tmp_path / "out.gguf")
    ids = torch.randint(48, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    assert in_transformers(folder, ids).std() > 0.5
    # llama.cpp rounds activations to the 16 bits of the weights they meet.
    tolerance = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.1}[dtype]
    assert difference(folder, made.file, ids) < tolerance


# Tokenisation in llama.cpp

TEXTS = st.text(
    st.one_of(st.sampled_from(" \n\t abcDEF.,'’012—é日😀\u00a0▁<>s/"), st.characters(codec="utf-8")),
    max_size=60,
).filter(lambda text: "\0" not in text)


Both = Callable[[str], tuple[list[int], list[int]]]


def in_both(source: str | Path, folder: Path) -> Both:
    """The ids of a text in transformers and in llama.cpp."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=NO_LLAMA_CPP)
    made = export_gguf(source, folder / "out.gguf")
    model = llama_cpp.Llama(str(made.file), vocab_only=True, verbose=False)
    tokenizer = load_tokenizer(TINY if source == "tiny" else Path(source))

    def both(text: str) -> tuple[list[int], list[int]]:
        return tokenizer(text).input_ids, model.tokenize(text.encode(), add_bos=True, special=True)

    return both


REAL = ["tiny", "babyllama-361", "stories-260k"]


@pytest.fixture(scope="module")
def both_tokenizers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Of a real checkpoint, or of a byte-level tokenizer."""
    name, folder = request.param, tmp_path_factory.mktemp("vocabulary")
    if name in BYTE_LEVEL:
        return in_both(saved(BYTE_LEVEL[name], write_checkpoint(folder / "model", vocab_size=263)), folder)
    return in_both(
        name if name == "tiny" else request.getfixturevalue("shared") / "checkpoints" / name, folder
    )


@pytest.mark.sweep
@pytest.mark.parametrize("both_tokenizers", REAL, indirect=True, scope="module")
def test_llama_cpp_cuts_real_texts_as_the_tokenizer_does(both_tokenizers, shared):
    files = sorted((shared / "texts").glob("*/*.txt"))[::12]
    assert len(files) > 10
    for file in files:
        ours, theirs = both_tokenizers(file.read_text(encoding="utf-8", errors="replace")[:8000])
        assert ours == theirs, file.name


@pytest.mark.sweep
@pytest.mark.parametrize("both_tokenizers", [*REAL, *BYTE_LEVEL], indirect=True, scope="module")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
@hypothesis.example(text="abab abab1111 ab'S it's 1234567\r\n\r\n  abab  !?\n\t x")
def test_llama_cpp_cuts_any_text_as_the_tokenizer_does(both_tokenizers, text):
    ours, theirs = both_tokenizers(text)
    assert ours == theirs


# Perplexity on a real text


@pytest.mark.sweep
def test_llama_cpps_perplexity_on_a_real_text_is_ours(shared, tmp_path):
    pytest.importorskip("llama_cpp", reason=NO_LLAMA_CPP)
    source = shared / "checkpoints" / "babyllama-361"
    folder = scaled(source, tmp_path / "scaled", "yarn", 1024)
    model, tokenizer = ropepatch.load(folder, device="cpu")
    text = (shared / "texts" / "tinystories" / "true_case.txt").read_text(encoding="utf-8")[:20000]
    ids = tokenizer(text, truncation=False, verbose=False).input_ids
    windows = [ids[start : start + 1024] for start in range(0, 4096, 1024)]
    made = export_gguf(folder, tmp_path / "out.gguf")
    theirs = 0.0
    for window in windows:
        logits = torch.from_numpy(in_llama_cpp(made.file, window)).double()
        theirs += torch.nn.functional.cross_entropy(
            logits[:-1], torch.tensor(window[1:]), reduction="sum"
        ).item()
    ours = ropepatch.perplexity(model, None, windows).between(0, 1024)
    assert ours.num_tokens == 4 * 1023
    assert math.exp(theirs / ours.num_tokens) == pytest.approx(ours.value, rel=1e-5)
    plain, _ = ropepatch.load(source, device="cpu")
    assert ropepatch.perplexity(plain, None, windows).between(0, 1024).value > 2 * ours.value
