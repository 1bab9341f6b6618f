"""How far a training is, in lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

SECONDS = "train_seconds"  # of the steps since the log before


class StepLines(TrainerCallback):
    """Says at every logging step how far it is, how fast, and how long it will take; and what was measured.

    Args:
        say: Called with each line.
        tokens_per_step: The tokens that all processes read in a step.
        base: The loss of the base model within the old context.

    Attributes:
        advance: Called after every step with how many are taken, and how many there are.
    """

    def __init__(self, say: Callable[[str], None], tokens_per_step: float, base: float) -> None:
        self._say = say
        self._base = base
        self.advance: Callable[[int, int | None], None] = lambda done, total: None
        self._tokens = tokens_per_step
        self._began = self._seconds = self._logged = 0.0
        self._steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, which stands still between steps: measurements and checkpoints do not count."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.advance(state.global_step, state.max_steps)
        self._seconds += time.perf_counter() - self._began
        self._steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Say it, and keep the time with the log, which outlives an interruption."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs and self._steps:
            state.log_history[-1][SECONDS] = self._seconds - self._logged
            self._logged = self._seconds
            per_step = self._seconds / self._steps
            left = round((state.max_steps - state.global_step) * per_step)
            self._say(
                f"step {state.global_step}/{state.max_steps}, loss {logs['loss']:.4f}, "
                f"{self._tokens / per_step:,.0f} tokens/s, {left // 60}:{left % 60:02d} left"
            )
        if "eval_short_loss" in logs:
            short = logs["eval_short_loss"]
            far = f", at the target {logs['eval_target_loss']:.4f}" if "eval_target_loss" in logs else ""
            keys = f", passkeys {logs['eval_target_passkey']:.0%}" if "eval_target_passkey" in logs else ""
            self._say(
                f"step {state.global_step}/{state.max_steps}, measured: short-context loss "
                f"{short:.4f} ({short / self._base - 1:+.2%} from the base model's {self._base:.4f})"
                f"{far}{keys}"
            )
