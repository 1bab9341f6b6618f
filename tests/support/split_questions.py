"""Passkeys and questions of the bundled checkpoint, read by one process or by several that share them."""

from typing import Any

import torch

import ropepatch
from ropepatch.data.templates import bundled
from ropepatch.evaluation.passkey import passkey
from ropepatch.evaluation.retrieval import Grid, answered
from ropepatch.model.head import evaluating


def asked(*, split: bool) -> dict[str, Any]:
    """What is found of every prompt, and how many prompts this process read."""
    model, tokenizer = ropepatch.load("tiny")
    prompts = 0

    def read(done: int, total: int) -> None:
        nonlocal prompts
        prompts = max(prompts, done)

    words = bundled(distractors=0).model_copy(update={"parse": r"\d+", "answer_tokens": 8})
    found: dict[str, Any] = {}
    for name, template, lengths in (("forced", None, [192, 448]), ("generated", words, [192])):
        cells = {"lengths": lengths, "depths": [0.1, 0.6, 0.9], "trials": 2}
        grid = passkey(model, tokenizer, **cells, template=template, split=split, progress=read)
        found[name] = [said for cell in grid.cells.values() for said in cell.found]
    with evaluating(model), torch.inference_mode():
        questions = Grid((0.1, 0.5, 0.9), 3, 0, ("village",)).ask(tokenizer, "niah_single", 288)
        found["questions"] = answered(model, tokenizer, questions, force=True, split=split)
    return found | {"prompts": prompts}
