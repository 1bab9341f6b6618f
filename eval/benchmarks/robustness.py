"""Randomly damaged files, and the commands that load them: an error in one line, or a correct result.

    python eval/benchmarks/robustness.py [--mutants 5000] [--seed 0] [--workers 2] [--json FILE]

Every mutant is one file of a valid folder with one to three faults, and one or two commands that load it,
run by `ropepatch.cli.main` in a forked worker. A call of more than `LIMIT` seconds is a hang.
Stock transformers loads what `extend` wrote, and its logits are compared with those of the source,
whose rotary module gets the frequencies of the record. Seed and number reproduce a mutant.
"""

# ruff: noqa: E402  # environment and import path are set before the imports that need them

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reporting import run_benchmark

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import numpy as np
import torch
import yaml
from checkpoint_folders import RECORDS, write_checkpoint
from damaged_configs import OTHER_TYPES, SCALED, Config, damaged, with_rare_key
from made_results import reading
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import ropepatch
from ropepatch.cli import main
from ropepatch.extension import record as records
from ropepatch.model.checkpoint import Checkpoint

from scaling_files import write_scaling  # isort: skip

LIMIT = 30.0  # seconds of a call
MEMORY = 24 << 30  # bytes of address space of a worker
TYPES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "glm",
    "glm4",
    "olmo2",
    "olmo3",
    "deepseek_v3",
    "gpt_oss",
    "falcon",
    "mixtral",
    "cohere2",
    "stablelm",
    "smollm3",
    "ministral3",
    "granite",
    "phi",
    "persimmon",
    "starcoder2",
    "nemotron",
]
METHODS = ("yarn", "linear", "ntk", "llama3", "dynamic", "ntk-by-parts", "none")
FAULTS = (
    "tracebacks",
    "hangs",
    "wrong_ropes",
    "other_keys",
    "sources_changed",
    "global_changes",
    "unprintable",
)
HOSTILE: tuple[Any, ...] = (
    *(*OTHER_TYPES, "NaN", "1e999", -1, 2**31, 2**62, 1e308, -1e-300, "\ud800", "\x1b[2J", "x" * 5000),
    *("../..", "a\nb", "32k", "flex_attention", r"((\w|\.)+)+#", "pissa_niter_100000000"),
)
PIECES = (
    *(b"\xff", b"\x00", b"!!bool x", b"!!timestamp x", b"&a [*a]", b"9" * 400, b'"\\ud800"', b"NaN"),
    *(
        b"[" * 20_000,
        b"{{7*7}}",
        b"\xc2\x9b",
        b"\xe2\x80\xae",
        b"- " * 3000,
        b"? ",
        b"<<: *a\n",
        b"2020-01-01",
    ),
)


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Args:
        folder: The valid folder, in `sound`; if empty, those of the model types in turn.
        files: The files, of which one is damaged.
        calls: The commands that load it, as `m` in the working folder; some are drawn.
        share: The share of all mutants.
    """

    folder: str
    files: tuple[str, ...]
    calls: tuple[str, ...]
    share: int = 1


EXTEND, FURTHER = "extend m --to 256 --method {method} --out out", "extend m --to 1k --out out"
PUSH, DOCTOR, EVAL = "push m me/x --dry-run", "doctor m", "eval m --text ../text.txt --lengths 64 --windows 2"
COMPARE = "compare m --to 256 --methods yarn --text ../text.txt --windows 2 --haystacks 0"
CONFIG, RECORD = ("config.json",), ("ropepatch.json",)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SUITE_CALL = "eval ../llama --suite m/x.yaml --text ../text.txt --limit 1"
SCALING_CALLS = ("plan ../llama --method m/x.json", "methods m/x.json --json", "methods m/x.json")
KINDS = {
    "config.json": Kind("", CONFIG, ("plan m --to 256 --method {method}", DOCTOR, EXTEND, EXTEND), 16),
    "config.json, measured": Kind(
        "llama", CONFIG, (EVAL, EXTEND, f"{EVAL} --method yarn --to 256", COMPARE), 3
    ),
    "config.json, drawn": Kind("llama", CONFIG, ("explore m --out x.html", "plot m --to 256 --out out")),
    "config.json, remapped": Kind("mapped", CONFIG, (DOCTOR, EVAL)),
    "safetensors index": Kind("shards", ("model.safetensors.index.json",), (DOCTOR, EXTEND), 2),
    "safetensors header": Kind("llama", ("model.safetensors",), (DOCTOR, EXTEND, EVAL), 2),
    "adapter": Kind("adapter", ("adapter_config.json",), (DOCTOR, f"{PUSH} --force", "load_adapter m"), 2),
    "adapter's ropepatch.json": Kind("adapter", RECORD, (DOCTOR, f"{PUSH} --force", "load_adapter m")),
    "ropepatch.json": Kind("extended", RECORD, (DOCTOR, PUSH, f"{PUSH} --json", EVAL, FURTHER), 3),
    "reading.json": Kind("extended", ("reading.json",), (DOCTOR, PUSH, "probe {server} m --json"), 2),
    "results": Kind("extended", ("evaluation/a.json",), ("plot m/evaluation --out out", PUSH), 3),
    "recipe": Kind(
        "recipe", ("x.yaml",), ("extend tiny --recipe m/x.yaml --dry-run", "recipes m/x.yaml --json"), 2
    ),
    "suite": Kind("suite", ("x.yaml",), ("suites m/x.yaml --json", SUITE_CALL), 2),
    "tokenizer": Kind("llama", TOKENIZER, (DOCTOR, EXTEND, EVAL, COMPARE), 3),
    "scaling file": Kind("scaling", ("x.json",), SCALING_CALLS, 2),
    "card": Kind("extended", ("README.md",), (PUSH, DOCTOR, FURTHER), 2),
}
CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags: [ropepatch]\nmodel-index: []\n---\n# A model\n"
SUITE = {
    "methods": ["yarn"],
    "to": [256],
    "tasks": [{"task": "perplexity", "windows": 1, "lengths": [64, 128]}],
}


def make_sound(place: Path) -> None:
    """Write the valid folders."""
    (place / "text.txt").write_text(" ".join(f"word{i * i % 43}" for i in range(2000)))
    llama = write_checkpoint(place / "llama")
    write_checkpoint(place / "shards", max_shard_size="30KB")
    for model_type in TYPES:
        tiny_model(model_type).save_pretrained(place / model_type) if model_type != "llama" else None
    ropepatch.extend(llama, place / "extended", to=256, method="yarn")
    ropepatch.extend(llama, place / "mapped", to=256, method="rerope")
    (place / "extended" / "README.md").write_text(CARD)
    (place / "extended" / "evaluation").mkdir()
    for name, method in (("a", "yarn"), ("b", None)):
        result = reading(method or "baseline", [1.0, 2.0, 3.0], method=method, gain=[0.1, 0.2])
        result.write(place / "extended" / "evaluation" / f"{name}.json")
    adapter(place / "adapter")
    for folder, text in (
        ("recipe", (ROOT / "recipes" / "tiny.yaml").read_text()),
        ("suite", yaml.safe_dump(SUITE)),
    ):
        (place / folder).mkdir()
        (place / folder / "x.yaml").write_text(text)
    plan = ropepatch.plan(llama, to=256, method="yarn")
    (place / "scaling").mkdir()
    write_scaling(place / "scaling" / "x.json", plan.scaling, plan.rope, plan.target)


def adapter(folder: Path) -> None:
    """Write an untrained LoRA adapter of tiny with a record."""
    from peft import LoraConfig, get_peft_model

    tiny = Checkpoint.find("tiny", weights=True)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(tiny.load(), lora).save_pretrained(folder)
    content = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": "tiny"}))
    trained = {"adaptation": RECORDS["adapter"]["adaptation"], "base_weights": tiny.fingerprint}
    records.write(folder, records.Record.of(ropepatch.plan("tiny", to=1024, method="yarn"), **trained))


# Mutants


@dataclass(frozen=True)
class Mutant:
    """One damaged file, with its number and the commands."""

    kind: str
    folder: str
    file: str
    damage: str
    content: bytes
    calls: tuple[str, ...]


def mutant(place: Path, seed: int, number: int) -> Mutant:
    """Draw a mutant; the same for the same valid folders, seed and number."""
    draw = random.Random(f"{seed} {number}")
    name = draw.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
    kind = KINDS[name]
    folder, file = kind.folder or draw.choice(TYPES), draw.choice(kind.files)
    damage, content = changed(draw, file, (place / folder / file).read_bytes())
    calls = draw.sample(kind.calls, draw.choice((1, 1, 2)))
    method = draw.choice(METHODS)
    return Mutant(
        name, folder, file, damage, content, tuple(call.replace("{method}", method) for call in calls)
    )


def changed(draw: random.Random, file: str, data: bytes) -> tuple[str, bytes]:
    """A change of a file, in words, and the changed content."""
    if file.endswith(".safetensors"):
        size = int.from_bytes(data[:8], "little")
        damage, header = changed(draw, "header.json", data[8 : 8 + size])
        header += b" " * (-len(header) % 8)
        return damage, len(header).to_bytes(8, "little") + header + data[8 + size :]
    if file.endswith(".md") or draw.random() < 0.15:
        return changed_bytes(draw, data)
    content = yaml.safe_load(data) if file.endswith(".yaml") else json.loads(data)
    if file == "config.json":
        if "rope_theta" in (rope := content.get("rope_parameters") or {}) and draw.random() < 0.4:
            content["rope_parameters"] = rope | draw.choice(SCALED) | {"original_max_position_embeddings": 16}
        content = with_rare_key(draw, content) if draw.random() < 0.3 else content
        if draw.random() < 0.3:
            return "another rope, or a key that few have", json.dumps(content).encode()
    if draw.random() < 0.5:
        damage, text = damaged(draw, content, draw.choice((1, 1, 1, 2, 3)))
        return "; ".join(damage), text.encode(errors="surrogatepass")
    path, value = draw.choice([*places(content)][1:]), draw.choice(HOSTILE)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return f"{'.'.join(map(str, path))} = {str(value)[:40]!r}", json.dumps(content).encode()


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in JSON; of a long list only those of the first and the last."""
    yield path
    inner = list(content.items()) if isinstance(content, dict) else []
    inner = [*enumerate(content)] if isinstance(content, list) else inner
    for key, value in inner if isinstance(content, dict) or len(inner) < 5 else (*inner[:2], inner[-1]):
        yield from places(value, (*path, key))


