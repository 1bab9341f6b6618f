"""Training of the bundled checkpoint, stage by stage, with transformers' Trainer.

Shapes: B rows of a step, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pretraining_recipe import PUBLISHED
from pretraining_rows import MATERIALS, Stock, tell
from tokenization import train_tokenizer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ropepatch.data.texts import read_documents
from ropepatch.data.tiny.passkey import PASSKEY
from ropepatch.encodings import swap, swapped
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.files import check_resumed, new_folder, read_json, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pretraining_recipe import Recipe, Stage
    from transformers import PreTrainedTokenizerFast

SAVE_EVERY = 250  # steps
RECORD = "recipe.json"  # in the folder of each stage: what decides its weights


class Rows(Dataset[dict[str, Tensor]]):
    """The steps of a stage; each row is drawn from a seed made of the recipe's seed, stage, step and row."""

    def __init__(self, stage: Stage, stock: Stock, seed: int) -> None:
        self.stage, self.stock, self.seed = stage, stock, seed

    def __len__(self) -> int:
        return self.stage.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        length = self.stage.windows[step % len(self.stage.windows)]
        names, shares = zip(*self.stage.mixture.items(), strict=True)
        rows = []
        for row in range(self.stage.tokens_per_step // length):
            seed = seed_of(self.seed, self.stage.name, step, row)
            # A seed of its own: drawn from the row's, the material would foretell the row's first draw.
            (name,) = random.Random(seed_of(seed, "material")).choices(names, shares)
            rows.append(MATERIALS[name](self.stock, length, seed))
        ids, labels = map(torch.stack, zip(*rows, strict=True))
        return {"input_ids": ids, "labels": labels}  # [B, T]


def pretrain(recipe: Recipe, out: Path) -> Path:
    """Train through all stages; a run that was interrupted resumes from its last checkpoint in ``out``.

    Every stage keeps the recipe up to itself beside its checkpoints, so that later stages may change.

    Returns:
        The folder of the finished checkpoint: weights in bfloat16, to be loaded in float32.

    Raises:
        RopepatchError: The texts of the recipe are not there, a mixture cannot be drawn at a window, or
            ``out`` holds a stage of another recipe.
    """
    documents = [document for text in recipe.texts for document in read_documents(Path(text))]
    tokenizer = make_tokenizer(recipe, documents)
    stock = Stock.of(tokenizer, documents)
    for stage in recipe.stages:  # what cannot be drawn fails now, and not after hours
        for name in stage.mixture:
            for length in stage.windows:
                MATERIALS[name](stock, length, recipe.seed)
    records = [_record(recipe, count, documents) for count in range(1, len(recipe.stages) + 1)]
    for stage, record in zip(recipe.stages, records, strict=True):
        _refuse_other(out / stage.name, record)
    set_seed(recipe.seed)
    model: Any = LlamaForCausalLM(recipe.config())
    if recipe.encoding is not None:
        swap(model, recipe.position_encoding())
    for stage, record in zip(recipe.stages, records, strict=True):
        done = out / stage.name / "done"
        if not done.is_dir():
            _put_on_record(out / stage.name, record)
            train(model, stage, Rows(stage, stock, recipe.seed), recipe.seed, out / stage.name)
            with new_folder(done) as folder:
                _save(model, folder)
        # From the disk even if just trained: the trainer leaves its casts on the model.
        loaded: Any = load_checkpoint(Checkpoint(done))
        model = loaded.float()
    published = out / PUBLISHED
    with new_folder(published) as folder:
        _publish(model, tokenizer, folder)
        shutil.rmtree(published, ignore_errors=True)
    return published


def make_tokenizer(recipe: Recipe, documents: list[str]) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer, trained on tales, on the words of the pass key prompts and on the texts."""
    tales = [tell(100, seed_of("tokenizer", index)) for index in range(800)]
    needle = PASSKEY.needle.replace("{key}", "01234")
    prompt = " ".join([PASSKEY.intro, *PASSKEY.filler, needle, PASSKEY.question])
    return train_tokenizer(
        [*tales, *[prompt] * 500, *documents],
        vocab_size=recipe.vocab_size,
        model_max_length=recipe.model["max_position_embeddings"],
    )


def train(model: Any, stage: Stage, rows: Rows, seed: int, folder: Path) -> None:
    """Train through a stage, or through the rest of it, with checkpoints in ``folder``."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=1,  # an item of Rows is a whole step
        learning_rate=stage.learning_rate,
        lr_scheduler_type=stage.lr_scheduler_type,
        warmup_steps=50,
        bf16=stage.bf16,
        use_cpu=not torch.cuda.is_available(),  # or bf16 is refused
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        seed=seed,
        data_seed=seed,
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        logging_steps=50,
        report_to=[],
        disable_tqdm=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=lambda steps: steps[0])
    last = _last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))


def _save(model: Any, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Write a model, with the encoding that it has."""
    if handle := swapped(model):
        folder.rmdir()  # it is made anew
        handle.save(folder, tokenizer)
        return
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _last_checkpoint(folder: Path) -> Path | None:
    """The last whole one: the trainer writes its state after all else."""
    saved = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return max(saved, key=lambda checkpoint: int(checkpoint.name.split("-")[1]), default=None)


def _publish(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights in bfloat16, to be loaded in float32; names that transformers 4 and other engines read too."""
    model.config.use_cache = True  # the trainer has switched it off
    _save(model.to(torch.bfloat16), folder, tokenizer)
    (folder / "model.safetensors").chmod(0o644)
    rope_theta = model.config.rope_parameters["rope_theta"]
    for name, changes in (
        ("config.json", {"dtype": "float32", "rope_theta": rope_theta}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        write_json(folder / name, read_json(folder / name) | changes)


def _record(recipe: Recipe, count: int, documents: Sequence[str]) -> dict[str, Any]:
    """All that decides the weights after so many stages; of the texts what they say, not where they are."""
    texts = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    content = recipe.model_dump(mode="json")
    return content | {"texts": texts, "stages": content["stages"][:count]}


def _refuse_other(folder: Path, record: dict[str, Any]) -> None:
    """Refuse the folder of a stage that another recipe has begun."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    file = folder / RECORD
    earlier = read_json(file) if file.is_file() else {}
    hint = "give another --out, or remove that folder to train the stage anew"
    check_resumed(f"{folder} is of another recipe", earlier, record, hint=hint)


def _put_on_record(folder: Path, record: dict[str, Any]) -> None:
    """Begin the folder of a stage with the recipe it belongs to; a folder that has begun keeps it."""
    if not (folder / RECORD).is_file():
        with new_folder(folder) as new:
            write_json(new / RECORD, record)
