"""What a checkpoint finds on long pages under every scaling and map, and how it reads them.

    python eval/studies/pages/pages_study.py MODEL --to 256k --texts BOOKS --json FILE --dry-run
    python eval/studies/pages/pages_study.py MODEL --to 256k --texts BOOKS --json FILE

MODEL is a folder, a Hub id or `tiny`. A page is a text with keys of two kinds; it is read once to the target,
and its questions are asked at every length; the same reading gives the loss of its tokens. The study resumes
from its file, page by page, and several processes may write to it at once. At its end it prints its tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ropepatch
from ropepatch.data.haystack import CHARACTERS, Haystack, Haystacks
from ropepatch.data.texts import encode
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import BASELINE
from ropepatch.evaluation.measuring import Subject, find_subject
from ropepatch.evaluation.retrieval import Reader
from ropepatch.extension.planning import plan_method
from ropepatch.files import check_resumed
from ropepatch.model.config import blueprint, forward_operations, load_config, text_config
from ropepatch.model.head import decoder_of, evaluating, shadowed, token_losses
from ropepatch.model.loading import known_dtype
from ropepatch.model.source import find_source
from ropepatch.model.survey import Survey, survey_checkpoint
from ropepatch.pipeline.running import device
from ropepatch.report.printers import markdown_rows
from ropepatch.settings import relative_length
from ropepatch.training.forecast import GIB, evaluation_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from pages_tables import KINDS, Row, all_tables, block_of, keys_of, lengths_of
from study import SHARED, Rows

NOVELS = SHARED / "texts" / "novels"
PAGES = 8
KEYS = 16
METHODS = (BASELINE, "yarn", "ntk", "self-extend", "llama3", "dca", "rerope", "linear")
QUESTION = 50  # tokens of a question and its answer, at most: 49 by the tokenizer of tiny, 26 by SmolLM2's


@dataclass(frozen=True)
class Pages:
    """Texts with keys, and the lengths at which their questions are asked.

    Attributes:
        window: L, in tokens.
        target: N, in tokens.
        lengths: Of the prompts, in tokens, the target last.
        count: Number of pages.
        keys: Questions of each kind at every length.
        texts: A folder of text files.
    """

    window: int
    target: int
    lengths: tuple[int, ...]
    count: int
    keys: int
    texts: Path

    def page(self, index: int, tokenizer: Any) -> tuple[str, Haystack]:
        """The names of a page's texts, which no other page has, and its haystack."""
        files = sorted(self.texts.glob("*.txt"))[index :: self.count]
        own: list[str] = []
        missing = self.target
        while missing > 0:
            if len(own) == len(files):
                raise RopepatchError(
                    f"the texts of page {index} in {self.texts} are {missing} tokens short of {self.target}",
                    hint="give more or longer .txt files, or fewer pages",
                )
            own.append(files[len(own)].read_text(encoding="utf-8"))
            (ids,) = encode(tokenizer, [" ".join(own[-1][: CHARACTERS * self.target].split())])
            missing -= len(ids)
        plan = Haystacks(lengths=self.lengths, count=1, keys=self.keys, kinds=KINDS, seed=index, texts=own)
        return " + ".join(file.stem for file in files[: len(own)]), next(plan.make(tokenizer))


