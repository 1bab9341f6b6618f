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

from ropepatch.data.texts import stream_texts
from ropepatch.data.tiny.passkey import PASSKEY
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.encodings.swapping import swap, swapped
from ropepatch.files import check_resumed, new_folder, read_json, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pretraining_recipe import Recipe, Stage
    from transformers import PreTrainedTokenizerFast

SAVE_EVERY = 250  # steps
# In the folder of each stage: the settings that decide its weights
RECORD = "recipe.json"


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
            # A separate seed: with the row's, the material would determine the row's first draw.
            (name,) = random.Random(seed_of(seed, "material")).choices(names, shares)
            rows.append(MATERIALS[name](self.stock, length, seed))
        ids, labels = map(torch.stack, zip(*rows, strict=True))
        return {"input_ids": ids, "labels": labels}  # [B, T]


def pretrain(recipe: Recipe, out: Path) -> Path:
    """Train through all stages; an interrupted run resumes from its last checkpoint in ``out``.

    The folder of a stage contains the recipe up to this stage, so that later stages may change.

    Returns:
        The folder of the finished checkpoint: weights in bfloat16, to be loaded in float32.

    Raises:
        RopepatchError: If texts of the recipe are missing, a mixture cannot be drawn at a window, or ``out``
            contains a stage of another recipe.
    """
    documents = [document for text in recipe.texts for document in stream_texts(text)]
    tokenizer = make_tokenizer(recipe, documents)
    stock = Stock.of(tokenizer, documents)
    for stage in recipe.stages:  # rows that cannot be drawn fail now, not after hours
        for name in stage.mixture:
            for length in stage.windows:
                MATERIALS[name](stock, length, recipe.seed)
    records = [
        _record(recipe, count, documents) for count in range(1, len(recipe.stages) + 1)
    ]
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
            train(
                model,
                stage,
                Rows(stage, stock, recipe.seed),
                recipe.seed,
                out / stage.name,
            )
            with new_folder(done) as folder:
                _save(model, folder)
        # Loaded even if just trained: the trainer leaves its casts on the model.
        loaded: Any = load_checkpoint(Checkpoint(done))
        model = loaded.float()
    published = out / PUBLISHED
    with new_folder(published) as folder:
        _publish(model, tokenizer, folder)
        shutil.rmtree(published, ignore_errors=True)
    return published


def make_tokenizer(recipe: Recipe, documents: list[str]) -> PreTrainedTokenizerFast:
    """Train the recipe's tokenizer on synthetic stories, passkey prompts and the texts."""
    tales = [tell(100, seed_of("tokenizer", index)) for index in range(800)]
    needle = PASSKEY.needle.replace("{key}", "01234")
    prompt = " ".join([PASSKEY.intro, *PASSKEY.filler, needle, *PASSKEY.question])
    return train_tokenizer(
        [*tales, *[prompt] * 500, *documents],
        vocab_size=recipe.vocab_size,
        model_max_length=recipe.model["max_position_embeddings"],
    )


def train(model: Any, stage: Stage, rows: Rows, seed: int, folder: Path) -> None:
    """Train or resume a stage, with checkpoints in ``folder``."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=1,  # an item of Rows is a whole step
        learning_rate=stage.learning_rate,
        lr_scheduler_type=stage.lr_scheduler_type,
        warmup_steps=50,
        bf16=stage.bf16,
        use_cpu=not torch.cuda.is_available(),  # else transformers rejects bf16
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
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=lambda steps: steps[0],
    )
    last = _last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))


def _save(
    model: Any, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> None:
    """Save a model with its encoding."""
    if handle := swapped(model):
        folder.rmdir()  # `save` creates it
        handle.save(folder, tokenizer)
        return
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint: the trainer writes its state last."""
    saved = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return max(
        saved, key=lambda checkpoint: int(checkpoint.name.split("-")[1]), default=None
    )


def _publish(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save weights in bfloat16, to be loaded in float32, with the config keys of transformers 4."""
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
    """Return the settings that decide the weights after ``count`` stages, with a hash of the texts."""
    texts = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    content = recipe.model_dump(mode="json")
    return content | {"texts": texts, "stages": content["stages"][:count]}


def _refuse_other(folder: Path, record: dict[str, Any]) -> None:
    """Raise `RopepatchError` if the folder of a stage belongs to another recipe."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    file = folder / RECORD
    earlier = read_json(file) if file.is_file() else {}
    hint = "give another --out, or remove that folder to train the stage anew"
    check_resumed(f"{folder} is of another recipe", earlier, record, hint=hint)


def _put_on_record(folder: Path, record: dict[str, Any]) -> None:
    """Create the folder of a stage with its recipe, unless it exists."""
    if not (folder / RECORD).is_file():
        with new_folder(folder) as new:
            write_json(new / RECORD, record)
