"""Extended GGUF files; eval/studies/engines/gguf_study.py runs llama.cpp itself."""

import math
import re
from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
from gguf_files import BASE, DIM, TARGET, WINDOW, write_gguf

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension.serving import serving
from ropepatch.scaling import make_scaling

OF_READER = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}


def read(path):
    """All keys and tensors of a file, from the gguf package."""
    reader = gguf.GGUFReader(path)
    keys = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name not in OF_READER
    }
    return keys, {
        tensor.name: (tensor.tensor_type, tensor.data.tobytes(), [*tensor.shape])
        for tensor in reader.tensors
    }


def computed(path, position):
    """cos and sin of every pair at a position as llama.cpp's CPU computes them: [D/2, 2].

    From ggml's rope and llama.cpp's context, b11434: in float32, one pair after the other.
    """
    keys, tensors = read(path)
    own = {key.partition(".")[2]: value for key, value in keys.items()}
    f32 = np.float32
    table = tensors.get("rope_freqs.weight", tensors.get("rope_factors_long.weight"))
    divisors = np.ones(DIM // 2, f32) if table is None else np.frombuffer(table[1], f32)
    kind, factor = (
        own.get("rope.scaling.type", "linear"),
        own.get("rope.scaling.factor", 0.0),
    )
    freq_scale = f32(1) if kind == "none" or not factor else f32(1) / f32(factor)
    ext = 1.0 if kind == "yarn" else 0.0
    base = f32(own["rope.freq_base"])
    attn = f32(own.get("rope.scaling.attn_factor", 1.0))
    original = own.get("rope.scaling.original_context_length", own["context_length"])
    betas = 32.0, 1.0
    if keys["general.architecture"] == "mistral3":
        betas = (
            own.get("rope.scaling.yarn_beta_fast", 32.0),
            own.get("rope.scaling.yarn_beta_slow", 1.0),
        )
        if ext:
            attn /= 1 + 0.1 * own.get("rope.scaling.yarn_log_multiplier", 0.0) * (
                math.log(factor)
            )
    low, high = (
        DIM * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))
        for beta in betas
    )
    low, high = max(0, math.floor(low)), min(DIM - 1, math.ceil(high))
    theta, rows = f32(position), []
    for pair in range(DIM // 2):
        extrapolated = theta / divisors[pair]
        angle, magnitude = freq_scale * extrapolated, attn
        if ext:
            mix = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
            angle = angle * f32(1 - mix) + extrapolated * f32(mix)
            magnitude = attn * f32(1 + 0.1 * math.log(1 / freq_scale))
        rows.append((np.cos(angle) * magnitude, np.sin(angle) * magnitude))
        theta *= base ** f32(-2 / DIM)
    return np.array(rows)


def expected(plan, position):
    """The same, computed from the scaling."""
    inv_freq, a = plan.method.frequencies(plan.source.config.rope)
    angles = position * inv_freq.double()
    return torch.stack([angles.cos() * a, angles.sin() * a], dim=1).numpy()


def check(file, plan, positions=(1, 100, 511), atol=2e-4):
    """llama.cpp computes the plan's RoPE from a file."""
    for position in positions:
        ours, theirs = expected(plan, position), computed(file, position)
        np.testing.assert_allclose(theirs, ours, atol=atol)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        *(
            (name, {})
            for name in (
                "none",
                "linear",
                "ntk",
                "yarn",
                "llama3",
                "ntk-mixed",
                "p-rope",
            )
        ),
        ("abf", {"rope_theta": 90_000.0}),
        ("yarn", {"attention_factor": 1.5}),
        ("yarn", {"beta_slow": 0.25}),
        ("yarn", {"truncate": False}),
        ("yarn", {"ramp": "rotations"}),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3"])
def test_llama_cpp_computes_the_planned_rope_from_the_written_file(
    tmp_path, architecture, method, parameters
):
    source = write_gguf(tmp_path / "a.gguf", architecture)
    by_table = {"llama3", "ntk-mixed", "p-rope", "beta_slow", "truncate", "ramp"}
    if architecture == "qwen3" and by_table & {method, *parameters}:
        with pytest.raises(RopepatchError, match="qwen3 does not support this"):
            ropepatch.plan(source, TARGET, method=method, **parameters)
        return
    plan = ropepatch.plan(source, TARGET, method=method, **parameters)
    written = ropepatch.extend(plan, tmp_path / "b.gguf").folder
    check(written, plan)
    if method not in ("none", "p-rope"):
        assert not np.allclose(computed(source, 511), expected(plan, 511), atol=1e-2)
    assert read(written)[0][f"{architecture}.context_length"] == TARGET


ORIGINAL = "rope.scaling.original_context_length"
BY_LENGTH = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, ORIGINAL: 128}


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("laguna", BY_LENGTH),
        ("exaone4", {"block_count": 30}),
        ("granitehybrid", {"rope.scaling.finetuned": True}),
        ("laguna", {"attention.sliding_window": 32, "rope.freq_base_swa": 500.0}),
        ("mistral3", {"attention.temperature_scale": 0.1}),
    ],
)
def test_yarn_in_an_architecture_of_several_attentions(tmp_path, architecture, keys):
    source = write_gguf(tmp_path / "a.gguf", architecture, **keys)
    extension = ropepatch.extend(source, tmp_path / "b.gguf", to="4x")
    check(extension.folder, extension.plan)
    changed = {key.partition(".")[2] for key in extension.plan.changes}
    absent = {"context_length", *BY_LENGTH} - keys.keys()
    assert changed == absent | {"rope.scaling.factor"}


