"""transformers' Trainer for long context: packed sequences, loss in chunks, and our evaluation."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.retrieval import retrieve
from ropepatch.extension.record import ShortContextCheck
from ropepatch.files import remove
from ropepatch.progress import Advance, Say, unseen
from ropepatch.training.loss import causal_lm_loss, linear_head
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.run import PARTIAL, Run, checkpoints, splits_weights
from ropepatch.training.teacher import Teacher

DEPTHS = 5  # equal parts of the target, with equally many passkeys
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
TORCH_WRITES = "inline_container"  # in torch's errors about the disk


class LongContextTrainer(Trainer):
    """Trains on `Batches` in their order; evaluates with `measure`.

    Args:
        run: The run.
        pieces: The held-out text of the evaluation.
        teacher: The teacher of a self-distillation.
        callbacks: Further callbacks.
        **arguments: Further arguments of transformers' Trainer.
    """

    # `compute_loss` divides by the labels of all accumulated batches
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        run: Run,
        pieces: Sequence[Tensor],
        teacher: Teacher | None,
        callbacks: Sequence[TrainerCallback],
        **arguments: Any,
    ) -> None:
        self.stop = SaveOnSignal(run.say)
        super().__init__(
            data_collator=lambda batches: batches[0],
            eval_dataset=[],  # unused: `evaluate` has its own
            callbacks=[self.stop, *callbacks],
            **arguments,
        )
        self.remove_callback(PrinterCallback)  # stdout is for results
        self.run, self.pieces, self.teacher = run, pieces, teacher
        # Else the Trainer does not count num_items_in_batch
        self.model_accepts_loss_kwargs = True
        # transformers 5.4 and accelerate 1.15 both divide gradients by it, once too often.
        self.accelerator.gradient_accumulation_steps = 1

    @cached_property
    def head(self) -> nn.Linear | None:
        """See `linear_head`; found once the model is wrapped."""
        return linear_head(self.model_wrapped)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; with one process a signal stops it after the current step is saved, with several at once."""
        alone = self.run.processes.count == 1
        try:
            with self.stop.listening() if alone else nullcontext():
                return super().train(*args, **kwargs)
        finally:
            for callback in self.callback_handler.callbacks:
                if writer := getattr(callback, "tb_writer", None):
                    writer.close()  # it has threads

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        rows: Any = self.train_dataset
        return SequentialSampler(rows)

    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run a forward and backward pass with attention within the segments of the batch."""
        with packed_attention(model):
            return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss of a batch, divided by the number of labels of the whole step."""
        distilled = None if self.teacher is None else self.teacher.loss(inputs)
        loss = causal_lm_loss(
            model, inputs, num_items_in_batch, head=self.head, distilled=distilled
        )
        if num_items_in_batch is not None:
            # Data parallelism averages over the processes
            loss = loss * self.run.processes.count
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Run our evaluation and log it."""
        with self.accelerator.autocast():
            # FSDP2 cannot train weights gathered in inference mode
            _ = self.head
            model = self.accelerator.unwrap_model(self.model)
            measured = measure(self.run, self.pieces, model)
        metrics = {f"eval_{name}": value for name, value in measured.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and raise `RopepatchError` if the loss is not finite."""
        super().log(logs, *args, **kwargs)
        if not math.isfinite(logs.get("loss", 0.0)):
            raise RopepatchError(
                f"the loss is {logs['loss']} at step {self.state.global_step}",
                hint=f"lower learning_rate or raise warmup_steps, and use another {argument('out')}",
            )

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.folder / PARTIAL)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        folder = self.run.folder
        partial = folder / PARTIAL / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        with explaining_disk(f"the checkpoint of step {step}", partial):
            super()._save_checkpoint(model, trial)
            self.run.processes.wait()
            if self.args.should_save:
                partial.rename(folder / partial.name)
                limit: Any = self.args.save_total_limit
                for old in checkpoints(folder)[:-limit]:
                    remove(old)


