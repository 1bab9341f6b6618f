"""Retrieval and loss of a checkpoint on long prompts, with every scaling and position remapping.

    python eval/studies/pages/pages_study.py MODEL --to 256k --texts BOOKS --json FILE --dry-run
    python eval/studies/pages/pages_study.py MODEL --to 256k --texts BOOKS --json FILE

MODEL is a folder, a Hub id or `tiny`. A page is a prompt: a text with needles of several kinds. The model
processes it once up to the target length and answers the questions of every length. The same pass gives the
loss. A method is a scaling or a remapping, with parameters as in `yarn:beta_fast=16:beta_slow=2`, or the
folder of a checkpoint, of which rows contain the name. The study resumes from its file, page by page, and
several processes may write to it at once. It prints its tables at the end.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import ropepatch
from ropepatch.data.haystack import CHARACTERS, QUOTE, Haystack, Haystacks
from ropepatch.data.texts import digest, encode
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Machine, Subject
from ropepatch.evaluation.results import BASELINE
from ropepatch.evaluation.retrieval import Reader, Scored
from ropepatch.files import check_resumed
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import blueprint, load_config, text_config
from ropepatch.model.cost import GIB, forward_bytes, forward_operations
from ropepatch.model.head import decoder_of, evaluating, shadowed, token_losses
from ropepatch.model.precision import known_dtype
from ropepatch.processes import join

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from pages_tables import Row, all_tables, block_of, keys_of, kinds_of, lengths_of
from study import SHARED, Rows, Study, log_line, table

NOVELS = SHARED / "texts" / "novels"
PAGES, KEYS = 8, 16
KINDS = ("number", "sentence")
METHODS = (BASELINE, "yarn", "ntk", "self-extend", "llama3", "dca", "rerope", "linear")
QUESTION = 50  # tokens of a question and its answer, at most: 49 by the tokenizer of tiny, 26 by SmolLM2's


@dataclass(frozen=True)
class Pages:
    """Texts with keys, and the lengths of the prompts made of them.

    Attributes:
        window: The original context length L in tokens.
        target: The target length N in tokens.
        lengths: The lengths of the prompts in tokens, the target last.
        count: The number of pages.
        keys: The number of questions of each kind at every length.
        texts: A folder of text files.
        kinds: The kinds of questions.
    """

    window: int
    target: int
    lengths: tuple[int, ...]
    count: int = PAGES
    keys: int = KEYS
    texts: Path = NOVELS
    kinds: tuple[str, ...] = KINDS

    @classmethod
    def of(cls, plan: Any, kinds: Sequence[str], **chosen: Any) -> Pages:
        """The pages of a plan: from a quarter of the original length on, with quotes from a half."""
        window = plan.config.rope.original_max_position_embeddings
        # Quotes need room between the needles of the other kinds
        lengths = doubled(window // (2 if QUOTE in kinds else 4), plan.target)
        return cls(window, plan.target, lengths, kinds=tuple(kinds), **chosen)

    def page(self, index: int, tokenizer: Any) -> tuple[str, Haystack]:
        """The names of the texts of a page, used by no other page, and its haystack."""
        files = sorted(self.texts.glob("*.txt"))[index :: self.count]
        own: list[str] = []
        missing = self.target
        while missing > 0:
            if len(own) == len(files):
                raise RopepatchError(
                    f"the texts of page {index} in {self.texts} are {missing} tokens short of {self.target}",
                    hint="use more or longer .txt files, or fewer pages",
                )
            own.append(files[len(own)].read_text(encoding="utf-8"))
            (ids,) = encode(
                tokenizer, [" ".join(own[-1][: CHARACTERS * self.target].split())]
            )
            missing -= len(ids)
        settings: dict[str, Any] = {
            "lengths": self.lengths,
            "keys": self.keys,
            "kinds": self.kinds,
        }
        plan = Haystacks(**settings, count=1, seed=index, texts=own)
        return " + ".join(file.stem for file in files[: len(own)]), next(
            plan.make(tokenizer)
        )


def doubled(shortest: int, target: int) -> tuple[int, ...]:
    """A length, its doublings below the target length, and the target length."""
    steps = range((target // shortest).bit_length())
    return (*(n for step in steps if (n := shortest << step) < target), target)


# Cost


@dataclass(frozen=True)
class Cost:
    """The cost of the missing pages.

    Attributes:
        readings: The passes over a page, each to the target length.
        prompts: The whole prompts that check each method's first answers, at the least and greatest
            length; on a CPU, at shorter ones (`ropepatch.retrieve`).
        questions: The questions on the KV caches of the passes.
        tokens: The most tokens that the model processes.
        operations: The operations of the forward passes under causal attention, without those of a remapping.
        memory: The bytes of a pass to the target length in 16 bits, with weights and KV cache.
    """

    readings: int
    prompts: int
    questions: int
    tokens: int
    operations: int
    memory: int


def cost(config: Any, pages: Pages, missing: Sequence[int]) -> Cost:
    """The cost of so many missing pages of each method, from a configuration."""
    own, weights = (
        text_config(config),
        sum(weight.numel() for weight in blueprint(config).parameters()),
    )
    methods, readings = sum(number > 0 for number in missing), sum(missing)
    each = len(pages.kinds) * pages.keys  # questions of a page and length

    def forward(tokens: int) -> int:
        return forward_operations(own, weights, tokens)

    questions = sum(
        each * (forward(length) - forward(length - QUESTION))
        for length in pages.lengths
    )
    checked = forward(pages.lengths[0]) + forward(pages.target)
    return Cost(
        readings=readings,
        prompts=2 * methods,
        questions=readings * each * len(pages.lengths),
        tokens=readings * (pages.target + each * len(pages.lengths) * QUESTION)
        + methods * (pages.lengths[0] + pages.target),
        operations=readings * (forward(pages.target) + questions) + methods * checked,
        memory=2 * weights + forward_bytes(own, pages.target, 2, cached=True),
    )


def costs_table(costs: Sequence[tuple[str, Pages, Cost]]) -> str:
    """Tabulate costs by model."""
    counts = {
        "passes": "readings",
        "questions": "questions",
        "whole prompts": "prompts",
    }
    counts["tokens processed"] = "tokens"
    columns = {
        "": lambda one: one[0],
        "tokens": lambda one: f"{one[1].window:,} to {one[1].target:,}",
        **{
            head: lambda one, name=name: f"{getattr(one[2], name):,}"
            for head, name in counts.items()
        },
        "operations": lambda one: f"{one[2].operations:.1e}",
        "memory": lambda one: f"{one[2].memory / GIB:.3g} GiB",
    }
    return table(costs, columns)


def full_cost(
    name: str, raw: dict[str, Any], window: int, target: int
) -> tuple[str, Pages, Cost]:
    """The cost of the default study of a configuration: all methods on eight pages."""
    pages = Pages(window, target, doubled(window // 4, target))
    return name, pages, cost(load_config(raw), pages, [pages.count] * len(METHODS))


# Measuring


@contextmanager
def reading(decoder: Any, ids: Tensor) -> Iterator[list[Any]]:
    """Collect the decoder's outputs for the parts of a page, but not for its questions.

    Raises:
        RopepatchError: If the model processes every prompt whole.
    """
    usual, outputs, read, whole = decoder.forward, [], 0, 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal read, whole
        output = usual(*args, **kwargs)
        rows = (
            kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        ).cpu()  # GPT-NeoX's comes first
        whole += not kwargs.get("use_cache", True)
        if whole > 2:
            raise RopepatchError(
                "this model processes every prompt whole",
                hint="one pass cannot give the loss and the answers",
            )
        if len(rows) == 1 and torch.equal(rows[0], ids[read : read + rows.shape[1]]):
            outputs.append(output)
            read += rows.shape[1]
        return output

    with shadowed(decoder, forward):
        yield outputs


def block_losses(
    model: Any, decoder: Any, outputs: list[Any], ids: Tensor, block: int
) -> list[float]:
    """The sum of the losses of each full block of tokens in nats, from token 1 on."""
    output = outputs[-1]
    output[next(iter(output))] = torch.cat(
        [part[0] for part in outputs], dim=1
    )  # [1, T, H]
    losses = []
    with shadowed(
        decoder, lambda *args, **kwargs: output
    ):  # the head is the model's own code
        for places in torch.arange(output[0].shape[1] - 1).split(1024):
            at = places.to(output[0].device)
            logits = model(
                input_ids=ids[None].to(at.device), use_cache=False, logits_to_keep=at
            ).logits
            losses.append(token_losses(logits[0], ids[places + 1]).cpu())
    return [
        round(part.sum().item(), 3)
        for part in torch.cat(losses).split(block)
        if len(part) == block
    ]


def measured(model: Any, reader: Reader, haystack: Haystack, block: int) -> Row:
    """Answers by length and kind, in the order of the questions, and losses by block."""
    decoder = decoder_of(model)
    if decoder is None:
        raise RopepatchError(
            f"{type(model).__name__} cannot return logits of single positions"
        )
    with evaluating(model), torch.inference_mode():
        with reading(decoder, haystack.ids) as outputs:
            answers = reader.answers(haystack)
        read = haystack.ids[: max(haystack.stops.values())]
        row: Row = {"losses": block_losses(model, decoder, outputs, read, block)}
    return row | by_kind(answers, haystack.stops)


def by_kind(answers: Sequence[Scored], lengths: Iterable[int]) -> Row:
    """The answers by kind and length, in the order of the questions; of quotes, the correct tokens."""
    row: Row = {}
    for length in lengths:
        for kind in dict.fromkeys(answer[1] for answer in answers):
            own = [answer for answer in answers if answer[:2] == (length, kind)]
            _, _, depths, found, log_probs, parts = zip(*own, strict=True)
            whole = {1} == {*parts}
            row[f"{kind} {length}"] = {
                "found": "".join(map(str, found)) if whole else found,
                "log_prob": [round(log_prob, 4) for log_prob in log_probs],
            }
            if not whole:
                row[f"{kind} {length}"] |= {
                    "parts": parts[0],
                    "depth": [round(depth, 3) for depth in depths],
                }
    return row


def with_parameters(method: str) -> tuple[str, Row]:
    """The name of a method and its parameters: `yarn:beta_fast=16:beta_slow=2`."""
    name, *pairs = method.split(":")
    return name, {
        key: yaml.safe_load(value)
        for key, _, value in (pair.partition("=") for pair in pairs)
    }


class Desk:
    """The pages, and the model under its current method.

    Args:
        given: The arguments of the command.
    """

    def __init__(self, given: Namespace) -> None:
        self.given, self.model = given, Path(given.model).name
        plan = ropepatch.plan(given.model, to=given.to, method="none")
        chosen = {"count": given.pages, "keys": given.keys, "texts": given.texts}
        self.pages = Pages.of(plan, given.kinds.split(","), **chosen)
        self.config = plan.config.raw
        methods = given.methods.split(",")
        self.methods = {Path(method).name: method for method in methods}
        self._method, self._patch, self._made = (
            "",
            ExitStack(),
            dict[int, tuple[str, Haystack]](),
        )

    def cases(self) -> Iterator[Row]:
        """Every page of every method."""
        for method in self.methods:
            for index in range(self.pages.count):
                named = {
                    "model": self.model,
                    "target": self.pages.target,
                    "method": method,
                }
                yield named | {"page": index}

    def check(self, rows: Rows) -> list[int]:
        """Plan every method, and make every missing page, before the first measurement.

        Returns:
            The number of missing pages of each method.

        Raises:
            RopepatchError: If a method is unknown, a text too short, or other settings of a page in the file.
        """
        for method in self.methods.values():
            if method != BASELINE and not Path(method).is_dir():
                name, parameters = with_parameters(method)
                ropepatch.plan(
                    self.given.model, to=self.pages.target, method=name, **parameters
                )
        missing = [case for case in self.cases() if not rows.of(**case)]
        for index in (
            ()
            if self.given.dry_run
            else dict.fromkeys(case["page"] for case in missing)
        ):
            stated = {
                "novel": self.page(index)[0],
                "lengths": list(self.pages.lengths),
                "keys": self.pages.keys,
                "kinds": list(self.pages.kinds),
            }
            for other in rows.of(
                model=self.model, target=self.pages.target, page=index
            )[:1]:
                held = {
                    "novel": other["novel"],
                    "lengths": lengths_of(other),
                    "keys": keys_of(other),
                    "kinds": kinds_of(other),
                }
                hint = "use its settings, or another --json"
                check_resumed("the file contains this page", held, stated, hint=hint)
        return [
            sum(case["method"] == name for case in missing) for name in self.methods
        ]

    @cached_property
    def base(self) -> Subject:
        """The unscaled model."""
        source = Checkpoint.find(self.given.model, weights=True)
        dtype = known_dtype(self.given.dtype)
        machine = Machine(join(self.given.device), dtype, log_line)
        return Subject(self.given.model, source, machine)

    def page(self, index: int) -> tuple[str, Haystack]:
        """A page; see `Pages.page`."""
        if index not in self._made:
            self._made[index] = self.pages.page(index, self.base.source.tokenizer)
        return self._made[index]

    def measure(self, case: Row) -> Row:
        """The row of one page."""
        if case["method"] != self._method:
            self._apply(case["method"])
        novel, haystack = self.page(case["page"])
        model = self.subject.model
        dtype = str(model.dtype).removeprefix("torch.")
        stated: Row = {
            "novel": novel,
            "digest": digest([haystack.ids.tolist()]),
            "dtype": dtype,
        }
        if taught := self.subject.record.get("taught"):
            stated["taught"] = taught
        return stated | measured(
            model, self.reader, haystack, block_of(self.pages.window)
        )

    def _apply(self, name: str) -> None:
        """Change the method: patch the model, or load another checkpoint."""
        method = self.methods[name]
        self._patch.close()
        self.subject = self.base
        if Path(method).is_dir():
            self.base.forget_model()  # two may not fit
            self.subject = replace(
                self.base, name=method, source=Checkpoint(Path(method)), base=self.base
            )
        elif method != BASELINE:
            known, parameters = with_parameters(method)
            patch = ropepatch.patch(
                self.base.model, known, to=self.pages.target, **parameters
            )
            self._patch.enter_context(patch)
        self.reader, self._method = Reader(self.subject.model), name


# Command


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="a checkpoint folder, a Hub id, or tiny")
    parser.add_argument(
        "--to", default="2x", help="the target length, e.g. 16k; default: 2x"
    )
    parser.add_argument(
        "--texts", type=Path, default=NOVELS, help="a folder of .txt files"
    )
    parser.add_argument(
        "--methods",
        default=",".join(METHODS),
        help="scalings, remappings, folders",
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="of the questions")
    parser.add_argument("--pages", type=int, default=PAGES)
    parser.add_argument(
        "--keys", type=int, default=KEYS, help="questions of each kind and length"
    )
    parser.add_argument("--device", help="default: a GPU, if there is one")
    parser.add_argument(
        "--dtype", help="default: that of the weights, on a CPU the faster one"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the cost of the missing pages, from config.json",
    )


def desk_of(given: Namespace) -> Desk:
    """The desk of these arguments, made once."""
    if "desk" not in given:
        given.desk = Desk(given)
    desk: Desk = given.desk
    return desk


STUDY = Study(
    name="smollm2",
    about=__doc__,
    cases=lambda given: desk_of(given).cases(),
    measure=lambda case, given: desk_of(given).measure(case),
    options=add_options,
    inputs=lambda case: (),  # a row has the digest of its page
)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = STUDY.command().parse_args(words)
    try:
        desk = desk_of(given)
        missing = desk.check(Rows(given.json, STUDY.name))
        if given.dry_run:
            left = cost(load_config(desk.config), desk.pages, missing)
            print(costs_table([(desk.model, desk.pages, left)]))
            return
        STUDY.run(given)
        held = Rows(given.json, STUDY.name).of(model=desk.model)
        print(all_tables(held, desk.pages.window, desk.pages.target))
    except RopepatchError as error:
        sys.exit(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))


if __name__ == "__main__":
    main()