MINISTRAL = {
    "context_length": 1024,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 1.0,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 0.5,
    "attention.temperature_scale": 0.1,
}


def test_ministral_keeps_where_its_query_temperature_begins(tmp_path):
    source = write_gguf(tmp_path / "a.gguf", "mistral3", **MINISTRAL)
    unscaled = ropepatch.plan(source, 2048, method="none")
    assert unscaled.changes == {"mistral3.context_length": 2048}
    assert "ropepatch extend" in serving(unscaled, "llama.cpp").commands[0]
    check(source, unscaled, positions=(1, 100))
    extension = ropepatch.extend(source, tmp_path / "b.gguf", to=2048)
    check(extension.folder, extension.plan, positions=(1, 100, 2047), atol=1e-3)
    keys, tensors = read(extension.folder)
    assert keys["mistral3.rope.scaling.original_context_length"] == 64
    assert "rope_freqs.weight" in tensors


LISTS = {
    "rope_factors_long": np.linspace(1, 40, DIM // 2),
    "rope_factors_short": np.linspace(1, 2, DIM // 2),
}


@pytest.mark.parametrize("kind", ["longrope", None])
def test_phi_scales_its_long_list_and_keeps_its_short_one(tmp_path, kind):
    keys = {
        "context_length": 1024,
        ORIGINAL: 128,
        "rope.scaling.type": kind,
        "rope.scaling.attn_factor": 1.25,
    }
    source = write_gguf(tmp_path / "a.gguf", "phi3", tables=LISTS, **keys)
    extension = ropepatch.extend(source, tmp_path / "b.gguf", to=4096, method="linear")
    written, tensors = read(extension.folder)
    long, short = (
        np.frombuffer(tensors[f"{name}.weight"][1], np.float32) for name in LISTS
    )
    np.testing.assert_allclose(long, LISTS["rope_factors_long"] * 4, rtol=1e-6)
    np.testing.assert_array_equal(short, LISTS["rope_factors_short"].astype("f4"))
    assert (written[f"phi3.{ORIGINAL}"], written["phi3.context_length"]) == (128, 4096)
    assert written["phi3.rope.scaling.attn_factor"] == 1.25
    assert any("up to 128 tokens" in warning for warning in extension.plan.warnings)
    without = write_gguf(tmp_path / "c.gguf", "phi3", tables=LISTS)
    with pytest.raises(RopepatchError, match="by other numbers beyond 128 tokens"):
        ropepatch.plan(without, TARGET)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("exaone4", {"block_count": 65, "nextn_predict_layers": 1}),
        ("granitehybrid", {"rope.scaling.finetuned": False}),
    ],
)
def test_without_rope_in_global_layers_only_the_length_is_written(
    tmp_path, architecture, keys
):
    source = write_gguf(tmp_path / "a.gguf", architecture, **keys)
    with pytest.raises(RopepatchError, match="no scaling is needed"):
        ropepatch.plan(source, TARGET)
    extension = ropepatch.extend(source, tmp_path / "b.gguf", to=TARGET, method="none")
    assert extension.plan.changes == {f"{architecture}.context_length": TARGET}


