"""Extended checkpoints: loading them with stock transformers, their files, and errors."""

import errno
import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import (
    PAIRS,
    VOCABULARY,
    WINDOW,
    contents,
    edit_json,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension import verification
from ropepatch.extension import writing as checkpoint_module
from ropepatch.extension.record import stated_by_card
from ropepatch.extension.verification import probe_logits
from ropepatch.files import read_json as read
from ropepatch.model import weights as weights_module
from ropepatch.model.weights import fingerprint, read_headers

TARGET = 256
WEIGHTS = "model.safetensors"


@pytest.fixture
def source(template, tmp_path):
    return Path(shutil.copytree(template, tmp_path / "source"))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def plan(source, method="yarn"):
    return ropepatch.plan(source, to=TARGET, method=method)


def extend(source, out, method="yarn", *, link=False, include=()):
    copy = checkpoint_module.check(
        plan(source, method), out, link=link, include=include
    )
    return copy.write(link=link).path


def logits(model, length=TARGET):
    ids = torch.randint(
        3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def assert_as_patched(source, out, method="yarn", to=TARGET):
    patched = load(source)
    ropepatch.patch(patched, method, to=to)
    assert torch.equal(logits(load(out), to), logits(patched, to))


def left(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


# --- results in stock transformers ---


def test_a_null_head_dim_is_written_as_a_number(tmp_path, out):
    source = tmp_path / "source"
    tiny_model("mixtral").save_pretrained(source)
    edit_json(source / "config.json", head_dim=None)
    assert read(extend(source, out) / "config.json")["head_dim"] == 2 * PAIRS
    assert_as_patched(source, out)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings_need_either_of_their_names(tmp_path, out, stored):
    source = write_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    tensors = load_file(source / WEIGHTS)
    embeddings = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {stored: embeddings}, source / WEIGHTS, {"format": "pt"})
    extend(source, out)
    assert_as_patched(source, out)
    save_file(tensors, source / WEIGHTS, {"format": "pt"})
    with pytest.raises(RopepatchError, match=r"\d missing keys, for instance"):
        extend(source, tmp_path / "none")


def test_a_sharded_checkpoint_keeps_its_shards_and_its_index(shards, out):
    extend(shards, out)
    for file in shards.glob("*.safetensors*"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_as_patched(shards, out)


def test_a_bfloat16_checkpoint_stays_bfloat16_and_reloads_equal(source, out):
    load(source).bfloat16().save_pretrained(source)
    assert verdict(extend(source, out))["logits"] == "equal"
    assert load(out).dtype == torch.bfloat16


def test_an_extended_checkpoint_extends_again_and_records_both(source, out, tmp_path):
    once = extend(source, tmp_path / "once")
    ropepatch.extend(once, out, to=4 * TARGET, method="linear", reading=False)
    assert_as_patched(once, out, "linear", 4 * TARGET)
    assert read(out / "ropepatch.json")["earlier"] == read(once / "ropepatch.json")


# --- contents of the files ---


def test_other_keys_of_config_json_do_not_change(source, out):
    edit_json(source / "config.json", a_stranger="keeps its key")
    extend(source, out)
    before, after = (read(place / "config.json") for place in (source, out))
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    lengths = {"max_position_embeddings", "original_max_position_embeddings"}
    assert changed == lengths | {"rope_parameters", "rope_scaling", "rope_theta"}


def test_tokenizer_and_generation_config_have_the_target_length(source, out):
    extend(source, out)
    assert AutoTokenizer.from_pretrained(out).model_max_length == TARGET
    assert GenerationConfig.from_pretrained(out).max_length == TARGET
    before, after = (read(place / "tokenizer_config.json") for place in (source, out))
    assert before | {"model_max_length": TARGET} == after


def test_another_generation_length_is_kept(source, out):
    stated = {"max_length": 20, "temperature": 0.5, "do_sample": True}
    edit_json(source / "generation_config.json", **stated)
    extend(source, out)
    before, after = (read(place / "generation_config.json") for place in (source, out))
    assert before == after


def test_missing_files_are_not_created(source, out):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).unlink()
    assert left(extend(source, out)) == ["config.json", WEIGHTS, "ropepatch.json"]


STATED = {"license": "llama2", "language": ["en", "de"]}


def test_ropepatch_json_records_the_plan_the_verdict_and_the_versions(source, out):
    card = json.dumps(STATED | {"price": 3})
    (source / "README.md").write_text(f"---\n{card}\n---\n# A card\n")
    made = plan(source)
    ropepatch.extend(made, out)
    record = read(out / "ropepatch.json")
    versions = record.pop("versions")
    assert versions.keys() == {"ropepatch", "transformers", "torch"}
    verdict = {"frequencies": "equal", "logits": "equal"}
    sha256 = hashlib.sha256((out / WEIGHTS).read_bytes()).hexdigest()
    assert record == made.to_dict() | {
        "model": source.name,  # no path of this machine for a folder
        "verified": verdict | {"compared": True, "difference": 0.0},
        "base": STATED,
        "weights": fingerprint(read_headers(out)),
        "checksums": {WEIGHTS: sha256},
        "version": 1,
    }
    config = read(out / "config.json")
    assert config.items() >= record["config_changes"].items()


@pytest.mark.parametrize("card", [b"license: 3", b"- a", b"\xff"])
def test_an_invalid_card_states_nothing(source, card):
    (source / "README.md").write_bytes(b"---\n" + card + b"\n---\n# A card\n")
    assert stated_by_card(source) == {}


# --- the source and the copy of its weights ---


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "ropepatch.json", "README.md", "vocab.txt"]
)
def test_a_link_out_of_the_checkpoint_is_not_followed(source, out, tmp_path, name):
    (tmp_path / "secret.json").write_text('{"auths": "a secret"}')
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "secret.json")
    with pytest.raises(RopepatchError, match="leads out of the checkpoint"):
        extend(source, out)
    assert left(tmp_path) == ["secret.json", "source"]


