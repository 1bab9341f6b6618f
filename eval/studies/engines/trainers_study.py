"""Check the RoPE of an extended checkpoint as trainers load it, in this process.

    pip install trl peft datasets
    python eval/studies/engines/trainers_study.py --work DIR

Each trainer loads the checkpoints of `engines_study.py`. The next-token probabilities of the model that it
would train are compared with the fingerprint, like those of a server.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from engines_study import CASES, Row, Study, checkpoint_of, served
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import ropepatch
from ropepatch.probing.reading import RIGHT

TEXT = Dataset.from_list([{"text": "Once there was a fox."}] * 2)
PAIRS = Dataset.from_list(
    [{"prompt": "Once", "chosen": " there", "rejected": " two"}] * 2
)
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def _arguments(kind: Any, place: Path, **options: Any) -> Any:
    return kind(output_dir=str(place), report_to=[], use_cpu=True, **options)


def _trl_sft(folder: Path, place: Path) -> Any:
    return SFTTrainer(
        str(folder), _arguments(SFTConfig, place, bf16=False), train_dataset=TEXT
    ).model


def _trl_sft_lora(folder: Path, place: Path) -> Any:
    adapter = LoraConfig(**LORA)
    arguments = _arguments(SFTConfig, place, bf16=False)
    return SFTTrainer(
        str(folder), arguments, train_dataset=TEXT, peft_config=adapter
    ).model


def _trl_dpo(folder: Path, place: Path) -> Any:
    return DPOTrainer(
        str(folder), args=_arguments(DPOConfig, place, bf16=False), train_dataset=PAIRS
    ).model


def _peft_reloaded(folder: Path, place: Path) -> Any:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**LORA)
    )
    model.save_pretrained(place / "adapter")
    return AutoPeftModelForCausalLM.from_pretrained(
        place / "adapter"
    ).merge_and_unload()


def _trainer_saved(folder: Path, place: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    Trainer(model, _arguments(TrainingArguments, place)).save_model(
        str(place / "saved")
    )
    return AutoModelForCausalLM.from_pretrained(place / "saved")


WAYS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "TRL SFTTrainer": ("trl", _trl_sft),
    "TRL SFTTrainer, LoRA": ("trl", _trl_sft_lora),
    "TRL DPOTrainer": ("trl", _trl_dpo),
    "PEFT adapter, reloaded and merged": ("peft", _peft_reloaded),
    "Trainer.save_model, reloaded": ("transformers", _trainer_saved),
}


def judged(model: Any, right: Path) -> dict[str, Any]:
    """The judgement on a model by the fingerprint of a checkpoint."""
    found = ropepatch.probe(model.float(), right).judgement.to_dict()
    del found["divergences"]
    return found


def cases(given: Namespace) -> Iterator[Row]:
    """Every checkpoint, loaded in every way."""
    for case in CASES:
        for way, (package, _) in WAYS.items():
            for kind in served(case):
                loaded = f"{package} {version(package)}"
                yield {"engine": way, "version": loaded, "case": case, "served": kind}


def measure(case: Row, given: Namespace) -> Row:
    """The verdict on a model, or the error."""
    folder, right = (
        checkpoint_of(case["case"], kind, given.work)
        for kind in (case["served"], RIGHT)
    )
    try:
        with tempfile.TemporaryDirectory() as place:
            return judged(WAYS[case["engine"]][1](folder, Path(place)), right)
    except Exception as error:  # any error is a result
        return {"verdict": None, "why": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    Study(
        name="trainers", about=__doc__, cases=cases, measure=measure, work=True
    ).main()
