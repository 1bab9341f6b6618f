"""DroPE (arXiv:2512.12167): drop the rope, train on at the old length, read at a multiple of it.

    python eval/studies/drope/drope_study.py --json eval/results/drope.json --work DIR [--only CASE]

Every training is a recipe of its own with rows of L tokens: all weights by cross-entropy on text of the
model's own kind, as in the paper, or an adapter of full rank with embeddings and norms, distilled from the
base model. It drops the rope of all layers (`p-rope` with `partial` 0), or of some, as a `smollm3` checkpoint
whose other layers are scaled by YaRN; YaRN on all layers is trained alike. Read is what was not trained on:
the first L tokens, and those up to 2 L and 4 L; tiny is asked for keys. What `--json` holds already is not
trained again.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest
from ropepatch.training.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

import study
from study import STORIES, Row, Rows, adapted, cases_parser, chosen, said, trained_on

HAYSTACKS = 40
TEXT, BASE = "cross-entropy", "distillation"
ALL, SOME, NONE = "all", "every second", "none"  # of the layers, without rope


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training; of no steps, what it begins with.

    Args:
        without: The layers whose rope is dropped.
        loss: Of the tokens of the text, or towards the base model.
        steps: How many.
        rows: Of L tokens, a step.
        learning_rate: The greatest.
    """

    without: str = ALL
    loss: str = TEXT
    steps: int = 0
    rows: int = 4
    learning_rate: float = 5e-4

    @property
    def method(self) -> dict[str, Any]:
        """The scaling, as in a recipe."""
        return {"name": "p-rope", "partial": 0.0} if self.without == ALL else {"name": "yarn"}


UNTRAINED = tuple(Trial(without=without) for without in (ALL, SOME, NONE))
TRIALS = {
    "tiny": (
        *UNTRAINED,
        *(Trial(without=without, steps=200) for without in (SOME, NONE)),
        *(Trial(steps=steps) for steps in (400, 800)),
    ),
    "babyllama-361": (
        *UNTRAINED,
        *(Trial(steps=400, learning_rate=rate) for rate in (5e-4, 2e-3, 4e-3)),
        *(Trial(loss=loss, steps=100) for loss in (TEXT, BASE)),
        *(Trial(without=without, steps=400) for without in (NONE, SOME)),
        *(Trial(without=without, steps=400, learning_rate=2e-3) for without in (NONE, SOME)),
        Trial(steps=100, rows=16, learning_rate=2e-3),
        Trial(steps=1000),
    ),
}
OF_TINY = {"tales": 0.5, "passkey": 0.35, "copies": 0.15}  # the materials that it was trained on


class Case(study.Case):
    """A checkpoint at a factor."""

    def source(self, trial: Trial, work: Path) -> Path:
        """The checkpoint that is trained: the base, or as `smollm3` without rope on some layers."""
        if trial.without != SOME:
            return self.place
        folder = work / f"{self.name}-smollm3"
        shutil.copytree(self.place, folder, dirs_exist_ok=True)
        raw = json.loads((self.place / "config.json").read_text(encoding="utf-8"))
        text = json.dumps(as_smollm3(raw, range(1, raw["num_hidden_layers"], 2)))
        (folder / "config.json").write_text(text, encoding="utf-8")
        return folder

    def recipe(self, trial: Trial, work: Path) -> Recipe:
        """Rows of L tokens."""
        own: list[dict[str, Any]] = [{"text": str(own_text(work))}]
        if self.name == "tiny":
            own = [{"generated": name, "weight": weight} for name, weight in OF_TINY.items()]
        lora, distil = None, None
        if trial.loss == BASE:
            rank = self.loaded[0].config.hidden_size
            lora = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear", "train_embeddings": True}
            distil = {"temperature": 1.0}
        return Recipe.model_validate(
            {
                "model": str(self.source(trial, work)),
                "to": self.target,
                "method": trial.method,
                "data": {
                    "sources": own,
                    "windows": [self.trained],
                    "tokens_per_batch": trial.rows * self.trained,
                    "boundaries": False,
                },
                "positions": "true-length",
                "lora": lora,
                "distil": distil,
                "trainer": {
                    "max_steps": trial.steps,
                    "learning_rate": trial.learning_rate,
                    "lr_scheduler_type": "cosine",
                    "warmup_steps": trial.steps // 10,
                    "weight_decay": 0.0,
                    "save_steps": 100,
                    "bf16": False,
                },
                "watch": {
                    "every": trial.steps,
                    "windows": 2,
                    "target": False,
                    "max_short_loss_increase": 0.99,
                },
            }
        )

    def judged(self, model: Any) -> Row:
        """Nats and tokens of each document, within L and up to 2 L and 4 L; of tiny the keys found."""
        documents, pieces = zip(*self.pieces, strict=True)
        curve, length = ropepatch.perplexity(model, None, pieces).of_documents(documents), self.trained
        spans = {"short": (0, length), "2 L": (length, 2 * length), "4 L": (2 * length, 4 * length)}
        row: Row = {name: curve.between(*span).loss.clusters for name, span in spans.items()}
        row["digest"] = digest(pieces)
        if self.name == "tiny":
            lengths = [end for _, end in spans.values()]
            found = ropepatch.passkey(model, self.loaded[1], lengths=lengths, haystacks=HAYSTACKS)
            row["keys"] = {str(length): found.found(length).clusters for length in lengths}
        return row


CASES = (Case("babyllama-361", 4, 32), Case("tiny", 4, 32))


def as_smollm3(raw: dict[str, Any], without: range) -> dict[str, Any]:
    """The config.json of a LLaMA checkpoint as that of the `smollm3` with its weights.

    Args:
        raw: Of the LLaMA checkpoint, without biases.
        without: The layers that do not rotate.
    """
    stated = LlamaConfig.from_dict(raw).to_dict()  # the defaults of smollm3 are others
    uses = [int(layer not in without) for layer in range(stated["num_hidden_layers"])]
    ours = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": uses}
    return stated | ours


def own_text(work: Path) -> Path:
    """The stories that may be trained on."""
    file = work / "own.txt"
    if not file.exists():
        documents = [str(one) for one in stream_documents(STORIES)]
        file.write_text("\n<|endoftext|>\n".join(documents[: trained_on(documents)]), encoding="utf-8")
    return file


def trained(case: Case, trial: Trial, work: Path) -> Row:
    """Train, judge, and keep no weights."""
    source, method = case.source(trial, work), dict(trial.method)
    plan = ropepatch.plan(source, to=case.target, method=method.pop("name"), **method)
    if trial.steps == 0:
        model = ropepatch.load(source, device="cpu")[0]
        with ropepatch.patch(model, plan):
            return case.judged(model)
    out = work / "-".join([case.name, *(str(value).replace(" ", "-") for value in vars(trial).values())])
    with adapted(plan, case.recipe(trial, work), out) as (model, record):
        return case.judged(model) | {key: record[key] for key in ("tokens", "seconds", "device")}


def main() -> None:
    """Train what the file does not hold yet, and write it after every training."""
    arguments = cases_parser(__doc__, work=True).parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = Rows(arguments.json, "drope")
    for case in chosen(CASES, arguments.only):
        if not rows.of(**case.named, of="base"):
            rows.add(case.named | {"of": "base"} | case.judged(case.loaded[0]), case.loaded[0])
        for trial in TRIALS[case.name]:
            if not rows.of(**case.named, of="trial", **vars(trial)):
                row = {"of": "trial", **vars(trial)} | trained(case, trial, arguments.work)
                rows.add(case.named | row, case.loaded[0])
                said(f"{case.name}: {trial}")


if __name__ == "__main__":
    main()
