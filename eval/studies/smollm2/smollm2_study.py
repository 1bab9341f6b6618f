"""SmolLM2-135M beyond its window: what each scaling and map finds on long pages, and how it reads them.

    python eval/studies/smollm2/smollm2_study.py FOLDER --json eval/results/smollm2.json [--only yarn,ntk]

FOLDER is what shared/checkpoints/smollm2-135m-instruct/make.py wrote. A page is a novel with keys of two
kinds; it is read once, and its questions are asked at every length; the same reading gives the loss of its
tokens. The study resumes from its file, page by page; several may write to it at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ropepatch
from ropepatch.data.haystack import Haystack, Haystacks
from ropepatch.evaluation.comparisons import BASELINE
from ropepatch.evaluation.retrieval import Reader
from ropepatch.model.head import decoder_of, evaluating, shadowed, token_losses

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import SHARED, Row, Rows

NOVELS = SHARED / "texts" / "novels"
METHODS = (BASELINE, "yarn", "ntk", "self-extend", "llama3", "dca", "rerope", "linear")
KINDS = ("number", "sentence")
KEYS = 16  # of each kind and length
SHORTEST = 2048
BLOCK = 512  # tokens whose losses are added up
PAGES = {16384: 8, 32768: 4}


def page(index: int, target: int, tokenizer: Any) -> tuple[str, Haystack]:
    """The name of a novel, and a haystack of it."""
    novel = sorted(NOVELS.glob("*.txt"))[index]
    lengths = [SHORTEST << step for step in range((target // SHORTEST).bit_length())]
    plan = Haystacks(
        lengths=lengths,
        count=1,
        keys=KEYS,
        kinds=KINDS,
        seed=index,
        texts=[novel.read_text(encoding="utf-8")],
    )
    return novel.stem, next(plan.make(tokenizer))


@contextmanager
def reading(model: Any, ids: Tensor) -> Iterator[list[Tensor]]:
    """Collect the decoder's outputs [1, T, H] for the parts of a page, but not for its questions."""
    decoder = decoder_of(model)
    assert decoder is not None
    usual, states, read = decoder.forward, [], 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal read
        output, [*rows] = usual(*args, **kwargs), kwargs["input_ids"]
        if len(rows) == 1 and torch.equal(rows[0], ids[read : read + len(rows[0])]):
            states.append(output[0])
            read += len(rows[0])
        return output

    with shadowed(decoder, forward):
        yield states


def block_losses(model: Any, states: list[Tensor], ids: Tensor) -> list[float]:
    """The sums of the losses of tokens 1 on, in nats, of each block but a last one that is not full."""
    hidden = torch.cat(states, dim=1)[0, :-1]  # [T - 1, H]
    parts = [
        token_losses(model.lm_head(part)[None], targets[None])[0]
        for part, targets in zip(hidden.split(1024), ids[1:].split(1024), strict=True)
    ]
    return [round(block.sum().item(), 3) for block in torch.cat(parts).split(BLOCK) if len(block) == BLOCK]


def measured(model: Any, reader: Reader, haystack: Haystack) -> Row:
    """Answers by length and kind, in the order of the questions, and losses by block."""
    with evaluating(model), torch.inference_mode(), reading(model, haystack.ids) as states:
        answers = reader.answers(haystack)
        blocks = block_losses(model, states, haystack.ids[: sum(part.shape[1] for part in states)])
    row: Row = {"losses": blocks}
    for length in haystack.stops:
        for kind in KINDS:
            own = [answer for answer in answers if answer[:2] == (length, kind)]
            row[f"{kind} {length}"] = {
                "found": "".join(str(int(found)) for *_, found, _ in own),
                "log_prob": [round(log_prob, 4) for *_, log_prob in own],
            }
    return row


def main() -> None:
    """Measure what the file does not hold yet, and write it after every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="SmolLM2-135M-Instruct")
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--only", default=",".join(METHODS), help="scalings, maps, or folders of checkpoints")
    parser.add_argument("--to", type=int, default=16384, choices=sorted(PAGES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = Rows(arguments.json, "SmolLM2 beyond its window")
    for method in arguments.only.split(","):
        measure(arguments.folder, method, arguments.to, arguments.dtype, rows)


def measure(folder: Path, method: str, target: int, dtype: str, rows: Rows) -> None:
    """Add the rows of a method that are not there."""
    named = {"model": folder.name, "target": target, "method": Path(method).name}
    missing = [index for index in range(PAGES[target]) if not rows.of(**named, page=index)]
    if not missing:
        return
    model, tokenizer = ropepatch.load(method if Path(method).is_dir() else folder, dtype=dtype)
    with within(model, method, target):
        reader = Reader(model, tokens_per_batch=2**17)
        for index in missing:
            novel, haystack = page(index, target, tokenizer)
            began = time.perf_counter()
            found = measured(model, reader, haystack)
            seconds = round(time.perf_counter() - began, 1)
            stated = {"page": index, "novel": novel, "dtype": dtype}
            rows.add(named | stated | found | {"seconds": seconds}, model)
            print(f"{method} page {index}: {seconds} s", file=sys.stderr, flush=True)


def within(model: Any, method: str, target: int) -> AbstractContextManager[Any]:
    """The model under a method."""
    if method == BASELINE or Path(method).is_dir():
        return nullcontext()
    return ropepatch.patch(model, method, to=target)


if __name__ == "__main__":
    main()