def changed_bytes(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """A change of any bytes, in words, and the changed bytes."""
    at, piece = draw.randrange(len(data)), draw.choice(PIECES)
    lines = data.splitlines(keepends=True)
    line = draw.randrange(len(lines))
    key, colon, _ = lines[line].partition(b":")
    done: dict[str, bytes] = {
        f"cut at {at}": data[:at],
        f"byte {at}": data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
        f"{piece[:20]!r} at {at}": data[:at] + piece + data[at:],
        f"without line {line}": b"".join(lines[:line] + lines[line + 1 :]),
        f"line {line} twice": b"".join([*lines[: line + 1], *lines[line:]]),
    }
    if colon:
        done[f"{piece[:20]!r} in line {line}"] = b"".join(
            [*lines[:line], key + b": " + piece + b"\n", *lines[line + 1 :]]
        )
    name = draw.choice(list(done))
    return name, done[name]


# Outcomes of calls


def called(words: list[str]) -> tuple[int, str]:
    """The exit code and the output of a command; -1 and the traceback if it raised."""
    streams = sys.argv, sys.stdout, sys.stderr
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    sys.argv, sys.stdout, sys.stderr = ["ropepatch", *words], out, err
    code = 0
    try:
        if words[0] == "load_adapter":
            ropepatch.load_adapter(Path(words[1]))
        else:
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except ropepatch.RopepatchError as error:
        print(f"error: {error}", file=err)
        code = 2
    except BaseException:  # panics of tokenizers are not of Exception
        return -1, traceback.format_exc()
    finally:
        sys.argv, sys.stdout, sys.stderr = streams
    said = "".join(stream.buffer.getvalue().decode(errors="replace") for stream in (out, err))  # type: ignore[attr-defined]
    if code not in (0, 1, 2) or (code == 2 and "error: " not in said):
        return -1, f"exit {code}: {said}"
    return code, said


def state() -> dict[str, Any]:
    """The state of the process that no call may change."""
    return {
        "dtype": torch.get_default_dtype(),
        "threads of torch": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "torch's seed": sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "Python's seed": sha256(repr(random.getstate()).encode()).hexdigest(),
        "NumPy's seed": sha256(repr(np.random.get_state()).encode()).hexdigest(),
        "warnings": repr(warnings.filters),
        "loggers": {name: logging.getLogger(name).level for name in LOGGERS},
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "recursion": sys.getrecursionlimit(),
    }


LOGGERS = (
    None,
    "transformers",
    "ropepatch",
    "torch",
    "peft",
    "huggingface_hub",
    "accelerate",
    "datasets",
    "matplotlib",
)


def hashes(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest() for file in files}


def judged(source: Path, out: Path) -> tuple[str, str]:
    """The kind of fault of a written checkpoint, and its description; empty if there is none."""
    record = json.loads((out / "ropepatch.json").read_text())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    parts = [key for key in ("text_config", "decoder", "generator") if isinstance(after.get(key), dict)]
    kept = before.keys() - record["config_changes"].keys() - {"auto_map", "transformers_version", *parts}
    if differing := [key for key in kept if json.dumps(before[key]) != json.dumps(after.get(key))]:
        return "other_keys", ", ".join(sorted(differing))
    if record["verified"]["compared"] is False:
        return "", ""
    try:
        stock, written = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (source, out)
        )
    except Exception as error:
        return "wrong_ropes", f"stock refuses it: {type(error).__name__}: {error}"
    if after.get("rope_parameters", {}).get("rope_type") == "dynamic" or "dynamic" in json.dumps(
        record["config_changes"]
    ):
        return "", ""
    prefix = f"{record['layer_type']}_" if record.get("layer_type") else ""
    table, put = torch.tensor(record["inv_freq"]), 0
    for module in stock.modules():
        if getattr(module, f"{prefix}inv_freq", torch.empty(0)).shape == table.shape:
            setattr(module, f"{prefix}inv_freq", table.clone())
            setattr(module, f"{prefix}attention_scaling", record["attention_factor"])
            rope_type = getattr(module, "rope_type", None)
            module.rope_type = (
                {**rope_type, prefix[:-1]: "default"} if isinstance(rope_type, dict) else "default"
            )
            put += 1
    if not put:
        return "wrong_ropes", "no rotary module of that width in the source"
    ids = torch.randint(
        stock.config.get_text_config().vocab_size, (1, 32), generator=torch.Generator().manual_seed(0)
    )
    positions = torch.linspace(0, record["target"] - 1, 32).long()[None]
    how = {
        "position_ids": positions,
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
        "return_dict": True,
    }
    with torch.inference_mode():
        got = written(ids, **how).logits
        try:
            expected = stock(ids, **how).logits
        except Exception:  # a source that stock transformers does not run
            return "", ""
    off = ((got - expected).abs().max() / expected.abs().max()).item()
    return ("wrong_ropes", f"logits off by {off:.1e}") if off > 1e-4 else ("", "")


