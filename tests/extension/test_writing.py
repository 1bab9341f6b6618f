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
from methods import example
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension import writing as checkpoint_module
from ropepatch.extension.verification import probe_logits
from ropepatch.model import weights as weights_module
from ropepatch.model.weights import fingerprint, read_headers

TARGET = 256
WEIGHTS = "model.safetensors"


@pytest.fixture
def source(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "source"))


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def plan(source: Path, method: str = "yarn", **parameters) -> ropepatch.Plan:
    given = example(method, PAIRS).parameters()
    return ropepatch.plan(source, to=TARGET, method=method, **(given | parameters))


def extend(source: Path, out: Path, method: str = "yarn", **options) -> Path:
    return written(plan(source, method), out, **options)


def written(
    made: ropepatch.Plan, out: Path, include=(), link=False, progress=None
) -> Path:
    copy = checkpoint_module.check(made, out, link=link, include=include)
    return copy.write(progress, link=link).path


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def logits(model, length: int = TARGET) -> torch.Tensor:
    ids = torch.randint(
        3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_as_patched(source: Path, made: ropepatch.Plan, out: Path) -> None:
    patched = load(source)
    ropepatch.patch(patched, made)
    assert torch.equal(logits(load(out), made.target), logits(patched, made.target))


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


# --- results in stock transformers ---


def test_a_null_head_dim_is_written_as_a_number_for_yarn(tmp_path, out):
    tiny_model("mixtral").save_pretrained(tmp_path / "source")
    edit_json(tmp_path / "source/config.json", head_dim=None)
    made = plan(tmp_path / "source")
    ropepatch.extend(made, out)
    assert read(out / "config.json")["head_dim"] == 2 * PAIRS
    assert_as_patched(tmp_path / "source", made, out)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings_need_either_of_their_names(tmp_path, out, stored):
    source = write_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    tensors = load_file(source / WEIGHTS)
    embeddings = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {stored: embeddings}, source / WEIGHTS, {"format": "pt"})
    extend(source, out)
    assert_as_patched(source, plan(source), out)
    assert ropepatch.diagnose(source).findings == ()
    save_file(tensors, source / WEIGHTS, {"format": "pt"})
    with pytest.raises(RopepatchError, match=r"\d missing keys, for instance"):
        extend(source, tmp_path / "none")


def test_a_sharded_checkpoint_keeps_its_shards_and_its_index(tmp_path, out):
    sharded = write_checkpoint(tmp_path / "source", max_shard_size="10KB")
    made = plan(sharded)
    ropepatch.extend(made, out)
    shards = sorted(path.name for path in sharded.glob("*.safetensors*"))
    assert len(shards) > 3
    assert sorted(path.name for path in out.glob("*.safetensors*")) == shards
    assert all(
        (out / name).read_bytes() == (sharded / name).read_bytes() for name in shards
    )
    assert_as_patched(sharded, made, out)


def test_a_bfloat16_checkpoint_stays_bfloat16_and_reloads_equal(tmp_path, out):
    write_checkpoint(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "float32", dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "source")
    extend(tmp_path / "source", out)
    assert (
        AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    )
    assert read(out / "ropepatch.json")["verified"]["logits"] == "equal"


def test_linear_scaling_composes_on_an_extended_checkpoint(source, out, tmp_path):
    once = extend(source, tmp_path / "once")
    made = ropepatch.plan(once, to=4 * TARGET, method="linear")
    ropepatch.extend(made, out)
    assert_as_patched(once, made, out)
    expected = plan(source).frequencies().inv_freq / 4
    torch.testing.assert_close(made.frequencies().inv_freq, expected, rtol=1e-6, atol=0)
    assert read(out / "ropepatch.json")["earlier"] == read(once / "ropepatch.json")
    with pytest.raises(RopepatchError, match="already scaled"):
        ropepatch.plan(once, to=4 * TARGET, method="yarn", ramp="index")


# --- contents of the files ---


def test_other_keys_of_config_json_do_not_change(source, out):
    edit_json(
        source / "config.json",
        a_stranger="keeps its key",
        architectures=["LlamaForCausalLM"],
    )
    before, after = (
        read(source / "config.json"),
        read(extend(source, out) / "config.json"),
    )
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    lengths = {"max_position_embeddings", "original_max_position_embeddings"}
    assert changed == lengths | {"rope_parameters", "rope_scaling", "rope_theta"}


def test_tokenizer_and_generation_config_have_the_target_length(source, out):
    extend(source, out)
    assert AutoTokenizer.from_pretrained(out).model_max_length == TARGET
    assert GenerationConfig.from_pretrained(out).max_length == TARGET
    assert AutoConfig.from_pretrained(out).max_position_embeddings == TARGET
    tokenizers = [read(folder / "tokenizer_config.json") for folder in (source, out)]
    assert tokenizers[0] | {"model_max_length": TARGET} == tokenizers[1]


