"""Cost of `ropepatch extend --link-weights` on a checkpoint with the shape of Llama-3-70B.

    python eval/benchmarks/extend_cost.py [--runs 5] [--json FILE]

The weight files are sparse: valid safetensors headers over holes of the real size. Every run is a separate
process, with the CPU time and peak resident memory that the kernel counted. The baselines alternate with it:
the imports of every transformers program, and these with the model built on the meta device.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from reporting import ratio, run_benchmark, spread

TARGET_SECONDS, TARGET_MB = 5.0, 500.0
SHARDS = 30
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY = 8192, 80, 64, 8, 28672, 128256
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
IMPORTS = "import torch; from transformers import AutoModelForCausalLM, LlamaForCausalLM"
META_MODEL = f"""{IMPORTS}
from transformers import AutoConfig
with torch.device("meta"):
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({{folder!r}}))
"""
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Run:
    """The cost of one process, from the kernel."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def tensor_shapes() -> Shapes:
    """The shape of every tensor of the model, in the order of its layers."""
    kv = HIDDEN // HEADS * KV_HEADS
    layer: Shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    return {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        **{f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()},
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }


def num_bytes(shape: tuple[int, ...]) -> int:
    return 2 * prod(shape)  # bfloat16


def shards_of(shapes: Shapes) -> Iterator[Shapes]:
    """The tensors in order, in SHARDS parts of about the same size."""
    limit = sum(map(num_bytes, shapes.values())) / SHARDS
    shards: list[Shapes] = [{} for _ in range(SHARDS)]
    before = 0
    for name, shape in shapes.items():
        shards[int((before + num_bytes(shape) / 2) // limit)][name] = shape
        before += num_bytes(shape)
    yield from shards


def write_sparse_shard(path: Path, shapes: Shapes) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(folder: Path) -> None:
    shapes = tensor_shapes()
    weight_map: dict[str, str] = {}
    folder.mkdir()
    for number, shard in enumerate(shards_of(shapes), 1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        write_sparse_shard(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    contents: dict[str, dict[str, Any]] = {
        "config.json": CONFIG,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192},
        "generation_config.json": {"bos_token_id": 128000, "eos_token_id": 128001, "max_length": 8192},
        "model.safetensors.index.json": {
            "metadata": {"total_size": sum(map(num_bytes, shapes.values()))},
            "weight_map": weight_map,
        },
    }
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content, indent=2), encoding="utf-8")


def measure(command: list[str]) -> Run:
    # The peak of a child starts at that of its parent, so nothing large is imported here.
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            log.seek(0)
            raise SystemExit(f"exit {child.returncode}: {' '.join(command)}\n{log.read().decode()}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def disk_bytes(*folders: Path) -> int:
    """Bytes allocated on disk for the files of these folders, each inode once."""
    stats = [file.stat() for folder in folders for file in folder.iterdir()]
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in stats}.values())


def check_links(source: Path, out: Path) -> None:
    """Check that every weight file of the copy is a hard link to the source."""
    for file in source.glob("*.safetensors*"):
        if not file.samefile(out / file.name):
            raise SystemExit(f"{out / file.name} is a copy of {file}")


def extend_once(source: Path, out: Path) -> tuple[Run, int, dict[str, str]]:
    """Run one extension; return its cost, the added bytes on disk, and its verification."""
    before = disk_bytes(source)
    executable = str(Path(sys.executable).with_name("ropepatch"))
    run = measure([executable, "extend", str(source), "--to", "32k", "--link-weights", "--out", str(out)])
    check_links(source, out)
    added = disk_bytes(source, out) - before
    verified = json.loads((out / "ropepatch.json").read_text(encoding="utf-8"))["verified"]
    shutil.rmtree(out)
    return run, added, verified


def benchmark(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ropepatch-") as temporary:
        source, out = Path(temporary, "llama-70b"), Path(temporary, "llama-70b-32k")
        write_checkpoint(source)
        stock = META_MODEL.format(folder=str(source))
        baselines = {"imports": IMPORTS, "meta model": stock}
        *_, verified = extend_once(source, out)  # fills the page cache with the libraries, for all three
        samples: dict[str, list[Run]] = {name: [] for name in (*baselines, "extend")}
        added: list[int] = []
        for _ in range(runs):
            for name, code in baselines.items():
                samples[name].append(measure([sys.executable, "-c", code]))
            run, grown, _ = extend_once(source, out)
            samples["extend"].append(run)
            added.append(grown)
        seconds = {name: [one.seconds for one in found] for name, found in samples.items()}
        weights = [file.stat() for file in source.glob("*.safetensors")]
        return {
            "command": "ropepatch extend DIR --to 32k --link-weights --out OUT",
            "n": runs,
            "target": {"seconds": TARGET_SECONDS, "peak_mb": TARGET_MB},
            "checkpoint": {
                "shape": {key: value for key, value in CONFIG.items() if isinstance(value, int | str)},
                "files": len(weights),
                "apparent_gb": round(sum(stat.st_size for stat in weights) / 1e9, 1),
            },
            "weight_files_are_the_same_inodes": True,  # check_links ends the benchmark otherwise
            "bytes_added_to_the_disk": max(added),
            "verified": verified,
            "runs": {name: summary(found) for name, found in samples.items()},
            "ratio_of_seconds": {f"extend / {name}": ratio(seconds, "extend", name) for name in baselines},
        }


def summary(runs: list[Run]) -> dict[str, Any]:
    columns = {name: [asdict(run)[name] for run in runs] for name in asdict(runs[0])}
    return {name: spread(values) for name, values in columns.items()}


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, runs=5)