def answered(place: Path, server: str, one: Mutant, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the calls of a mutant, and count their faults."""
    counted: Counter[str] = Counter()
    found: list[str] = []
    with TemporaryDirectory(dir=place) as scratch:
        here = Path(scratch)
        shutil.copytree(place / one.folder, here / "m")
        (here / "m" / one.file).write_bytes(one.content)
        sound = hashes(here / "m")
        os.chdir(here)
        for call in one.calls:
            say(call)
            shutil.rmtree("out", ignore_errors=True)
            before, running = state(), threading.enumerate()
            code, said = called(call.replace("{server}", server).split())
            after = state()
            for thread in {*threading.enumerate()} - {*running}:
                thread.join(1)  # a pool that is ending
                if thread.is_alive():
                    after |= {"thread": thread.name}
            counted["calls"] += 1
            counted["refused"] += code == 2
            faults = {"tracebacks": said.strip()[-3000:]} if code == -1 else {}
            if code != -1 and (
                ill := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b\u2028]", said.replace("\r", ""))
            ):
                faults["unprintable"] = repr(said[max(0, ill.start() - 60) : ill.end() + 20])
            if moved := [f"{name}: {after[name]}" for name in after if before.get(name) != after[name]]:
                faults["global_changes"] = ", ".join(one[:200] for one in moved)
            if hashes(here / "m") != sound:
                faults["sources_changed"] = call
            if code == 0 and call.startswith("extend") and (here / "out" / "config.json").exists():
                say(f"judging {call}")
                fault, why = judged(here / "m", here / "out")
                counted["written"] += 1
                faults |= {fault: why} if fault else {}
            counted.update(faults.keys())
            found += [f"{fault}: {call}: {why}" for fault, why in faults.items()]
        os.chdir(place)
    return {"counted": dict(counted), "found": found, "said": said}


# Workers


def work(place: Path, server: str, seed: int, pipe: Connection) -> None:
    """Run mutants by their numbers until there are no more."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.dup2(os.open(place / "stderr.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    while (number := pipe.recv()) is not None:
        try:
            done = answered(place, server, mutant(place, seed, number), pipe.send)
        except BaseException:  # of this script
            done = {"counted": {"tracebacks": 1}, "found": [f"here: {traceback.format_exc()}"]}
        pipe.send(done)


class Answers(BaseHTTPRequestHandler):
    """A completions server that always returns the same."""

    def _say(self, content: Config) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """List one model."""
        self._say({"data": [{"id": "m", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        """Return the probabilities of the next token."""
        self.rfile.read(int(self.headers["Content-Length"]))
        tops = {f"token_id:{token}": -1.0 - token / 10 for token in range(5, 15)}
        self._say({"choices": [{"logprobs": {"top_logprobs": [tops]}}]})

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def supervised(
    place: Path, server: str, mutants: int, seed: int, workers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The outcome of every mutant; replaces a worker that does not answer in time."""
    context = multiprocessing.get_context("fork")
    left = iter(range(mutants))
    running: dict[Connection, tuple[Any, int, str, float]] = {}

    def start() -> None:
        ours, theirs = context.Pipe()
        worker = context.Process(target=work, args=(place, server, seed, theirs), daemon=True)
        worker.start()
        theirs.close()
        ask(ours, worker)

    def ask(pipe: Connection, worker: Any) -> None:
        number = next(left, None)
        pipe.send(number)
        if number is None:
            running.pop(pipe, None)
            worker.join()
        else:
            running[pipe] = worker, number, "", time.monotonic()

    for _ in range(workers):
        start()
    while running:
        for pipe in wait(list(running), timeout=1):
            assert isinstance(pipe, Connection)
            worker, number, call, _ = running[pipe]
            try:
                said = pipe.recv()
            except EOFError:
                worker.join()
                del running[pipe]
                yield number, {"counted": {"tracebacks": 1}, "found": [f"died ({worker.exitcode}): {call}"]}
                start()
                continue
            if isinstance(said, str):
                running[pipe] = worker, number, said, time.monotonic()
                continue
            yield number, said
            ask(pipe, worker)
        for pipe, (worker, number, call, since) in list(running.items()):
            if time.monotonic() - since > LIMIT:
                worker.kill()
                worker.join()
                del running[pipe]
                yield number, {"counted": {"calls": 1, "hangs": 1}, "found": [f"hangs: {call}"]}
                start()


def warm_up(place: Path, server: str) -> None:
    """Run every command once on valid files, so that all lazy imports are done."""
    for name, kind in KINDS.items():
        folder = kind.folder or "qwen2"
        for call in dict.fromkeys(kind.calls):
            one = Mutant(
                name,
                folder,
                kind.files[0],
                "",
                (place / folder / kind.files[0]).read_bytes(),
                (call.replace("{method}", "yarn"),),
            )
            done = answered(place, server, one, lambda call: None)
            if bad := [line for line in done["found"] if not line.startswith("global_changes")]:
                raise SystemExit(f"{name}, undamaged: {bad}")
            if done["counted"].get("refused"):
                raise SystemExit(f"{name}, undamaged, {call}: {done['said']}")


def benchmark(mutants: int, seed: int, workers: int) -> dict[str, Any]:
    began = time.monotonic()
    counted: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    failures: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        disable_progress_bar()
        set_verbosity_error()
        make_sound(place)
        http = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server = f"http://127.0.0.1:{http.server_port}"
        answering = multiprocessing.get_context("fork").Process(target=http.serve_forever, daemon=True)
        answering.start()
        os.environ |= {"no_proxy": "127.0.0.1", "HF_HOME": str(place / "hub")}
        warnings.simplefilter("ignore")
        os.chdir(place)
        warm_up(place, server)
        print(f"{time.monotonic() - began:.0f} s until the first mutant", file=sys.stderr, flush=True)
        for done, (number, outcome) in enumerate(supervised(place, server, mutants, seed, workers), start=1):
            one = mutant(place, seed, number)
            counted[one.kind].update({"mutants": 1} | outcome["counted"])
            for line in outcome["found"]:
                failures.append(
                    {
                        "mutant": number,
                        "kind": one.kind,
                        "of": one.folder,
                        "file": one.file,
                        "damage": one.damage[:200],
                        "found": line,
                    }
                )
                print(
                    f"{number}, {one.kind}, {one.folder}: {one.damage[:200]}\n    {line}",
                    file=sys.stderr,
                    flush=True,
                )
            if done % 200 == 0:
                print(f"{done} of {mutants}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        answering.terminate()
        os.chdir(ROOT)
    columns = ("mutants", "calls", "refused", "written", *FAULTS)
    total = sum(counted.values(), Counter())
    rows = [
        {"kind": kind} | {name: count[name] for name in columns}
        for kind, count in (*counted.items(), ("all", total))
    ]
    widths = [max(len(kind) for kind in (*KINDS, "kind")), *(max(len(name), 6) for name in columns)]
    for row in (dict(zip(("kind", *columns), ("kind", *columns), strict=True)), *rows):
        print("  ".join(str(value).rjust(width) for value, width in zip(row.values(), widths, strict=True)))
    return {
        "seed": seed,
        "workers": workers,
        "model_types": len(TYPES),
        "seconds": round(time.monotonic() - began),
        "rows": rows,
        "failures": [{**one, "found": one["found"][-300:]} for one in failures[:100]],
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, mutants=5000, seed=0, workers=2)