def test_another_generation_length_is_kept_and_missing_files_are_not_created(
    source, out, tmp_path
):
    edit_json(
        source / "generation_config.json",
        max_length=20,
        temperature=0.5,
        do_sample=True,
    )
    assert read(extend(source, out) / "generation_config.json") == read(
        source / "generation_config.json"
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).unlink()
    assert left(extend(source, tmp_path / "bare")) == [
        "config.json",
        WEIGHTS,
        "ropepatch.json",
    ]


def test_ropepatch_json_records_the_plan_the_verdict_and_the_versions(source, out):
    made = plan(source)
    ropepatch.extend(made, out)
    record = read(out / "ropepatch.json")
    assert record == made.to_dict() | {
        "model": source.name,  # no path of this machine for a folder
        "verified": {
            "frequencies": "equal",
            "logits": "equal",
            "compared": True,
            "difference": 0.0,
        },
        "versions": record["versions"],
        "base": {},
        "weights": fingerprint(read_headers(out)),
        "checksums": {
            WEIGHTS: hashlib.sha256((out / WEIGHTS).read_bytes()).hexdigest()
        },
        "version": 1,
    }
    assert record["versions"].keys() == {"ropepatch", "transformers", "torch"}
    written = read(out / "config.json")
    assert {key: written[key] for key in record["config_changes"]} == record[
        "config_changes"
    ]


# --- the source and the copy of its weights ---


STATED = {
    "license": "llama2",
    "language": ["en", "de"],
    "license_link": "https://example.org/l",
}


@pytest.mark.parametrize(
    ("card", "passed_on"),
    [
        (json.dumps(STATED | {"price": 3}).encode(), STATED),
        *((card, {}) for card in (b"license: 3", b"- a", b"\xff")),
    ],
)
def test_licence_and_language_of_the_base_models_card_are_recorded(
    source, out, card, passed_on
):
    (source / "README.md").write_bytes(b"---\n" + card + b"\n---\n# A card\n")
    extend(source, out)
    assert read(out / "ropepatch.json")["base"] == passed_on


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "ropepatch.json", "README.md", "vocab.txt"]
)
def test_a_link_that_leads_out_of_the_checkpoint_is_not_followed(
    source, out, tmp_path, name
):
    (tmp_path / "secret.json").write_text('{"auths": "a secret"}')
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "secret.json")
    with pytest.raises(
        RopepatchError, match="is a link that leads out of the checkpoint"
    ):
        extend(source, out)
    assert left(tmp_path) == ["secret.json", "source"]