class SaveOnSignal(TrainerCallback):
    """Stops a training at SIGINT, SIGTERM or SIGHUP after the current step is saved.

    A second signal stops it at once, and so does one when there is no unsaved step. At every save it logs, so
    that a resumed run averages losses over the same steps. At the end it evaluates.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._handlers: dict[int, Any] = {}  # those before
        self._heard: int | None = None
        self._unsaved = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals within the block; afterwards pass a received one to its previous handler."""
        for number in SIGNALS if current_thread() is main_thread() else ():
            handler = signal.getsignal(number)
            if callable(handler):  # neither ignored nor the default
                self._handlers[number] = handler
                signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        if self._heard is not None:
            self._handlers[self._heard](self._heard, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._heard is not None or not self._unsaved:
            self._handlers[number](number, frame)
        self._heard = number
        self._say("saving after this step; interrupt again to stop at once")

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Take intervals from the current recipe instead of the checkpoint's state."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set what is due after a step; save and stop, if a signal has arrived."""
        self._unsaved += 1
        self.on_evaluate(args, state, control)
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True
        control.should_log = control.should_log or control.should_save

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop, if a signal arrived during the evaluation."""
        if self._heard is not None:
            control.should_save = control.should_training_stop = True

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Note that all steps are saved."""
        self._unsaved = 0


class ProgressLines(TrainerCallback):
    """Prints progress and the time left.

    Args:
        say: Takes the lines.
        advance: Takes the steps done and those of the training.
        tokens_per_step: Training tokens of a step.
    """

    def __init__(self, say: Say, advance: Advance, tokens_per_step: int) -> None:
        self._say, self._advance = say, advance
        self._tokens = tokens_per_step
        self._began = 0.0
        self._spent: list[float] = []  # on each step since the last line

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock, which excludes evaluations and checkpoints."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self._spent.append(time.perf_counter() - self._began)
        self._advance(state.global_step, state.max_steps)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Print the progress."""
        if not state.is_world_process_zero or not logs:
            return
        step = f"step {state.global_step}/{state.max_steps}"
        if "loss" in logs and self._spent:
            per_step = sum(self._spent) / len(self._spent)
            self._spent.clear()
            left = round((state.max_steps - state.global_step) * per_step)
            self._say(
                f"{step}, loss {logs['loss']:.4f}, {self._tokens / per_step:,.0f} tokens/s, "
                f"{left // 60}:{left % 60:02d} left"
            )
        measured = [
            f"{name.removeprefix('eval_')} {value:.4f}"
            for name, value in logs.items()
            if name.startswith("eval_")
        ]
        if measured:
            self._say(f"{step}, evaluation: {', '.join(measured)}")


@contextmanager
def explaining_disk(what: str, folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one line, and remove the partial folder."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, RuntimeError) and TORCH_WRITES not in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise RopepatchError(
            f"cannot save {what}: {reason}",
            hint="free some space and run the same command again: it resumes from the last checkpoint",
        ) from error


def history(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the log into one row per step."""
    rows: dict[int, dict[str, Any]] = {}
    for logged in log_history:
        row = rows.setdefault(logged["step"], {"step": logged["step"]})
        for key, value in logged.items():
            # Summaries of one session
            if key != "epoch" and not key.startswith("train_"):
                row[key.removeprefix("eval_")] = value
    return list(rows.values())


# Evaluation


def measure(
    run: Run, pieces: Sequence[Tensor], model: PreTrainedModel
) -> dict[str, float]:
    """Measure loss (nats/token) within the original length and at the target, and passkey accuracy.

    Args:
        run: The run.
        pieces: Held-out text, [target] each, or [L] for no loss at the target.
        model: The model.
    """
    watch, target = run.recipe.watch, run.plan.target
    split = not splits_weights()
    curve = perplexity(model, None, pieces, split=split)
    measured = {"short_loss": curve.at(run.trained).value}
    if len(pieces[0]) >= target:
        measured["target_loss"] = curve.between(target // 2, target).value
    if watch.target and watch.passkey_trials:
        found = retrieve(
            model,
            run.source.tokenizer,
            lengths=[target],
            haystacks=DEPTHS * watch.passkey_trials,
            keys=1,
            kinds=("passkey",),
            split=split,
        )
        measured["target_passkey"] = found.found(target).value
    return measured


def short_context_loss(
    run: Run,
    pieces: Sequence[Tensor],
    model: PreTrainedModel,
    advance: Advance = unseen,
    *,
    split: bool,
) -> Mean:
    """Measure the loss (nats/token) of the first L tokens, without running beyond them.

    With ``split``, the processes share the work.
    """
    begins = [piece[: run.trained] for piece in pieces]
    curve = perplexity(model, None, begins, split=split, progress=advance)
    return curve.at(run.trained)


def short_context_check(base: Mean, now: Mean, most: float) -> ShortContextCheck:
    """Compare the losses of two models within the original length, paired by text."""
    change, interval = difference(now, base), None
    if not change.missing:
        low, high = change.interval()
        interval = low / base.value, high / base.value
    return ShortContextCheck.of(base.value, now.value, most, interval)
