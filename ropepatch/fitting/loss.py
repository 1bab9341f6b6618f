"""The loss of a model as a function of a vector, with its gradient, and what each pass costs.

The loss of a token is its cross-entropy or, with a teacher, the Kullback-Leibler divergence from what the
base model under a position remapping expects there to what the model expects. That of an answer, which is
known to be true, is its cross-entropy in any case (`ropepatch.data.questions`).
What is learned from weighs the tokens within the original length `SHORT` of all, at least.

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
TAUGHT = 1 << 30  # bytes of the teacher's hidden states that are held
AT_ONCE = 8192  # tokens of a forward pass, unless one window is longer
ACTIVATIONS = 4 << 30  # bytes of them that are held
VALUES = 16  # that a layer holds for every token, in units of the hidden size: counted on LLaMA in bfloat16
SHORT = 0.4  # the least weight of the tokens within the original length, of 1
BACKWARD = 2  # a backward pass costs as many forward passes, as is usual to count


class LearnableRope(RotarySubstitute):
    """The stock forward, without the `no_grad` around it, over frequencies that are tensors of a graph.

    The stock class does the work in its own layout and precision, as in
    `ropepatch.extension.patching.ScaledRope`; its `inv_freq` and `attention_scaling` are computed
    from `vector` at every call, whose divisors divide the frequencies of the rope.
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
        """cos and sin (or what the stock class returns instead) for x [B, T, H] at position_ids [B, T]."""
        inv_freq = self.inv_freq.to(x.device) * torch.exp(-self.vector.log_divisors.to(x.device))
        factor: Any = self.carried_attention_factor * torch.exp(self.vector.log_attention.to(x.device))
        table = scaled_twin(self.stock, self.site, Frequencies(inv_freq, factor))
        return self.__dict__["compute"](table, x, position_ids, *args, **kwargs)


@contextmanager
def learnable(
    model: PreTrainedModel, source: Checkpoint, queries: QueryLayers | None = None
) -> Iterator[LearnableRope]:
    """A model with a learnable rope and frozen weights within the block; afterwards as it was.

    The queries of the layers are multiplied by what the vector says.
    """
    site = source.site
    module = LearnableRope(model.get_submodule(site.path), site, source.rope)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)

    def multiply(layers: QueryLayers, index: int, attention: nn.Module, *hooked: Any) -> Tensor:
        projected: Tensor = hooked[-1]  # behind the projection and its input
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
    """What validation windows say of a vector, in nats per token."""

    loss: float  # of all tokens by their weights
    short: float  # within the original length
    log_prob: float  # of the answers at the target; 0 where nothing is asked


