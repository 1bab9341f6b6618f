"""Whether a trainer computes the rope of a checkpoint, asked within the training."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ropepatch.errors import RopepatchError
from ropepatch.model import reading_file as readings
from ropepatch.model.in_memory import check_rope
from ropepatch.probing.asking import find, probe_model, read_reading

logger = logging.getLogger("ropepatch")


class ProbeCallback(TrainerCallback):
    """Stop a training by transformers' Trainer whose model has another rope than a checkpoint.

    Before the first step, while the weights are still those of the checkpoint, the model is probed as
    `ropepatch.probe` does. Later, and after a resume, answers would tell of the training: from then on the
    tables of its rotary modules are compared with those that the checkpoint's config.json gives. A line of
    the logger `ropepatch` says what came out: INFO where it is right.

    Args:
        checkpoint: A folder or a Hub id, with reading.json: what is trained, as it will be served.
        every: Steps between two looks at the tables.
        raises: Whether a wrong rope ends the training; if not, it is a warning. Weights of 4 bits may differ
            by more than a probe explains.

    Raises:
        RopepatchError: There is no such checkpoint or no reading of it; in training, if the rope is wrong.
    """

    def __init__(self, checkpoint: str | os.PathLike[str], *, every: int = 100, raises: bool = True) -> None:
        if every < 1:
            raise RopepatchError(f"every must be at least 1 step, got {every}")
        self.checkpoint, self.every, self.raises = find(checkpoint), every, raises
        if not readings.exists(self.checkpoint.folder):
            hint = "ropepatch.probe(model, checkpoint, save_reading=True) writes it"
            raise RopepatchError(f"no {readings.FILE} in {self.checkpoint.name}", hint=hint)
        self.reading = read_reading(self.checkpoint)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Probe the model, or look at its tables where a training is resumed."""
        if state.global_step:
            self._look(state, given["model"])
            return
        probed = probe_model(given["model"], self.checkpoint, self.reading)
        self._tell(state, probed.is_right, f"{probed.engine} {probed.judgement}")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look at the tables of the rotary modules now and then."""
        if state.global_step % self.every == 0:
            self._look(state, given["model"])

    def _look(self, state: Any, model: nn.Module) -> None:
        try:
            check_rope(model, self.checkpoint.config)
        except RopepatchError as error:
            self._tell(state, False, str(error))
        else:
            self._tell(state, True, "the tables of the rope are those of the checkpoint")

    def _tell(self, state: Any, is_right: bool, found: str) -> None:
        line = f"{self.checkpoint.name}, step {state.global_step}: {found}"
        if not is_right and self.raises:
            hint = "train what its config.json says: load it by from_pretrained, without another rope"
            raise RopepatchError(line, hint=hint)
        if state.is_world_process_zero:
            logger.log(logging.INFO if is_right else logging.WARNING, line)
