"""What a model finds and how it reads, as it is and scaled: every retrieval task and the loss, in rounds.

    python eval/studies/smollm2/smollm2_study.py MODEL --text NOVELS --out DIR --json FILE [--rounds 5]

A round asks every method for the same: the loss of some documents by position, then what it finds at the
target, then at shorter lengths. Each result is a file in DIR, so the study can be stopped at any time and
goes on with the same command; its table is whole after every second round. The record in FILE is made from
whatever DIR holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.data.questions import KINDS
from ropepatch.data.sources import stream_documents
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.encodings.loading import known_dtype
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.estimates import forecast
from ropepatch.evaluation.measuring import measure
from ropepatch.evaluation.results import Result, read_result
from ropepatch.evaluation.subject import Subject, find_subject
from ropepatch.evaluation.suites import Suite, read_method
from ropepatch.evaluation.tasks import (
    LmEvalTask,
    Measurement,
    PasskeyTask,
    PerplexityTask,
    RetrievalTask,
    Task,
)
from ropepatch.files import json_text, whole_file
from ropepatch.pipeline.running import device, say_on_stderr
from ropepatch.scaling.file import FIT
from ropepatch.settings import relative_length

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import reporting

METHODS = ("linear", "ntk", "yarn", "llama3", FIT)
KEYS = "niah_multikey"  # all of its four keys, one after the other: four verdicts of one reading
FIRST = ("niah_single", KEYS)
OTHERS = (
    "niah_multiquery",
    "niah_multivalue",
    "vt",
    "fwe",
    "fact",
)  # short prompts in one round, long ones in the next
HARNESS = ("niah_single_1", "niah_multikey_2")  # of RULER in lm-eval, which make their data without a network
HARNESS_LENGTH = 4096  # the least that they count
DEPTHS = (0.5, 0.1, 0.9, 0.3, 0.7)  # one each round
SHORTER = ("1x", "0.5x", "0.25x")
WHOLE = "float32"  # the folder of what is read a second time, in this precision
SHORT_WINDOWS = 4  # of each document, read on their own
CHARACTERS = 8  # of a token, at most: shorter documents may not have the target's length
LEARNED, LEARNED_FROM = "fit.jsonl", 8  # documents
Row = dict[str, Any]


def task(kind: str, length: str, number: int, trials: int) -> Task:
    """A round's questions of one kind and length."""
    asked: dict[str, Any] = {"depths": (DEPTHS[number % len(DEPTHS)],), "trials": trials, "seed": number}
    if kind == KEYS:
        return PasskeyTask(lengths=(length,), distractors=3, queries=4, **asked)
    return RetrievalTask(kinds=(kind,), lengths=(length,), **asked)


def parts(of: argparse.Namespace, texts: Sequence[Path]) -> Iterator[tuple[str, list[Task]]]:
    """What is measured together, by the name of its folder."""

    def asked(kinds: Iterable[str], lengths: Iterable[str], number: int) -> list[Task]:
        kinds = list(kinds)
        return [task(kind, length, number, of.trials) for length in lengths for kind in kinds]

    for number in range(of.rounds):
        loss: list[Task] = []
        for text in texts[number * of.documents : (number + 1) * of.documents]:
            field = "input_ids" if of.text is None else "text"
            loss += [
                PerplexityTask(text=str(text), field=field, windows=None, documents=1),
                PerplexityTask(text=str(text), field=field, windows=SHORT_WINDOWS, lengths=("0.25x",)),
            ]
        if loss:
            yield f"loss-{number}", loss
        yield f"far-{number}", asked(FIRST, (of.to,), number)
        yield f"near-{number}", asked(FIRST, SHORTER[::-1], number)
        if of.check:
            yield f"{WHOLE}-{number}", [*asked(FIRST, SHORTER[-1:], number), *loss[1::2]]
        lengths = (of.to, SHORTER[0]) if number % 2 else SHORTER[1:]
        yield f"others-{number}", asked(OTHERS, lengths[::-1], number)
    if of.harness:
        yield (
            "harness-0",
            [LmEvalTask(tasks=HARNESS, limit=of.harness, metadata={"max_seq_lengths": [HARNESS_LENGTH]})],
        )


