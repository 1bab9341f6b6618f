"""The loss of a model as a function of a vector, its gradient, and the cost of each pass.

The loss of a token is its cross-entropy or, with a teacher, the Kullback-Leibler divergence from the base
model with a position remapping to the model; at skipped positions, from the base model, with shortened
jumps. The loss of an answer (`ropepatch.data.questions`) is always its cross-entropy. In training, the
tokens within the original length have at least the weight `SHORT` of 1.

Shapes: N windows of T tokens; B of them at once; P rotary pairs; C positions of a chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ropepatch.attention import Remapped
from ropepatch.attention.modeling_position_remapping import precise
from ropepatch.data.texts import digest
from ropepatch.evaluation.exam import Exam
from ropepatch.evaluation.retrieval import Retrieval
from ropepatch.extension.queries import QueryLayers
from ropepatch.fitting.vectors import Vector
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.head import decoded_once, decoder_of, evaluating, input_device, shadowed, token_losses
from ropepatch.model.rotary import RotarySite, RotarySubstitute, rotating_by, scaled_twin
from ropepatch.processes import ALONE, Processes
from ropepatch.scaling.rope import Frequencies, Rope

CHUNK = 2048  # positions whose logits are held at a time
TAUGHT = 1 << 30  # bytes of the teacher's hidden states to cache
AT_ONCE = 8192  # tokens of a forward pass, unless one window is longer
ACTIVATIONS = 4 << 30  # bytes of activations without recomputation
VALUES = 16  # activations of a layer per token, in units of the hidden size, for LLaMA in bfloat16
SHORT = 0.6  # least share of the weight for tokens within the original length
BACKWARD = 2  # cost of a backward pass in forward passes


class LearnableRope(RotarySubstitute):
    """The stock rotary module without `no_grad`, with frequencies that have gradients.

    The stock class computes in its own layout and precision, as in
    `ropepatch.extension.patching.ScaledRope`. Every call computes its `inv_freq` and `attention_scaling` from
    `vector` and the RoPE of the checkpoint.
    """

    inv_freq: Tensor

    def __init__(self, stock: nn.Module, site: RotarySite, rope: Rope) -> None:
        super().__init__(stock)
        self.site = site
        self.carried_attention_factor = rope.carried_attention_factor
        self.__dict__["inv_freq"] = rope.inv_freq()
        self.vector = Vector.unscaled(rope)
        unwrapped: Callable[..., Any] = inspect.unwrap(site.rotary_class.forward)
        self.__dict__["compute"] = unwrapped

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the stock class's output, e.g. cos and sin, for x [B, T, H] at position_ids [B, T]."""
        inv_freq = self.inv_freq.to(x.device) * torch.exp(-self.vector.log_divisors.to(x.device))
        factor: Any = self.carried_attention_factor * torch.exp(self.vector.log_attention.to(x.device))
        table = scaled_twin(self.stock, self.site, Frequencies(inv_freq, factor))
        return self.__dict__["compute"](table, x, position_ids, *args, **kwargs)


@contextmanager
def learnable(
    model: PreTrainedModel, source: Checkpoint, queries: QueryLayers | None = None
) -> Iterator[LearnableRope]:
    """Give a model a learnable RoPE and frozen weights within the block, and restore it afterwards.

    The vector's query factors multiply the queries of the layers in ``queries``.
    """
    site = source.site
    module = LearnableRope(model.get_submodule(site.path), site, source.rope)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)

    def multiply(layers: QueryLayers, index: int, attention: nn.Module, *hooked: Any) -> Tensor:
        projected: Tensor = hooked[-1]  # after the projection and its input
        if not module.vector.log_queries.numel():
            return projected
        count, *shape = layers.shape
        factors = module.vector.log_queries.view(count, 2, *shape)[index]
        return layers.multiplied(attention, projected, factors)

    hooks = []
    if queries is not None:
        for index, attention in enumerate(queries.modules.values()):
            multiplying = partial(multiply, queries, index, attention)
            hooks.append(attention.q_proj.register_forward_hook(multiplying))
    try:
        with evaluating(model), rotating_by(model, site.path, module):
            yield module
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trainable:
            parameter.requires_grad_(True)


class Outcome(NamedTuple):
    """The validation of a vector, in nats per token."""

    loss: float  # weighted mean over all tokens
    short: float  # within the original length
    log_prob: float  # of the answers at the target; 0 without an exam