def doubled(window: int, target: int) -> tuple[int, ...]:
    """A quarter of the window, its doubles below the target, and the target."""
    steps = range((4 * target // window).bit_length())
    return (*(n for step in steps if (n := window // 4 << step) < target), target)


# Cost


@dataclass(frozen=True)
class Cost:
    """What the pages that are not read yet take.

    Attributes:
        readings: Of pages, each to the target.
        prompts: Whole prompts of the least and of the greatest length, by which each method's first answers
            are checked.
        questions: How many are asked on the key-value caches of the readings.
        tokens: That the model reads in all, at most.
        operations: Of the forward passes under causal attention, without what a map adds.
        memory: Of a reading to the target in 16 bits, weights and key-value cache included, in bytes.
    """

    readings: int
    prompts: int
    questions: int
    tokens: int
    operations: int
    memory: int


def cost(config: Any, pages: Pages, missing: Sequence[int]) -> Cost:
    """The cost of so many pages of each method, from a configuration alone."""
    own, weights = text_config(config), sum(weight.numel() for weight in blueprint(config).parameters())
    methods, readings = sum(number > 0 for number in missing), sum(missing)
    each = len(KINDS) * pages.keys  # questions of a page and length

    def forward(tokens: int) -> int:
        return forward_operations(own, weights, tokens)

    asked = sum(each * (forward(length) - forward(length - QUESTION)) for length in pages.lengths)
    checked = forward(pages.lengths[0]) + forward(pages.target)
    return Cost(
        readings=readings,
        prompts=2 * methods,
        questions=readings * each * len(pages.lengths),
        tokens=readings * (pages.target + each * len(pages.lengths) * QUESTION)
        + methods * (pages.lengths[0] + pages.target),
        operations=readings * (forward(pages.target) + asked) + methods * checked,
        memory=2 * weights + evaluation_bytes(own, pages.target, 2, cached=True),
    )


def costs_table(costs: Sequence[tuple[str, Pages, Cost]]) -> str:
    """Tabulate costs by model."""
    heads = ("", "tokens", "readings", "questions", "whole prompts", "tokens read", "operations", "memory")
    return markdown_rows(
        heads,
        [
            (
                name,
                f"{pages.window:,} to {pages.target:,}",
                f"{of.readings:,}",
                f"{of.questions:,}",
                f"{of.prompts:,}",
                f"{of.tokens:,}",
                f"{of.operations:.1e}",
                f"{of.memory / GIB:.3g} GiB",
            )
            for name, pages, of in costs
        ],
    )


def full_cost(name: str, raw: dict[str, Any], window: int, target: int) -> tuple[str, Pages, Cost]:
    """The cost of the study as it comes, all methods on eight pages, of a configuration."""
    pages = Pages(window, target, doubled(window, target), PAGES, KEYS, NOVELS)
    return name, pages, cost(load_config(raw), pages, [pages.count] * len(METHODS))


# Measuring


@contextmanager
def reading(decoder: Any, ids: Tensor) -> Iterator[list[Any]]:
    """Collect the decoder's outputs for the parts of a page, but not for its questions.

    Raises:
        RopepatchError: The model reads every prompt whole.
    """
    usual, outputs, read, whole = decoder.forward, [], 0, 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal read, whole
        output = usual(*args, **kwargs)
        rows = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).cpu()  # GPT-NeoX's comes first
        whole += not kwargs.get("use_cache", True)
        if whole > 2:
            raise RopepatchError("this model reads every prompt whole", hint="its pages cannot be read once")
        if len(rows) == 1 and torch.equal(rows[0], ids[read : read + rows.shape[1]]):
            outputs.append(output)
            read += rows.shape[1]
        return output

    with shadowed(decoder, forward):
        yield outputs


def block_losses(model: Any, decoder: Any, outputs: list[Any], ids: Tensor, block: int) -> list[float]:
    """The sums of the losses of tokens 1 on, in nats, of each block but a last one that is not full."""
    output = outputs[-1]
    output[next(iter(output))] = torch.cat([part[0] for part in outputs], dim=1)  # [1, T, H]
    losses = []
    with shadowed(decoder, lambda *args, **kwargs: output):  # the head is the model's own code
        for places in torch.arange(output[0].shape[1] - 1).split(1024):
            at = places.to(output[0].device)
            logits = model(input_ids=ids[None].to(at.device), use_cache=False, logits_to_keep=at).logits
            losses.append(token_losses(logits[0], ids[places + 1]).cpu())
    return [round(part.sum().item(), 3) for part in torch.cat(losses).split(block) if len(part) == block]


def measured(model: Any, reader: Reader, haystack: Haystack, block: int) -> Row:
    """Answers by length and kind, in the order of the questions, and losses by block."""
    decoder = decoder_of(model)
    if decoder is None:
        raise RopepatchError(f"{type(model).__name__} gives no logits of single positions")
    with evaluating(model), torch.inference_mode():
        with reading(decoder, haystack.ids) as outputs:
            answers = reader.answers(haystack)
        read = haystack.ids[: max(haystack.stops.values())]
        row: Row = {"losses": block_losses(model, decoder, outputs, read, block)}
    for length in haystack.stops:
        for kind in KINDS:
            own = [answer for answer in answers if answer[:2] == (length, kind)]
            row[f"{kind} {length}"] = {
                "found": "".join(str(int(found)) for *_, found, _ in own),
                "log_prob": [round(log_prob, 4) for *_, log_prob in own],
            }
    return row


def measure(base: Subject, method: str, pages: Pages, rows: Rows) -> None:
    """Add the rows of a method that are not there."""
    named = names(base.name, pages.target, method)
    alike = {"model": named["model"], "target": pages.target}
    made = {}  # all of them before the first is read: a text may be too short
    for index in missing_pages(rows, named, pages):
        made[index] = text, _ = pages.page(index, base.tokenizer)
        check_same(rows.of(**alike, page=index)[:1], {"novel": text}, pages)
    if not made:
        return
    subject = base
    if Path(method).is_dir():
        base.forget_model()  # two may not fit
        subject = replace(find_subject(method, None, base.device), dtype=base.dtype, base=base)
    model = subject.model
    dtype = str(model.dtype).removeprefix("torch.")
    with within(subject, method, pages.target):
        reader = Reader(model, tokens_per_batch=2**17)
        for index, (text, haystack) in made.items():
            stated = {"page": index, "novel": text, "dtype": dtype}
            check_same(rows.of(**alike, page=index)[:1], stated, pages)
            began = time.perf_counter()
            found = measured(model, reader, haystack, block_of(pages.window))
            seconds = round(time.perf_counter() - began, 1)
            rows.add(named | stated | found | {"seconds": seconds}, model)
            print(f"{named['method']} page {index}: {seconds} s", file=sys.stderr, flush=True)


def names(model: str, target: int, method: str) -> Row:
    """What names the rows of a method."""
    return {"model": Path(model).name, "target": target, "method": Path(method).name}


def missing_pages(rows: Rows, named: Row, pages: Pages) -> list[int]:
    """The pages that a method has not read."""
    return [index for index in range(pages.count) if not rows.of(**named, page=index)]


def check_same(others: list[Row], stated: Row, pages: Pages) -> None:
    """Refuse a page that another method read otherwise."""
    for other in others:
        earlier = {key: other[key] for key in stated}
        earlier |= {"lengths": lengths_of(other), "keys": keys_of(other)}
        now = stated | {"lengths": list(pages.lengths), "keys": pages.keys}
        check_resumed("the file holds this page", earlier, now, hint="give its settings, or another --json")


def within(subject: Subject, method: str, target: int) -> AbstractContextManager[Any]:
    """The model under a method."""
    if method == BASELINE or subject.base is not None:
        return nullcontext()
    return ropepatch.patch(subject.model, method, to=target)


# Command


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a checkpoint folder, a Hub id, or tiny")
    parser.add_argument("--to", default="2x", help="the target, e.g. 16k or 2x, the default")
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--texts", type=Path, default=NOVELS, help="a folder of .txt files")
    parser.add_argument("--methods", default=",".join(METHODS), help="scalings, maps, or checkpoint folders")
    parser.add_argument("--pages", type=int, default=PAGES)
    parser.add_argument("--keys", type=int, default=KEYS, help="questions of each kind and length")
    parser.add_argument("--lengths", help="L/4, doubled up to the target, if not given; e.g. 4k,8k,16k")
    parser.add_argument("--device", help="a GPU, if there is one, if not given")
    parser.add_argument("--dtype", help="that of the weights, or the faster one on a CPU, if not given")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--dry-run", action="store_true", help="print what is left to read, from config.json")
    shown.add_argument("--table", action="store_true", help="print the tables of the file")
    return parser.parse_args(words)


def study_pages(given: argparse.Namespace) -> str:
    """Measure what the file does not hold yet, writing it after every page; the text to print."""
    source = find_source(given.model, weights=False)
    surveyed = survey_checkpoint(source, swapped=True)
    pages, methods = chosen_pages(given, surveyed), given.methods.split(",")
    rows = Rows(given.json, "beyond the window")
    if not given.table:
        for method in methods:
            if method != BASELINE and not Path(method).is_dir():  # refused before anything is read
                plan_method(surveyed, given.model, None, method, {}, pages.target)
    if given.dry_run:
        missing = [
            len(missing_pages(rows, names(given.model, pages.target, method), pages)) for method in methods
        ]
        return costs_table([(source.name, pages, cost(load_config(source.raw), pages, missing))])
    if not given.table:
        torch.set_num_threads(given.threads)
        base = find_subject(given.model, None, given.device or device())
        base = replace(base, dtype=known_dtype(given.dtype), say=lambda line: print(line, file=sys.stderr))
        for method in methods:
            measure(base, method, pages, rows)
    return all_tables(rows.of(model=Path(given.model).name), pages.window, pages.target)


def chosen_pages(given: argparse.Namespace, surveyed: Survey) -> Pages:
    """The pages that the words of the command name."""
    window = surveyed.rope.original_max_position_embeddings
    target = relative_length(given.to, window)
    lengths = doubled(window, target)
    if given.lengths:
        lengths = tuple(sorted(relative_length(length, window) for length in given.lengths.split(",")))
    if lengths[-1] != target:
        raise RopepatchError(f"the greatest length is {lengths[-1]}, the target {target}", hint="name it too")
    return Pages(window, target, lengths, given.pages, given.keys, given.texts)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    try:
        print(study_pages(arguments(words)))
    except RopepatchError as error:
        sys.exit(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))


if __name__ == "__main__":
    main()