def rows_read(of: argparse.Namespace, trained: int, target: int) -> Counter[int]:
    """How many rows of how many tokens each method reads in all."""
    rows: Counter[int] = Counter()
    for _, tasks in parts(of, [Path(f"{index}") for index in range(of.rounds * of.documents)]):
        for one in tasks:
            if isinstance(one, LmEvalTask):  # it says itself what it reads
                continue
            length = relative_length(one.lengths[0], trained) if one.lengths else target
            rows[length] += (
                of.trials if not isinstance(one, PerplexityTask) else one.documents or one.windows or 1
            )
    return rows


def documents(of: argparse.Namespace, subject: Subject, target: int) -> list[Path]:
    """The texts of all rounds, a file each: documents of the target's length, or tales of tiny.

    The documents after these are in a file for the fit.
    """
    count, folder = of.rounds * of.documents, of.out / "texts"
    files = [folder / f"{index:03}.jsonl" for index in range(count)]
    if all(file.exists() for file in files):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    rows: Iterator[Row]
    if of.text is None:
        tales = held_out_tales(subject.tokenizer, length=target, count=count)
        rows = ({"input_ids": tale.ids.tolist()} for tale in tales)
    else:
        texts = stream_documents(of.text, split=of.split)
        rows = ({"text": text} for text in texts if len(text) > CHARACTERS * target)
    for file in files:
        _write(file, islice(rows, 1))
    if of.text is not None:
        _write(folder / LEARNED, islice(rows, LEARNED_FROM))
    return [file for file in files if file.read_text(encoding="utf-8")]