STALE = [
    f"rope.scaling.yarn_{name}"
    for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")
]


def test_only_rope_changes_and_the_source_is_not_modified(tmp_path, monkeypatch):
    """Also of a file with a tensor without dimensions, and a key that begins with GGUF."""
    monkeypatch.chdir(tmp_path)
    keys = {
        "general.alignment": 64,
        "general.mine": "x",
        "attention.sliding_window": 4096,
        **dict.fromkeys(STALE, 8.0),
    }
    source = write_gguf(tmp_path / "a.gguf", scalar=1.5, **keys)
    source.write_bytes(source.read_bytes().replace(b"general.mine", b"GGUF.my_text"))
    before = source.read_bytes()
    extension = ropepatch.extend(source, to="4x", method="llama3")
    (old, weights), (new, copied) = read(source), read(extension.folder)
    changed = {
        f"llama.{key}" for key in ("context_length", "rope.scaling.type", *STALE)
    }
    assert {key for key in old | new if old.get(key) != new.get(key)} == changed
    assert new["GGUF.my_text"] == "x"
    assert copied.pop("rope_freqs.weight")
    assert copied == weights
    assert source.read_bytes() == before
    assert extension.folder.name == "a-llama3-512.gguf"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_split_file_is_written_as_one(tmp_path):
    whole = ropepatch.extend(
        write_gguf(tmp_path / "w.gguf"), to=TARGET, out=tmp_path / "x.gguf"
    )
    first = write_gguf(tmp_path / "s.gguf", parts=2)
    second = first.with_name("s-00002-of-00002.gguf")
    for part in (first, second):
        out = ropepatch.extend(part, tmp_path / f"of-{part.name}", to=TARGET)
        assert read(out.folder) == read(whole.folder)
    second.unlink()
    with pytest.raises(RopepatchError, match="No such file"):
        ropepatch.plan(first, TARGET)
    with pytest.raises(RopepatchError, match="tensors, expected"):
        ropepatch.plan(first.rename(tmp_path / "alone.gguf"), TARGET)


def test_a_scaled_file_is_scaled_on_top(tmp_path):
    linear = {"rope.scaling.factor": 2.0, "context_length": 256}
    source = write_gguf(tmp_path / "a.gguf", "qwen3", **linear)
    plan = ropepatch.plan(source, 1024, method="linear")
    assert plan.source.config.rope.is_scaled
    assert plan.changes["qwen3.rope.scaling.factor"] == 8.0
    with pytest.raises(RopepatchError, match="qwen3 does not support this yarn"):
        ropepatch.plan(source, 1024)
    plain = write_gguf(tmp_path / "b.gguf")
    once = ropepatch.extend(plain, tmp_path / "c.gguf", to=256, method="llama3")
    twice = ropepatch.extend(once.folder, tmp_path / "d.gguf", to=1024)
    check(twice.folder, twice.plan, positions=[700])
    scaled = make_scaling("llama3", factor=2.0).frequencies(
        ropepatch.Rope(DIM, BASE, WINDOW)
    )
    found = twice.plan.source.config.rope.inv_freq()
    torch.testing.assert_close(found, scaled.inv_freq)


SWA = {"attention.sliding_window": 32}
LOG = "rope.scaling.yarn_log_multiplier"


