"""A model that people use, distilled from itself in rows of a quarter of its context, at skipped positions.

    python eval/studies/distil/smollm2_distil.py MODEL --json eval/results/smollm2-distil.json --work DIR

SmolLM2-135M-Instruct, 8,192 to 32,768 tokens: as it is, under YaRN, and under YaRN after a training. Its rows
are fairy tales, none longer than 2,048 tokens, and the teacher is the model at true positions. What `--json`
holds already is not measured again; a training that was stopped goes on from its folder in `--work`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from distil_study import SHARED, said

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import windows
from ropepatch.evaluation.results import environment
from ropepatch.files import whole_file
from ropepatch.training.recipe import Recipe

AS_IT_IS, YARN, DISTILLED = "as it is", "yarn", "yarn, distilled"
TRAINED, TARGET, ROW, STEPS = 8192, 32768, 2048, 100
NOVELS = 2  # the first 16,384 tokens of each
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
ASKED = ((16384, 1, DEPTHS), (8192, 1, DEPTHS), (32768, 1, (0.5, 0.9)))  # tokens, trials, depths
BEYOND = tuple(f"passkeys at {length}" for length, _, _ in ASKED if length > TRAINED)  # not asked as it is
QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write one sentence about the moon.",
    "What is 12 plus 7?",
    "How do I boil an egg?",
    "Give me a word that means the opposite of cold.",
    "Who wrote Romeo and Juliet?",
    "Why is the sky blue?",
)
ANSWER = 64  # tokens, at most
Row = dict[str, Any]


def recipe(model: str) -> Recipe:
    """The recipe of the training: a row of 2,048 tokens a step."""
    source: Row = {"text": str(SHARED / "texts" / "fairytales"), "min_tokens": 512}
    return Recipe.model_validate(
        {
            "model": model,
            "to": TARGET,
            "method": YARN,
            "data": {"sources": [source], "windows": [ROW], "tokens_per_batch": ROW, "boundaries": False},
            "positions": {"name": "pose", "chunks": 2},
            "lora": {"r": 16, "lora_alpha": 32, "train_norms": False},
            "distil": {"temperature": 1.0},
            "trainer": {
                "max_steps": STEPS,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 5,
                "weight_decay": 0.0,
                "logging_steps": 5,
                "save_steps": 20,
                "bf16": False,
            },
            "watch": {
                "every": STEPS,
                "text": str(SHARED / "texts" / "wikitext2" / "test.raw.txt"),
                "windows": 1,
                "target": False,
                "max_short_loss_increase": 0.99,
            },
        }
    )


def trained(model: str, out: Path) -> Row:
    """Train, or go on; the checkpoint stays."""
    if not out.exists():
        plan = ropepatch.plan(model, to=TARGET, method=YARN)
        ropepatch.adapt(plan, recipe(model), out, say=said)
    record = json.loads((out / "ropepatch.json").read_text(encoding="utf-8"))["adaptation"]
    return {key: record[key] for key in ("steps", "tokens", "seconds", "device", "gate")}


def loss(model: Any, tokenizer: Any) -> Row:
    """Nats and tokens of each novel: within a row, the old context, twice that, and what lies between."""
    pieces = [
        windows(tokenizer, [novel], length=2 * TRAINED, count=1)[0]
        for novel in list(stream_documents(SHARED / "texts" / "novels"))[:NOVELS]
    ]
    curve = ropepatch.perplexity(model, None, pieces)
    spans = {"row": (0, ROW), "trained": (0, TRAINED), "beyond": (TRAINED, 2 * TRAINED)}
    return {name: curve.between(*span).documents for name, span in spans.items()}


def passkeys(length: int, trials: int, depths: tuple[float, ...]) -> Callable[[Any, Any], Row]:
    """What finds passkeys in prompts of a length."""

    def measure(model: Any, tokenizer: Any) -> Row:
        grid = ropepatch.passkey(
            model, tokenizer, lengths=[length], depths=depths, trials=trials, progress=True
        )
        cells = [[depth, cell.correct, cell.n] for (_, depth), cell in grid.cells.items()]
        return {"length": length, "cells": cells}

    return measure


def answers(model: Any, tokenizer: Any) -> list[list[int]]:
    """What the model answers each question, greedily, after its chat template."""
    texts = []
    for question in QUESTIONS:
        ids = asked(tokenizer, question)
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=ANSWER, do_sample=False)
        texts.append(out[0, len(ids) :].tolist())
    return texts


def asked(tokenizer: Any, question: str) -> list[int]:
    """A question in tokens, as the chat template puts it."""
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def chat(said_before: list[list[int]]) -> Callable[[Any, Any], Row]:
    """What scores the base model's own answers, and gives the first words of the model's."""

    def measure(model: Any, tokenizer: Any) -> Row:
        parts, same = [], 0
        for question, answer in zip(QUESTIONS, said_before, strict=True):
            ids = asked(tokenizer, question)
            with torch.no_grad():
                logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].float()
            wanted = torch.tensor(answer)
            parts.append(
                [torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item(), len(answer)]
            )
            same += int((logits.argmax(-1) == wanted).sum())
        own = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers(model, tokenizer)]
        return {"nats": parts, "same": same, "answers": own}

    return measure


def main() -> None:
    """Train and measure what the file does not hold yet, and write it after every measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the trained checkpoint")
    of = parser.parse_args()
    of.work.mkdir(parents=True, exist_ok=True)
    known = json.loads(of.json.read_text(encoding="utf-8")) if of.json.exists() else {}
    rows: list[Row] = known.get("rows", [])
    base, tokenizer = ropepatch.load(of.model, dtype=torch.bfloat16)
    env = environment(base) | {"threads": torch.get_num_threads()}

    def missing(subject: str, name: str) -> bool:
        return not any((row["of"], row["measure"]) == (subject, name) for row in rows)

    def add(subject: str, name: str, row: Row, began: float) -> None:
        seconds = round(time.perf_counter() - began, 1)
        rows.append({"of": subject, "measure": name, "wall": seconds} | row)
        record = {"task": "distillation of a real model", "rows": rows, "env": env}
        with whole_file(of.json) as partial_file:
            partial_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        said(f"{subject}: {name}, {seconds} s")

    if missing(DISTILLED, "training"):
        began = time.perf_counter()
        add(DISTILLED, "training", trained(of.model, of.work / "distilled"), began)
    for name, measure in measures(answers(base, tokenizer)):
        for subject in (DISTILLED, YARN, AS_IT_IS):
            if missing(subject, name) and not (subject == AS_IT_IS and name in BEYOND):
                began = time.perf_counter()
                with subject_of(subject, base, of.work) as model:
                    row = measure(model, tokenizer)
                add(subject, name, row, began)


@contextmanager
def subject_of(name: str, base: Any, work: Path) -> Iterator[Any]:
    """The model that is measured."""
    if name == DISTILLED:
        yield ropepatch.load(work / "distilled", dtype=torch.bfloat16)[0]
        return
    with ropepatch.patch(base, YARN, to=TARGET) if name == YARN else nullcontext():
        yield base


def measures(said_before: list[list[int]]) -> Iterator[tuple[str, Callable[[Any, Any], Row]]]:
    """What is measured of each model, by name, the quickest first."""
    yield "chat", chat(said_before)
    yield "loss", loss
    for length, trials, depths in ASKED:
        yield f"passkeys at {length}", passkeys(length, trials, depths)


if __name__ == "__main__":
    main()
