"""How well a model reads under any vector, and what each reading cost.

Shapes: B rows of T tokens; P rotary pairs; C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ropepatch.data.texts import digest
from ropepatch.evaluation.running import distribute
from ropepatch.fitting.examples import Examples
from ropepatch.fitting.learnable import LearnableRope
from ropepatch.fitting.objective import Objective
from ropepatch.fitting.vectors import Vector
from ropepatch.model.head import decoded_once, decoder_of, evaluating, input_device, shadowed, token_losses
from ropepatch.model.rotary import rotating_by
from ropepatch.model.survey import Survey
from ropepatch.scaling.rope import Rope

CHUNK = 2048  # positions whose logits are held at a time
AT_ONCE = 8192  # tokens of a forward pass, unless one row is longer
ACTIVATIONS = 4 << 30  # bytes of them that are held
VALUES = 16  # that a layer holds for every token, in units of the hidden size: counted on LLaMA in bfloat16
BACKWARD = 2  # a backward pass costs as many forward passes, as is usual to count


class Problem:
    """The objective as a function of a vector.

    Args:
        model: The model, its weights frozen.
        module: The rotary module in it.
        rope: The rope of the model.
        factor: s, the target over the original window.
        examples: Windows of text.
        objective: What is minimised; here the shares of text and needles count.
        needles: Passkey prompts; None for none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        module: LearnableRope,
        rope: Rope,
        factor: float,
        examples: Examples,
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        needles: Examples | None = None,
    ) -> None:
        self.model = model
        self.rope = rope
        self.factor = factor
        self.examples = examples
        self.needles = needles
        self.objective = objective
        self.spent = 0
        self._module = module
        self._decoder = decoder_of(model)

    @property
    def num_windows(self) -> int:
        """Windows there are to choose from."""
        return len(self.examples)

    def cost(self, windows: int) -> int:
        """Forward tokens of `score` on so many windows."""
        return windows * sum(examples.length for examples, _ in self._parts(range(1)))

    def score(self, vector: Vector, windows: Sequence[int]) -> float:
        """The objective over some windows, nats per token, from forward passes alone."""
        with torch.no_grad():
            return self._sum(vector, windows)

    def gradient(self, vector: Vector, windows: Sequence[int]) -> tuple[float, Tensor]:
        """The objective and its gradient [P + 1], in the order of `Vector.flat`."""
        flat = vector.flat().detach().requires_grad_()
        # As large as the weights of single tokens are small, which float16 would round to 0.
        magnified = 2.0 ** (len(windows) * self.examples.length).bit_length()
        total = self._sum(Vector.from_flat(flat), windows, magnified)
        assert flat.grad is not None
        return total, flat.grad / magnified

    def by_window(self, vector: Vector) -> Tensor:
        """The objective of every window on its own, float64 [N]; their mean is the objective over all."""
        totals = torch.zeros(self.num_windows, dtype=torch.float64)
        for examples, share in self._parts(range(self.num_windows)):
            weights = examples.weights.double()
            losses = self.losses(vector, examples).double()
            totals += (losses * weights).sum(dim=1) * share * len(weights) / weights.sum()
        return totals

    def losses(self, vector: Vector, examples: Examples) -> Tensor:
        """The loss [N, T - 1] of every token of some rows, float32 on the CPU; processes share the work."""
        self.spent += examples.ids.numel()

        def read(part: Examples) -> Tensor:
            with torch.no_grad():
                return self._read(vector, part).cpu()

        return torch.cat(
            distribute([*_batches(examples)], read, key=lambda part: digest(part.ids), split=True)
        )

    def _parts(self, windows: Sequence[int]) -> Iterator[tuple[Examples, float]]:
        """What is read for some windows, and the share of each in the objective."""
        if self.objective.text:
            yield self.examples.rows(windows), self.objective.text
        if self.needles is not None and self.objective.needles:
            rows = [index % len(self.needles) for index in windows]
            yield self.needles.rows(rows), self.objective.needles

    def _sum(self, vector: Vector, windows: Sequence[int], magnified: float = 0.0) -> float:
        """The objective; after a backward pass of so many times it, if that is above 0."""
        backward, total = magnified > 0, 0.0
        for examples, share in self._parts(windows):
            whole = examples.weights.sum().item()
            for batch in _batches(examples):
                weights = batch.weights * (share / whole)
                with recomputing(self.model, batch.ids.numel()) if backward else nullcontext():
                    losses = self._read(vector, batch, magnified * weights if backward else None)
                total += (losses.cpu().double() * weights).sum().item()
                self.spent += batch.ids.numel() * (1 + BACKWARD * backward)
        return total

    def _read(self, vector: Vector, batch: Examples, weights: Tensor | None = None) -> Tensor:
        """Losses [B, T - 1], detached; with weights, after the backward pass of their weighted sum.

        The head is run in chunks whose graphs are gone at once, so that no more than C positions' logits are
        ever held; the gradient reaches the decoder in one piece.
        """
        self._module.vector = vector
        ids = batch.ids.to(input_device(self.model))
        if self._decoder is None:
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
            return _backward(logits, ids, torch.arange(ids.shape[1] - 1), weights)
        whole: list[Tensor] = []

        def cut(hidden: Tensor) -> Tensor:
            whole.append(hidden)
            return hidden.detach().requires_grad_(weights is not None)

        losses = []
        with decoded_once(self.model, self._decoder, ids, through=cut) as (logits_at, leaves):
            for positions in torch.split(torch.arange(ids.shape[1] - 1), max(1, CHUNK // len(ids))):
                losses.append(_backward(logits_at(positions), ids, positions, weights))
        if weights is not None:
            torch.autograd.backward(whole[0], leaves[0].grad)
        return torch.cat(losses, dim=1)


def _backward(logits: Tensor, ids: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """The losses [B, C] of the tokens after some positions; with weights, after their backward pass."""
    losses = token_losses(logits, ids[:, positions + 1])
    if weights is not None:
        (losses * weights[:, positions].to(losses.device)).sum().backward()  # type: ignore[no-untyped-call]
    return losses.detach()


def _batches(examples: Examples) -> Iterator[Examples]:
    rows = max(1, AT_ONCE // examples.length)
    for begin in range(0, len(examples), rows):
        yield Examples(examples.ids[begin : begin + rows], examples.weights[begin : begin + rows])


@contextmanager
def reading(model: PreTrainedModel, survey: Survey) -> Iterator[LearnableRope]:
    """A model with a learnable rope and frozen weights within the block; afterwards as it was."""
    site = survey.site
    module = LearnableRope(model.get_submodule(site.path), site, survey.rope)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        with evaluating(model), rotating_by(model, site.path, module):
            yield module
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def recomputing(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Of each layer only its input is held within the block, if so many tokens leave more than `ACTIVATIONS`.

    A backward pass then takes a forward pass more. The model is in eval mode, in which transformers' own
    switch does nothing.
    """
    config: Any = model.config.get_text_config()
    held = VALUES * config.hidden_size * config.num_hidden_layers * tokens * model.dtype.itemsize
    with ExitStack() as stack:
        if held > ACTIVATIONS:
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
                    stack.enter_context(shadowed(layer, again))
        yield
