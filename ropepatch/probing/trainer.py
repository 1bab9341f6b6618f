"""Check during a training that the trainer applies a checkpoint's RoPE scaling."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import READING
from ropepatch.model.in_memory import check_rope
from ropepatch.probing import reading as readings
from ropepatch.probing.asking import find, probe_model, read_reading

logger = logging.getLogger("ropepatch")


class ProbeCallback(TrainerCallback):
    """Stop a training with transformers' Trainer if the model's RoPE differs from the checkpoint's.

    Before the first step the callback probes the model, as `ropepatch.probe` does. After that, and after a
    resume, the weights have changed, so it compares the `inv_freq` tables of the rotary modules with those
    of the checkpoint's config.json. It logs each result to the logger `ropepatch`, at level INFO if the
    RoPE is right.

    Args:
        checkpoint: The checkpoint that is trained: a folder or a Hub id, with reading.json.
        every: Steps between two comparisons of the tables.
        raises: Stop the training if the RoPE is wrong; False logs a warning. Use False with 4-bit weights,
            whose quantisation error can exceed what a probe tolerates.

    Raises:
        RopepatchError: If there is no such checkpoint or it has no reading.json; during training, if the
            RoPE is wrong.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        every: int = 100,
        raises: bool = True,
    ) -> None:
        self.checkpoint, self.every, self.raises = find(checkpoint), every, raises
        if not readings.exists(self.checkpoint.folder):
            hint = "run ropepatch.probe(model, checkpoint, save_reading=True) once"
            raise RopepatchError(f"no {READING} in {self.checkpoint.name}", hint=hint)
        self.reading = read_reading(self.checkpoint)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Probe the model, or compare its tables if the training is resumed."""
        if state.global_step:
            self._look(state, given["model"])
            return
        probed = probe_model(given["model"], self.checkpoint, self.reading)
        self._tell(state, probed.is_right, str(probed.judgement))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Compare the tables of the rotary modules every few steps."""
        if state.global_step % self.every == 0:
            self._look(state, given["model"])

    def _look(self, state: Any, model: nn.Module) -> None:
        try:
            check_rope(model, self.checkpoint.config.text)
        except RopepatchError as error:
            self._tell(state, False, str(error))
        else:
            self._tell(state, True, "OK: the RoPE tables match the checkpoint")

    def _tell(self, state: Any, is_right: bool, found: str) -> None:
        line = f"{self.checkpoint.name}, step {state.global_step}: {found}"
        if not is_right and self.raises:
            hint = (
                "load the model with from_pretrained and pass no other RoPE parameters"
            )
            raise RopepatchError(line, hint=hint)
        if state.is_world_process_zero:
            logger.log(logging.INFO if is_right else logging.WARNING, line)