@pytest.mark.parametrize("link", [False, True])
def test_the_source_is_never_modified(source, out, link, monkeypatch):
    """A link needs no space."""
    usage = shutil.disk_usage(source)._replace(free=0 if link else 1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    before = contents(source), source.stat().st_mtime_ns
    extend(source, out, link=link)
    assert (contents(source), source.stat().st_mtime_ns) == before
    assert (out / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    both = {path.name for path in out.iterdir()} & {*left(source)}
    linked = {name for name in both if (out / name).samefile(source / name)}
    assert linked == ({WEIGHTS} if link else set())


@pytest.mark.parametrize("link", [False, True])
def test_a_checkpoint_in_the_hubs_cache_extends_into_real_files(
    template, tmp_path, out, link
):
    """Files in the cache are relative links to blobs."""
    snapshot = tmp_path / "models--a--b/snapshots/1234"
    snapshot.mkdir(parents=True)
    blobs = Path(shutil.copytree(template, tmp_path / "models--a--b/blobs"))
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    extend(snapshot, out, link=link)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / WEIGHTS).samefile(blobs / WEIGHTS) is link


def fail(number, *arguments, **options):
    raise OSError(number, os.strerror(number))


def test_a_failed_hard_link_is_an_error_without_a_copy(source, out, monkeypatch):
    monkeypatch.setattr(os, "link", functools.partial(fail, errno.EXDEV))
    with pytest.raises(RopepatchError, match=f"cannot hard-link {WEIGHTS}"):
        extend(source, out, link=True)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "include", "asks", "missing"),
    [
        ("PreTrainedTokenizerFast", [], False, []),
        ("PreTrainedTokenizerFast", ["tokenization_mine.py"], True, []),
        ("Mine", ["tokenization_mine.py"], True, []),
        ("Mine", [], True, ["tokenization_mine.py"]),
    ],
)
def test_a_tokenizer_keeps_code_that_is_copied_or_needed(
    template, source, out, name, include, asks, missing
):
    """Missing code is reported only if transformers needs it."""
    asked = {"AutoTokenizer": ["tokenization_mine.Mine", None]}
    edit_json(source / "tokenizer_config.json", tokenizer_class=name, auto_map=asked)
    code = "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast): pass\n"
    (source / "tokenization_mine.py").write_text(code)
    extend(source, out, include=include)
    assert ("auto_map" in read(out / "tokenizer_config.json")) == asks
    assert checkpoint_module.tokenizer_of_copy(source, include)[1] == missing
    if not missing:
        mine = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        stock = AutoTokenizer.from_pretrained(template)
        assert mine("word3 word4").input_ids == stock("word3 word4").input_ids


def verdict(out):
    return read(out / "ropepatch.json")["verified"]


def test_only_the_frequencies_of_quantised_models_are_compared(source, out):
    """Unknown quantisation is ignored."""
    for method, is_compared in (("awq", False), ("nope", True)):
        quantised = {"quant_method": method, "bits": 4}
        edit_json(source / "config.json", quantization_config=quantised)
        found = verdict(extend(source, out.with_name(method)))
        assert (found["frequencies"], found["compared"]) == ("equal", is_compared)
        assert (found["difference"] is not None) == is_compared


def test_only_frequencies_are_compared_if_memory_is_too_small(source, out, monkeypatch):
    available = int(1.5 * (source / WEIGHTS).stat().st_size)
    monkeypatch.setattr(verification, "available_bytes", lambda: available)
    assert "do not fit into memory" in verdict(extend(source, out))["logits"]


# --- verification: a written checkpoint that differs is rejected ---


def sabotage(monkeypatch, name, damage):
    """Damage one file after writing and before verification."""
    write = checkpoint_module.write_json

    def write_damaged(path, content):
        write(path, damage(content) if path.name == name else content)

    monkeypatch.setattr(checkpoint_module, "write_json", write_damaged)


def with_rope(content, **values):
    both = {"rope_parameters", "rope_scaling"} & content.keys()
    return content | {key: content[key] | values for key in both}