class FitLoss:
    """The mean loss over windows of one length, in nats per token, as a function of a vector.

    Args:
        teacher: A remapping that was taken out of the model; None for the cross-entropy of the text.
        processes: Which share what is validated.
        answers: Of each window [T], what its tokens weigh as answers; None for none.
        positions: Of each window [T], where its tokens are said to stand; None for where they stand.
        target: N, in tokens; that of a window if not given.
        exam: What a vector is asked when it is validated; None for nothing.

    Attributes:
        ids: [N, T] int64.
        factor: s, the length of a window over the original length.
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
        self._positions = None if positions is None else torch.stack([*positions])
        length, trained = self.ids.shape[1], rope.original_max_position_embeddings
        self.factor, self.teacher, self._trained = (target or length) / trained, teacher, trained
        self._weights = _weights(length - 1, min(length, trained) - 1)
        self._decoder = decoder_of(model)
        self._taught: dict[str, Tensor] = {}  # by the digest of a window

    @property
    def skips(self) -> bool:
        """Whether its windows stand at skipped positions."""
        return self._positions is not None

    def cost(self, windows: int) -> int:
        """Forward tokens of `score` on so many windows."""
        return windows * self.ids.shape[1]

    def score(self, vector: Vector, windows: Sequence[int]) -> float:
        """The loss over some windows, from forward passes alone."""
        total = 0.0
        with torch.no_grad():
            for rows in _batches(self.ids, windows):
                total += precise(self._losses(vector, rows) @ self._weights).sum().item()
                self.spent += self.cost(len(rows))
        return total / self._scored(windows)

    def gradient(self, vector: Vector, windows: Sequence[int]) -> tuple[float, Tensor]:
        """The loss and its gradient, in the order of `Vector.flat`."""
        flat, total = vector.flat().detach().requires_grad_(), 0.0
        # Loss scaling: the weight of a single token is so small that float16 would round it to 0.
        scale = 2.0 ** (len(windows) * self.ids.shape[1]).bit_length()
        for rows in _batches(self.ids, windows):
            with recomputing(self.model, self.cost(len(rows))):
                whole = Vector.from_flat(flat, self.rope.num_pairs)
                losses = self._losses(whole, rows, self._weights * (scale / self._scored(windows)))
            total += precise(losses @ self._weights).sum().item()
            self.spent += self.cost(len(rows)) * (1 + BACKWARD)
        assert flat.grad is not None
        return total / self._scored(windows), flat.grad / scale

    def validate(self, vector: Vector) -> Outcome:
        """The loss over all windows as it is learned, that within the original length, and the answers."""
        losses = precise(self.token_losses(vector))
        short, log_prob = losses[:, : self._trained - 1].mean().item(), 0.0
        if self.exam is not None:
            log_prob = self.answers(vector, self.exam).log_prob(self.exam.length).value
        loss = (losses @ self._weights.to(losses)).sum().item() / losses.numel()
        return Outcome(loss, short, log_prob)

    def answers(self, vector: Vector, exam: Exam) -> Retrieval:
        """What a vector answers in an exam; processes share the work."""
        self.spent += exam.tokens
        self.module.vector = vector
        return exam.of_model(self.model, split=self.processes.count > 1)

    def token_losses(self, vector: Vector) -> Tensor:
        """The loss [N, T - 1] of every token, float32 on the CPU; processes share the work."""
        self.spent += self.ids.numel()

        def read(rows: Tensor) -> Tensor:
            with torch.no_grad():
                return self._losses(vector, rows).cpu()

        batches = _batches(self.ids, range(len(self.ids)))
        return torch.cat(self.processes.deal(batches, read, lambda rows: digest(self.ids[rows])))

    def _scored(self, windows: Sequence[int]) -> int:
        """How many tokens of some windows have a loss."""
        return len(windows) * (self.ids.shape[1] - 1)

    def _losses(self, vector: Vector, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Losses [B, T - 1] of rows [B], detached; with weights, after the backward pass of their sum.

        The head is run in chunks whose graphs are gone at once, so that no more than C positions' logits are
        ever held; the gradient reaches the decoder in one piece.
        """
        ids = self.ids[rows]
        taught = None if self.teacher is None else self._teach(ids, self.teacher)
        self.module.vector = vector
        device = input_device(self.model)
        ids, answers = ids.to(device), self._answers[rows, 1:].to(device)
        where: dict[str, Tensor] = {}
        if self._positions is not None:  # with a mask, or transformers takes a jump for another document
            where = {"position_ids": self._positions[rows].to(device), "attention_mask": torch.ones_like(ids)}
        if self._decoder is None:
            logits = self.model(input_ids=ids, use_cache=False, **where).logits
            if taught is not None:
                logits = torch.cat([logits, taught.to(logits)])
            return _backward(logits[:, :-1], ids, answers, torch.arange(ids.shape[1] - 1), weights)
        whole: list[Tensor] = []

        def cut(hidden: Tensor) -> Tensor:
            whole.append(hidden)
            both = hidden if taught is None else torch.cat([hidden, taught.to(hidden)])
            return both.detach().requires_grad_(weights is not None)

        losses = []
        with decoded_once(self.model, self._decoder, ids, cut, **where) as (logits_at, leaves):
            for positions in torch.split(torch.arange(ids.shape[1] - 1), max(1, CHUNK // (2 * len(ids)))):
                losses.append(_backward(logits_at(positions), ids, answers, positions, weights))
        if weights is not None:
            assert leaves[0].grad is not None
            torch.autograd.backward(whole[0], leaves[0].grad[: len(ids)])
        return torch.cat(losses, dim=1)

    def _teach(self, ids: Tensor, teacher: Remapped) -> Tensor:
        """The hidden states [B, T, H] of the base model, or its logits if it has no decoder.

        Windows that are longer than the original length are read under the remapping.

        On the CPU; those of each window are computed once, as far as `TAUGHT` goes.
        """
        self.module.vector = Vector.unscaled(self.rope)  # the teacher's queries are multiplied by nothing
        names = [digest([row]) for row in ids]
        unread = [row for row, name in enumerate(names) if name not in self._taught]
        found = {name: self._taught[name] for name in names if name in self._taught}
        if unread:
            rows, states = ids[unread].to(input_device(self.model)), list[Tensor]()

            def keep(hidden: Tensor) -> Tensor:
                states.append(hidden)
                return hidden

            longer = ids.shape[1] > self._trained
            with torch.no_grad(), teacher.again() if longer else nullcontext():
                if self._decoder is None:
                    keep(self.model(input_ids=rows, use_cache=False).logits)
                else:
                    with decoded_once(self.model, self._decoder, rows, through=keep) as (logits_at, _):
                        logits_at(torch.zeros(1, dtype=torch.long))
            found |= {names[row]: hidden for row, hidden in zip(unread, states[0].cpu(), strict=True)}
            size = states[0][0].numel() * states[0].element_size()
            free = max(0, TAUGHT // size - len(self._taught))
            self._taught |= {name: found[name].clone() for name in [names[row] for row in unread][:free]}
        return torch.stack([found[name] for name in names])


def _weights(tokens: int, within: int) -> Tensor:
    """Of each of so many tokens, the first of which stand within the original length; 1 in the mean."""
    share = max(SHORT, within / tokens)
    weights = torch.full((tokens,), (1 - share) * tokens / max(1, tokens - within))
    weights[:within] = share * tokens / within
    return weights


def _backward(
    logits: Tensor, ids: Tensor, answers: Tensor, positions: Tensor, weights: Tensor | None
) -> Tensor:
    """The losses [B, C] of the tokens after some positions; with weights, after their backward pass.

    Logits are [B, C, V], or with those of the teacher below them [2B, C, V]; `answers` are [B, T - 1], and
    the weights [T - 1].
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
    """KL(teacher || student) of logits [..., V] in nats, float32 [...]; no gradient goes to the teacher."""
    log_p = teacher.detach().float().log_softmax(-1)
    return (log_p.exp() * (log_p - student.float().log_softmax(-1))).sum(-1)


def _batches(ids: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """The rows of so many tokens that are read at once."""
    return list(torch.split(torch.tensor(rows), max(1, AT_ONCE // ids.shape[1])))


@contextmanager
def recomputing(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Hold only the input of each layer within the block, if so many tokens leave more than `ACTIVATIONS`.

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
