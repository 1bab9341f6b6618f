"""The data set of the board: this card and eval.yaml, and the prompts of the study of long prompts as text.

    python eval/board/make.py OUT --model SMOLLM2 --texts NOVELS

SMOLLM2 is SmolLM2-135M-Instruct, of which only the tokenizer and config.json are read.
"""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from pathlib import Path

import ropepatch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "studies"), str(HERE.parent / "studies" / "pages")]

from pages_study import NOVELS, Pages  # noqa: E402

CONFIG, KINDS = "smollm2-135m", ("quote", "number", "sentence")


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, default=NOVELS)
    given = parser.parse_args()
    plan = ropepatch.plan(given.model, to="2x", method="none")
    pages = Pages.of(plan, KINDS, texts=given.texts)
    tokenizer = plan.source.tokenizer
    splits: dict[str, list[str]] = defaultdict(list)
    for number in range(pages.count):
        novel, haystack = pages.page(number, tokenizer)
        for length in (pages.window, pages.target):
            text = haystack.ids[: haystack.stops[length]]
            for question in haystack.asked[length]:
                row = {
                    "page": novel,
                    "length": length,
                    "depth": round(question.end / haystack.stops[length], 3),
                    "prompt": tokenizer.decode([*text, *question.ids]),
                    "answer": tokenizer.decode(question.answer),
                }
                split = f"x{length // pages.window}_{question.kind}"
                splits[split].append(json.dumps(row, ensure_ascii=False))
    folder = given.out / CONFIG
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for name in ("README.md", "eval.yaml"):
        shutil.copyfile(HERE / name, given.out / name)


if __name__ == "__main__":
    main()