THETA = "rope_theta"
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("method", "damage", "refusal"),
    [
        ("yarn", lambda old: with_rope(old, factor=4.5), "frequencies"),
        ("yarn", lambda old: with_rope(old, beta_slow=2.0), "frequencies"),
        ("yarn", lambda old: old | {ORIGINAL: 32}, "frequencies"),
        (
            "linear",
            lambda old: old | {THETA: 5e5, "rope_parameters": old["rope_scaling"]},
            "frequencies",
        ),
        (
            "dynamic",
            lambda old: old | {THETA: 10001.0, "rope_parameters": None},
            "frequencies",
        ),
        ("yarn", lambda old: old | {"hidden_act": "gelu"}, "logits"),
        ("yarn", lambda old: old | {"hidden_act": "nope"}, "cannot load"),
        ("dynamic", lambda old: old | {"max_position_embeddings": TARGET}, "logits"),
    ],
)
def test_a_written_config_with_other_values_is_rejected(
    source, out, tmp_path, monkeypatch, method, damage, refusal
):
    sabotage(monkeypatch, "config.json", damage)
    with pytest.raises(RopepatchError, match=f"transformers.* {refusal}"):
        extend(source, out, method)
    assert left(tmp_path) == ["source"]


QUERIES = "model.layers.1.self_attn.q_proj.weight"
NAMED = f"contain NaN or infinity: {QUERIES}"


@pytest.mark.parametrize(
    ("method", "value", "words"),
    [
        ("yarn", float("nan"), f"the weights of source {NAMED}"),
        ("self-extend", float("inf"), f"the weights of LlamaForCausalLM {NAMED}"),
        ("linear", 3e38, "source computes logits that are NaN or infinite"),
    ],
)
def test_weights_or_logits_that_are_not_finite_are_rejected(
    source, out, method, value, words
):
    tensors = load_file(source / WEIGHTS)
    tensors[QUERIES][3] = value
    save_file(tensors, source / WEIGHTS, {"format": "pt"})
    with pytest.raises(RopepatchError, match=words) as caught:
        ropepatch.extend(source, out, to=TARGET, method=method)
    assert caught.value.hint
    assert not out.exists()


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_a_config_with_return_dict_false_is_extended_and_verified(source, out, method):
    edit_json(source / "config.json", return_dict=False)
    ropepatch.extend(source, out, to=TARGET, method=method, reading=False)
    assert ropepatch.load(out)[0].config.return_dict


def test_weights_damaged_while_copying_are_rejected(source, out, tmp_path, monkeypatch):
    copy = weights_module._copy

    def copy_and_damage(origin, target):
        yield from copy(origin, target)
        with target.open("r+b") as file:
            file.seek(-4000, os.SEEK_END)
            file.write(b"\x3f" * 2000)

    monkeypatch.setattr(weights_module, "_copy", copy_and_damage)
    with pytest.raises(RopepatchError, match="other logits from the written"):
        extend(source, out)
    assert left(tmp_path) == ["source"]


# --- failures leave nothing ---


@pytest.mark.parametrize("inside", ["out", "a/b/out", "../alias/out"])
def test_an_output_folder_inside_the_source_is_rejected(source, tmp_path, inside):
    (tmp_path / "alias").symlink_to(source)
    before = contents(source)
    with pytest.raises(RopepatchError, match="lies inside the source"):
        extend(source, source / inside)
    assert contents(source) == before


def test_a_changed_source_or_one_with_an_adapter_is_rejected(source, out, tmp_path):
    made = plan(source)
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(RopepatchError, match="contains a model and a PEFT adapter"):
        ropepatch.extend(made, out)
    edit_json(source / "config.json", max_position_embeddings=2 * WINDOW)
    with pytest.raises(RopepatchError, match="changed since it was planned"):
        ropepatch.extend(made, out)
    assert left(tmp_path) == ["source"]


def test_too_little_disk_space_is_reported_before_copying(source, out, monkeypatch):
    usage = shutil.disk_usage(source)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RopepatchError, match=r"the copy needs .* GB free") as caught:
        checkpoint_module.check(plan(source), out)
    assert "`link_weights`" in caught.value.hint


@pytest.mark.parametrize("step", ["mkdir", "copyfile", "write_text", "_copy", "rename"])
def test_a_disk_error_at_any_step_leaves_nothing(
    source, out, tmp_path, monkeypatch, step
):
    made = plan(source)
    owner = {"copyfile": shutil, "_copy": weights_module}.get(step, Path)
    monkeypatch.setattr(owner, step, functools.partial(fail, errno.ENOSPC))
    with pytest.raises(RopepatchError) as caught:
        ropepatch.extend(made, out)
    assert str(caught.value) == f"cannot write {out}: {os.strerror(errno.ENOSPC)}"
    assert caught.value.hint
    assert left(tmp_path) == ["source"]


def test_the_probe_of_a_verification_reaches_the_target():
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    plain, dynamic = tiny_model("llama"), tiny_model("llama", rope_parameters=scaled)
    dynamic.load_state_dict(plain.state_dict())
    for target, is_equal in ((64, True), (128, False)):
        one, two = (probe_logits(model, target, "") for model in (plain, dynamic))
        assert torch.equal(one, two) == is_equal