@pytest.mark.parametrize("link", [False, True])
def test_the_source_is_never_modified(source, out, link, monkeypatch):
    usage = shutil.disk_usage(source)._replace(free=0)
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: usage if link else usage._replace(free=1 << 30),
    )
    before = contents(source), source.stat().st_mtime_ns
    extend(source, out, link=link)
    assert (contents(source), source.stat().st_mtime_ns) == before
    assert (out / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    both = [path for path in out.iterdir() if (source / path.name).exists()]
    assert [path.name for path in both if path.samefile(source / path.name)] == [
        WEIGHTS
    ] * link


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
    assert torch.isfinite(logits(load(out))).all()


def fail(number, *arguments, **options):
    raise OSError(number, os.strerror(number))


def test_a_failed_hard_link_is_an_error_without_a_copy(
    source, out, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "link", functools.partial(fail, errno.EXDEV))
    with pytest.raises(RopepatchError, match=f"cannot hard-link {WEIGHTS}"):
        extend(source, out, link=True)
    assert left(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("name", "include", "asks", "missing"),
    [
        ("PreTrainedTokenizerFast", [], False, []),
        ("PreTrainedTokenizerFast", ["tokenization_mine.py"], True, []),
        ("Mine", ["tokenization_mine.py"], True, []),
        ("Mine", [], True, ["tokenization_mine.py"]),
    ],
)
def test_code_of_a_tokenizer_is_kept_only_if_copied_or_needed(
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
        assert (
            mine("word3 word4").input_ids
            == AutoTokenizer.from_pretrained(template)("word3 word4").input_ids
        )


def test_only_the_frequencies_of_quantised_models_are_compared(source, out):
    edit_json(
        source / "config.json", quantization_config={"quant_method": "awq", "bits": 4}
    )
    extend(source, out)
    verified = read(out / "ropepatch.json")["verified"]
    assert (verified["frequencies"], verified["compared"], verified["difference"]) == (
        "equal",
        False,
        None,
    )
    assert verified["logits"] == "not compared: quantised weights"


def test_unknown_quantisation_is_ignored(source, out):
    edit_json(source / "config.json", quantization_config={"quant_method": "nope"})
    extend(source, out)
    assert read(out / "ropepatch.json")["verified"]["compared"]


def test_only_frequencies_are_compared_if_memory_is_too_small(source, out, monkeypatch):
    available = int(1.5 * (source / WEIGHTS).stat().st_size)
    monkeypatch.setattr(
        "ropepatch.extension.verification.available_bytes", lambda: available
    )
    extend(source, out)
    assert (
        "do not fit into memory" in read(out / "ropepatch.json")["verified"]["logits"]
    )


# --- verification: a written checkpoint that differs is rejected ---


def sabotage(monkeypatch, name: str, damage) -> None:
    """Damage one file after writing and before verification."""
    write = checkpoint_module.write_json

    def write_damaged(path: Path, content: dict) -> None:
        write(path, damage(content) if path.name == name else content)

    monkeypatch.setattr(checkpoint_module, "write_json", write_damaged)


def with_rope(content: dict, **values) -> dict:
    both = {"rope_parameters", "rope_scaling"} & content.keys()
    return content | {key: content[key] | values for key in both}


@pytest.mark.parametrize(
    ("method", "damage", "refusal"),
    [
        ("yarn", lambda content: with_rope(content, factor=4.5), "other frequencies"),
        (
            "yarn",
            lambda content: with_rope(content, beta_fast=31.0, beta_slow=2.0),
            "other frequencies",
        ),
        (
            "yarn",
            lambda content: content | {"original_max_position_embeddings": 32},
            "other frequencies",
        ),
        (
            "linear",
            lambda content: (
                content
                | {"rope_theta": 5e5, "rope_parameters": content["rope_scaling"]}
            ),
            "other frequencies",
        ),
        (
            "dynamic",
            lambda content: content | {"rope_theta": 10001.0, "rope_parameters": None},
            "other frequencies",
        ),
        ("yarn", lambda content: content | {"hidden_act": "gelu"}, "other logits"),
        (
            "yarn",
            lambda content: content | {"hidden_act": "no such function"},
            "transformers cannot load",
        ),
        (
            "dynamic",
            lambda content: content | {"max_position_embeddings": TARGET},
            "other logits",
        ),
    ],
)
def test_a_written_config_with_other_values_is_rejected(
    source, out, tmp_path, monkeypatch, method, damage, refusal
):
    sabotage(monkeypatch, "config.json", damage)
    with pytest.raises(RopepatchError, match=refusal):
        extend(source, out, method)
    assert left(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("method", "value", "model"),
    [
        ("yarn", float("nan"), "source"),
        ("self-extend", float("inf"), "LlamaForCausalLM"),
    ],
)
def test_the_error_of_non_finite_weights_names_them(source, out, method, value, model):
    tensors = load_file(source / WEIGHTS)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, source / WEIGHTS, {"format": "pt"})
    with pytest.raises(
        RopepatchError, match=f"the weights of {model} contain NaN or infinity: {name}"
    ) as caught:
        ropepatch.extend(source, out, to=TARGET, method=method)
    assert "`ropepatch doctor`" in caught.value.hint
    assert not out.exists()


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_a_config_with_return_dict_false_is_extended_and_verified(source, out, method):
    edit_json(source / "config.json", return_dict=False)
    ropepatch.extend(source, out, to=TARGET, method=method)
    assert ropepatch.load(out)[0].config.return_dict


def test_the_error_of_overflowing_logits_does_not_name_weights(source, out):
    tensors = load_file(source / WEIGHTS)
    tensors["lm_head.weight"] *= 3e38
    save_file(tensors, source / WEIGHTS, {"format": "pt"})
    with pytest.raises(
        RopepatchError, match="source computes logits that are NaN or infinite"
    ):
        ropepatch.extend(source, out, to=TARGET, method="linear")


def test_weights_damaged_while_copying_are_rejected(source, out, tmp_path, monkeypatch):
    copy = weights_module._copy

    def copy_and_damage(origin: Path, target: Path):
        yield from copy(origin, target)
        with target.open("r+b") as file:
            file.seek(-4000, os.SEEK_END)
            file.write(b"\x3f" * 2000)

    monkeypatch.setattr(weights_module, "_copy", copy_and_damage)
    with pytest.raises(
        RopepatchError, match="other logits from the written checkpoint"
    ):
        extend(source, out)
    assert left(tmp_path) == ["source"]


# --- failures leave nothing ---


def test_a_folder_created_meanwhile_is_not_overwritten(source, out, tmp_path):
    def meanwhile(done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "precious").write_text("kept")

    with pytest.raises(RopepatchError, match="already exists"):
        extend(source, out, progress=meanwhile)
    assert left(tmp_path) == ["out", "source"]
    assert left(out) == ["precious"]


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


def test_too_little_disk_space_is_reported_before_copying(
    source, out, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(
        checkpoint_module, "clone_files", lambda *a, **k: pytest.fail("copied")
    )
    with pytest.raises(
        RopepatchError, match=r"the copy needs [\d.]+ GB, .* has [\d.]+ GB free"
    ) as caught:
        extend(source, out)
    assert "`link_weights`" in caught.value.hint
    assert left(tmp_path) == ["source"]


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