def _write(file: Path, rows: Iterable[Row]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    if not file.exists():
        with whole_file(file) as partial:
            partial.write_text("".join(lines), encoding="utf-8")


def fitted(of: argparse.Namespace, target: int) -> Path:
    """A scaling fitted to the model on documents that nothing else reads, if the folder has none yet."""
    file = of.out / f"{FIT}.json"
    if not file.exists():
        own = None if of.text is None else str(of.out / "texts" / LEARNED)
        fit = ropepatch.fit(
            of.model,
            to=target,
            text=of.fit_text or own,
            init=of.fit_init,
            minutes=of.fit_minutes,
            device=of.device,
            work=of.out / "fit-work",
            say=say_on_stderr,
        )
        fit.save(file)
    return file


def askable(tasks: Iterable[Task], subject: Subject, target: int) -> list[Measurement]:
    """Those that the tokenizer can write, ready to measure; the others are said to be left out."""
    kept = []
    for one in tasks:
        try:
            kept.append(one.prepare(subject.name, subject.tokenizer, trained=subject.trained, to=target))
        except RopepatchError as error:
            say_on_stderr(f"left out: {error}")
    return kept


def rows_of(result: Result, folder: str) -> Iterator[Row]:
    """What the record keeps of a result."""
    common = {"method": result.label, "round": int(folder.rpartition("-")[2]), "seconds": result.seconds}
    if result.task == "perplexity":
        spans = [
            [r["begin"], r["end"], r["nats"] * r["tokens"], r["tokens"]] for r in result.tables["by_position"]
        ]
        whole = result.parameters["lengths"][-1] == result.target
        yield common | {
            "kind": "loss" if whole else "short",
            "length": result.parameters["lengths"][-1],
            "digest": result.parameters["digest"],
            "parts": [[row["nats"], row["tokens"]] for row in result.tables["by_document"]],
            "spans": spans if whole else [],
        }
        return
    if result.task == LmEvalTask.name:
        scores = result.tables["scores"]
        for row in scores:
            scored = {"kind": row["task"], "length": int(row["metric"]), "n": row["n"]}
            time = {"seconds": round(result.seconds / len(scores), 2)}
            yield common | scored | time | {"correct": round(row["value"] * row["n"])}
        return
    passkeys = result.task == "passkey"
    for row in result.tables["by_length" if passkeys else "by_kind"]:
        kind = KEYS if passkeys else row["kind"]
        wanted = result.parameters["queries"] if passkeys else KINDS[kind].wanted
        found = row.get("found")
        if found is None:  # of a version that kept no list: of one prompt none is needed
            assert row["n"] == (wanted if passkeys else 1)
            found = [row["correct"] if passkeys else round(row["share"] * wanted)]
        yield common | {"kind": kind, "length": row["length"], "found": found, "wanted": wanted}


def record(out: Path) -> Row:
    """All that a folder holds."""
    results = [(read_result(file), file.parent.name) for file in sorted(out.glob("*-[0-9]*/*.json"))]
    if not results:
        raise RopepatchError(f"{out} holds no results", hint="run the study first")
    first = next(result for result, folder in results if not folder.startswith(WHOLE))
    scalings = {result.label: result.scaling for result, _ in results}
    fit = out / f"{FIT}.json"
    return {
        "task": "a real model",
        "model": {key: first.model[key] for key in ("revision", "weights", "trained")}
        | {"name": Path(first.model["name"]).name},
        "target": first.target,
        "parameters": {label: None if one is None else one["parameters"] for label, one in scalings.items()},
        "fit": json.loads(fit.read_text(encoding="utf-8"))["fit"] if fit.exists() else None,
        "env": first.env,
        "machine": reporting.environment() | {"threads": torch.get_num_threads()},
        "rows": [row for one in results if not one[1].startswith(WHOLE) for row in rows_of(*one)],
        WHOLE: [row for one in results if one[1].startswith(WHOLE) for row in rows_of(*one)],
    }


def main() -> None:
    """Measure what the folder does not hold yet, and write the record after every part."""
    of = reader().parse_args()
    try:
        run(of)
    except RopepatchError as error:
        raise SystemExit(
            f"error: {error}\nhint: {error.hint}" if error.hint else f"error: {error}"
        ) from error


def reader() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a Hub id, or tiny")
    parser.add_argument("--out", type=Path, required=True, help="the folder of all results")
    parser.add_argument("--json", type=Path, required=True, help="the file of the record")
    parser.add_argument("--text", help="documents longer than the target; none for tiny")
    parser.add_argument("--split", default="test", help="of a text from the Hub")
    parser.add_argument("--to", default="2x", help="the target")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=1, help="questions of a kind and length in a round")
    parser.add_argument("--documents", type=int, default=1, help="read in a round")
    parser.add_argument("--harness", type=int, default=0, help="prompts of each task of lm-eval, too")
    parser.add_argument("--fit-text", help="what a fit learns from; documents of --text if not given")
    parser.add_argument("--fit-init", default="auto", help="where it starts")
    parser.add_argument("--fit-minutes", type=float, default=60)
    parser.add_argument("--device", default=device())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--check", action="store_true", help="read the shortest as it is in float32, too")
    parser.add_argument("--estimate", action="store_true", help="say how long all will take, and stop")
    return parser


def run(of: argparse.Namespace) -> None:
    """All parts, one after the other."""
    subject = replace(find_subject(of.model, None, of.device), dtype=known_dtype(of.dtype))
    target = relative_length(of.to, subject.trained)
    texts = documents(of, subject, target)
    todo = [(name, askable(tasks, subject, target)) for name, tasks in parts(of, texts)]
    names = of.methods.split(",")
    everything = [one for _, ready in todo for one in ready]
    say_on_stderr(f"all of it: {forecast(subject.model, everything * (1 + len(names)))}")
    subject.forget_model()
    if of.estimate:
        return
    methods = tuple(read_method(str(fitted(of, target)) if name == FIT else name) for name in names)
    for name, ready in todo:
        if not ready:
            continue
        whole = name.startswith(WHOLE)
        tasks = tuple(one.task for one in ready)
        suite = Suite(models=(of.model,), methods=() if whole else methods, to=(of.to,), tasks=tasks)
        where: dict[str, Any] = {"device": of.device, "dtype": known_dtype(WHOLE if whole else of.dtype)}
        for result in measure(suite, out=of.out / name, **where, say=say_on_stderr):
            say_on_stderr(f"{name}: {result.task}, {result.label}, {result.seconds} s")
        with whole_file(of.json) as partial:
            partial.write_text(json_text(record(of.out)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