@pytest.mark.parametrize(
    ("architecture", "keys", "asked", "words"),
    [
        ("gemma3", SWA, {"attention_factor": 1.5}, "does not support this yarn"),
        ("gemma2", {"rope.freq_base_swa": 5e2}, {"method": "ntk"}, "support this ntk"),
        ("laguna", SWA, {"method": "ntk"}, "does not support this ntk"),
        ("mamba", {}, {}, "which scalings llama.cpp supports for 'mamba'"),
        ("llama", {}, {"method": "dynamic"}, "cannot contain dynamic"),
        ("llama", {}, {"method": "rerope", "window": 8}, "cannot contain rerope"),
        ("llama", BY_LENGTH, {"to": 256}, "already covers 512 tokens"),
        ("llama", {}, {"revision": "main"}, "`revision` does not apply"),
        ("llama", {LOG: 0.1}, {}, "ties its softmax scale"),
        ("llama", {"context_length": "long"}, {}, "must be of type int, got 'long'"),
        ("llama", {"rope.scaling.type": "su"}, {}, "scales RoPE by su"),
    ],
)
def test_unsupported_scalings_and_invalid_files_raise_one_line_errors(
    tmp_path, architecture, keys, asked, words
):
    source = write_gguf(tmp_path / "a.gguf", architecture, **keys)
    with pytest.raises(RopepatchError, match=re.escape(words)) as error:
        ropepatch.plan(source, **{"to": TARGET} | asked)
    assert "\n" not in str(error.value)


def test_a_truncated_or_damaged_file_raises_a_one_line_error(tmp_path):
    source = write_gguf(tmp_path / "a.gguf")
    data, reader = source.read_bytes(), gguf.GGUFReader(source)
    places = {0, 1, 4, 12, 23, len(data) - 1, len(data) - 40}
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    for field in fields:
        places |= {field.offset + step for step in (0, 3, 9, 17)}
    places |= {tensor.data_offset for tensor in reader.tensors}
    garbled = {f"cut at {place}": data[:place] for place in places}
    # including counts, lengths, types and offsets
    for place in range(4, reader.tensors[0].data_offset, 8):
        garbled[f"garbled at {place}"] = data[:place] + b"\xff" * 8 + data[place + 8 :]
    damaged = tmp_path / "b.gguf"
    for what, content in garbled.items():
        damaged.write_bytes(content)
        unseen = what.startswith("garbled")  # within a text or a number with any value
        refused = pytest.raises(
            RopepatchError, match=r"\A[^\n]*b\.gguf[^\n]*\nhint: [^\n]*\Z"
        )
        with suppress(RopepatchError) if unseen else refused:
            ropepatch.extend(
                damaged, tmp_path / "c.gguf", to=TARGET, say=lambda line: None
            )
            (tmp_path / "c.gguf").unlink()
        assert {path.name for path in tmp_path.iterdir()} == {"a.gguf", "b.gguf"}, what


def test_a_copy_that_differs_in_one_bit_is_not_kept(tmp_path, monkeypatch):
    source = write_gguf(tmp_path / "a.gguf")
    write = gguf.GGUFWriter.write_tensor_data

    def flipped(self, tensor, *rest):
        if tensor.dtype == np.uint8:
            tensor = tensor.copy()
            tensor.flat[3] ^= 1
        write(self, tensor, *rest)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", flipped)
    with pytest.raises(
        RopepatchError, match=r"blk\.0\.attn_q\.weight differs from what was written"
    ):
        ropepatch.extend(source, tmp_path / "b.gguf", to=TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_a_plan_of_a_changed_file_is_rejected(tmp_path):
    plan = ropepatch.plan(write_gguf(tmp_path / "a.gguf"), TARGET)
    (tmp_path / "a.gguf").unlink()
    write_gguf(tmp_path / "a.gguf", **{"rope.freq_base": 5e5})
    with pytest.raises(RopepatchError, match="changed since it was planned"):
        ropepatch.extend(plan, tmp_path / "b.gguf")
    with pytest.raises(RopepatchError, match="already exists"):
        ropepatch.extend(plan, tmp_path / "a.gguf")