class FitLoss:
    """The mean loss over windows of one length, in nats per token, as a function of a vector.

    Args:
        teacher: The teacher's remapping, removed from the model; None for the cross-entropy of the text.
        processes: Processes that share the validation.
        answers: For each window [T], the weights of its tokens as answers; None for none.
        positions: For each window [T], skipped positions; None for true ones. The teacher reads the
            window at these, with each jump shortened so that the last token is within the original length.
        target: The target length in tokens; None for the length of a window.
        exam: The retrieval questions of a validation; None for none.

    Attributes:
        ids: [N, T] int64.
        factor: s, the length of a window over the original length.
        skips: Whether its windows have skipped positions.
        spent: Forward tokens so far, without those of the teacher.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        module: LearnableRope,
        rope: Rope,
        windows: Sequence[Tensor],
        teacher: Remapped | None = None,
        processes: Processes = ALONE,
        *,
        answers: Sequence[Tensor] | None = None,
        positions: Sequence[Tensor] | None = None,
        target: int | None = None,
        exam: Exam | None = None,
    ) -> None:
        self.model, self.module, self.rope, self.spent = model, module, rope, 0
        self.processes, self.exam = processes, exam
        self.ids = torch.stack([torch.as_tensor(window, dtype=torch.long) for window in windows])
        self._answers = torch.zeros(self.ids.shape) if answers is None else torch.stack([*answers])
        length, trained = self.ids.shape[1], rope.original_max_position_embeddings
        self.skips = positions is not None
        true = torch.arange(length).expand_as(self.ids)
        self._positions = true if positions is None else torch.stack([*positions])
        self._taught_at = true + (self._positions - true).clamp(max=max(0, trained - length))
        self.factor, self.teacher, self._trained = (target or length) / trained, teacher, trained
        self._weights = _weights(length - 1, min(length, trained) - 1)
        self._decoder = decoder_of(model)
        self._taught: dict[str, Tensor] = {}  # by the digest of a window and its positions

    def cost(self, windows: int) -> int:
        """Return the forward tokens of `score` on a number of windows."""
        return windows * self.ids.shape[1]

    def score(self, vector: Vector, windows: Sequence[int]) -> float:
        """Compute the loss over some windows, without gradients."""
        total = 0.0
        with torch.no_grad():
            for rows in _batches(self.ids, windows):
                total += self._weighted(self._losses(vector, rows))
                self.spent += self.cost(len(rows))
        return total / self._scored(windows)

    def gradient(self, vector: Vector, windows: Sequence[int]) -> tuple[float, Tensor]:
        """Compute the loss and its gradient, in the order of `Vector.flat`."""
        flat, total = vector.flat().detach().requires_grad_(), 0.0
        # Loss scaling: float16 would round the weight of a single token to 0.
        scale = 2.0 ** (len(windows) * self.ids.shape[1]).bit_length()
        for rows in _batches(self.ids, windows):
            with recomputing(self.model, self.cost(len(rows))):
                learned = Vector.from_flat(flat, self.rope.num_pairs)
                losses = self._losses(learned, rows, self._weights * (scale / self._scored(windows)))
            total += self._weighted(losses)
            self.spent += self.cost(len(rows)) * (1 + BACKWARD)
        assert flat.grad is not None
        return total / self._scored(windows), flat.grad / scale

    def validate(self, vector: Vector) -> Outcome:
        """Compute the training loss over all windows, the short-context loss, and the answer log-prob."""
        losses = precise(self.token_losses(vector))
        short, log_prob = losses[:, : self._trained - 1].mean().item(), 0.0
        if self.exam is not None:
            log_prob = self.answers(vector, self.exam).log_prob(self.exam.length).value
        return Outcome(self._weighted(losses) / losses.numel(), short, log_prob)

    def answers(self, vector: Vector, exam: Exam) -> Retrieval:
        """Run an exam with a vector; processes share the work."""
        self.spent += exam.tokens
        self.module.vector = vector
        return exam.of_model(self.model, split=self.processes.count > 1)

    def token_losses(self, vector: Vector) -> Tensor:
        """Compute the loss [N, T - 1] of every token, float32 on the CPU; processes share the work."""
        self.spent += self.ids.numel()

        def losses_of(rows: Tensor) -> Tensor:
            with torch.no_grad():
                return self._losses(vector, rows).cpu()

        batches = _batches(self.ids, range(len(self.ids)))
        return torch.cat(self.processes.deal(batches, losses_of, lambda rows: digest(self.ids[rows])))

    def _weighted(self, losses: Tensor) -> float:
        """Add up the weighted losses [B, T - 1] of some windows."""
        return float(precise(losses @ self._weights.to(losses)).sum())

    def _scored(self, windows: Sequence[int]) -> int:
        """Count the tokens of some windows that have a loss."""
        return len(windows) * (self.ids.shape[1] - 1)

    def _losses(self, vector: Vector, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute losses [B, T - 1] of rows [B], detached; with weights, also run their backward pass.

        The head runs in chunks whose graphs are freed at once, so that at most C positions' logits are held.
        The decoder has one backward pass.
        """
        taught = None if self.teacher is None else self._teach(rows, self.teacher)
        self.module.vector = vector
        device = input_device(self.model)
        ids, answers = self.ids[rows].to(device), self._answers[rows, 1:].to(device)
        where = self._at(self._positions[rows])
        if self._decoder is None:
            logits = self.model(input_ids=ids, use_cache=False, **where).logits
            if taught is not None:
                logits = torch.cat([logits, taught.to(logits)])
            return _backward(logits[:, :-1], ids, answers, torch.arange(ids.shape[1] - 1), weights)
        decoded: list[Tensor] = []

        def cut(hidden: Tensor) -> Tensor:
            decoded.append(hidden)
            both = hidden if taught is None else torch.cat([hidden, taught.to(hidden)])
            return both.detach().requires_grad_(weights is not None)

        losses = []
        with decoded_once(self.model, self._decoder, ids, cut, **where) as (logits_at, leaves):
            for positions in torch.split(torch.arange(ids.shape[1] - 1), max(1, CHUNK // (2 * len(ids)))):
                losses.append(_backward(logits_at(positions), ids, answers, positions, weights))
        if weights is not None:
            assert leaves[0].grad is not None
            torch.autograd.backward(decoded[0], leaves[0].grad[: len(ids)])
        return torch.cat(losses, dim=1)

    def _at(self, positions: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs for skipped positions [B, T]; none for true ones."""
        if not self.skips:
            return {}
        positions = positions.to(input_device(self.model))
        # Without a mask, transformers takes jumps for document boundaries.
        return {"position_ids": positions, "attention_mask": torch.ones_like(positions)}

    def _teach(self, rows: Tensor, teacher: Remapped) -> Tensor:
        """Return the hidden states [B, T, H] of the base model, or its logits if it has no decoder.

        The remapping applies to windows longer than the original length. The result is on the CPU; up to
        `TAUGHT` bytes are cached.
        """
        self.module.vector = Vector.unscaled(self.rope)  # the teacher has no query factors
        ids, places = self.ids[rows], self._taught_at[rows]
        names = [digest(row) for row in zip(ids, places, strict=True)]
        unread = [row for row, name in enumerate(names) if name not in self._taught]
        found = {name: self._taught[name] for name in names if name in self._taught}
        if unread:
            states, where = list[Tensor](), self._at(places[unread])

            def keep(hidden: Tensor) -> Tensor:
                states.append(hidden)
                return hidden

            given, longer = ids[unread].to(input_device(self.model)), ids.shape[1] > self._trained
            with torch.no_grad(), teacher.again() if longer else nullcontext():
                if self._decoder is None:
                    keep(self.model(input_ids=given, use_cache=False, **where).logits)
                else:
                    with decoded_once(self.model, self._decoder, given, keep, **where) as (logits_at, _):
                        logits_at(torch.zeros(1, dtype=torch.long))
            found |= {names[row]: hidden for row, hidden in zip(unread, states[0].cpu(), strict=True)}
            size = states[0][0].numel() * states[0].element_size()
            free = max(0, TAUGHT // size - len(self._taught))
            self._taught |= {name: found[name].clone() for name in [names[row] for row in unread][:free]}
        return torch.stack([found[name] for name in names])


def _weights(tokens: int, within: int) -> Tensor:
    """Return the weight of each token, with mean 1; the first ``within`` are in the original length."""
    share = max(SHORT, within / tokens)
    weights = torch.full((tokens,), (1 - share) * tokens / max(1, tokens - within))
    weights[:within] = share * tokens / within
    return weights


def _backward(
    logits: Tensor, ids: Tensor, answers: Tensor, positions: Tensor, weights: Tensor | None
) -> Tensor:
    """Compute losses [B, C] of the tokens after some positions; with weights, also run the backward pass.

    Logits are [B, C, V], or [2B, C, V] with those of the teacher after them; `answers` are [B, T - 1],
    and weights [T - 1].
    """
    share, is_taught = answers[:, positions], len(logits) > len(ids)
    if is_taught:
        losses = divergence(*torch.split(logits, len(ids)))
    if share.any() or not is_taught:
        entropy = token_losses(logits[: len(ids)], ids[:, positions + 1])
        losses = torch.where(share > 0, share * entropy, losses if is_taught else entropy)
    if weights is not None:
        (losses @ weights[positions].to(losses)).sum().backward()  # type: ignore[no-untyped-call]
    return losses.detach()


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(teacher || student) of logits [..., V] in nats, float32 [...], with a detached teacher."""
    log_p = teacher.detach().float().log_softmax(-1)
    return (log_p.exp() * (log_p - student.float().log_softmax(-1))).sum(-1)


def _batches(ids: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Split rows into batches of a forward pass."""
    return list(torch.split(torch.tensor(rows), max(1, AT_ONCE // ids.shape[1])))


@contextmanager
def recomputing(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Recompute activations within the block, if those of so many tokens exceed `ACTIVATIONS`.

    The model is in eval mode, in which gradient checkpointing of transformers does nothing.
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
