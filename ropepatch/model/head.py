"""A model's decoder and head: logits for a few positions at a time.

The logits of all tokens of a long text need more memory than the model. Shapes: B sequences of T tokens, C
positions of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.model.in_memory import check_rope, reset_dynamic

logger = logging.getLogger(__name__)

MARK = 4096.0  # exact in 16 bits, and above any cap of logits


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's input token ids."""
    embedding: Any = model.get_input_embeddings().weight
    # Meta: offloaded by accelerate
    return torch.device("cpu") if embedding.is_meta else embedding.device


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Raise a `RopepatchError` that names the first weight tensor with a NaN or an infinity."""
    for tensor, values in model.state_dict().items():
        if not values.isfinite().all():
            raise RopepatchError(
                f"the weights of {name} contain NaN or infinity: {tensor}",
                hint="download the files again, or use an earlier checkpoint; `ropepatch doctor` checks them",
            )


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """Find the decoder of a model; None if the model cannot return logits of selected positions."""
    # Any: wrappers such as PEFT's pass keywords on
    if not any(map(gives_positions, model.modules())):
        return None
    decoder: nn.Module | None = getattr(model, "get_decoder", lambda: None)()
    # Llama 4 returns the whole model, with its head; in Gemma 4 the decoder accepts logits_to_keep itself.
    if decoder and gives_positions(decoder) and hasattr(decoder, "model"):
        return decoder.get_submodule("model")
    return decoder


def gives_positions(module: nn.Module) -> bool:
    """Return whether forward accepts `logits_to_keep`."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def log_probs_at(model: nn.Module, ids: Tensor, positions: list[int]) -> Tensor:
    """Compute the log-probabilities after the first ``positions`` of ids [1, T], in one pass.

    Returns:
        Those of the next token: [P, V] float32 in nats, on the CPU.
    """
    rows = torch.tensor(positions) - 1
    keeps = any(map(gives_positions, model.modules()))
    options = {"logits_to_keep": rows} if keeps else {}
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits[0]
    chosen = logits if keeps else logits[rows]
    return chosen.float().log_softmax(-1).cpu()


def cache_keyword(model: nn.Module) -> str | None:
    """Return the name of the KV cache in a model's forward and output; None if it has none.

    transformers 5.24 renames `past_key_values` to `cache` and warns about the old name.
    """
    for module in model.modules():  # wrappers such as PEFT's pass keywords on
        taken = inspect.signature(module.forward).parameters
        for name in ("cache", "past_key_values"):
            if name in taken:
                return name
    return None


def incremental_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """Make a function that runs a model on further token ids [1, T], with the KV cache of its last call."""
    name = cache_keyword(model)
    if name is None:
        raise RopepatchError(
            f"{type(model).__name__} takes no key-value cache", hint="use another model"
        )
    cache: dict[str, Any] = {}

    def run(ids: Tensor, **inputs: Any) -> Any:
        output = model(input_ids=ids, use_cache=True, **cache, **inputs)
        cache[name] = output[name]
        return output

    return run


@contextmanager
def decoded_once(
    model: PreTrainedModel,
    decoder: nn.Module,
    ids: Tensor,
) -> Iterator[tuple[Callable[[Tensor], Tensor], list[Tensor]]]:
    """Compute logits of a few positions at a time with one run of the decoder.

    The head remains the model's own code, with everything before and after the projection: every call runs
    the whole model, but the decoder only in the first call.

    Args:
        model: The model.
        decoder: Its `decoder_of`.
        ids: Token ids [B, T].

    Yields:
        The logits [B, C, V] as a function of positions [C]; and the hidden states, one per call.
    """
    forward = decoder.forward
    outputs: list[Any] = []
    states: list[Tensor] = []

    def decode_once(*args: Any, **kwargs: Any) -> Any:
        outputs.append(outputs[0] if outputs else forward(*args, **kwargs))
        output = outputs[-1]
        states.append(output if isinstance(output, Tensor) else output[0])
        return output

    def logits_at(positions: Tensor) -> Tensor:
        # Positions, not their number: with a number, Gemma 4's decoder drops all other positions.
        logits: Tensor = model(
            input_ids=ids, use_cache=False, logits_to_keep=positions
        ).logits
        return logits

    with shadowed(decoder, decode_once):
        yield logits_at, states


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss of each target [...] from its logits [..., V]: float32 [...], in nats."""
    rows = logits.flatten(end_dim=-2).float()
    losses = F.cross_entropy(rows, targets.flatten().to(rows.device), reduction="none")
    return losses.view(targets.shape)


def find_linear_head(
    model: nn.Module, base: PreTrainedModel, inputs: Mapping[str, Any]
) -> nn.Linear | None:
    """Find the linear layer whose unchanged output is the model's logits; None if there is none.

    Some models scale or cap their logits or have a LoRA on the head. So the layer returns a mark in a short
    forward pass, which must be the model's output.

    Args:
        model: Wrapped or not.
        base: The transformers model within.
        inputs: The inputs of the forward pass, with `input_ids` [1, T].
    """
    output: nn.Module | None = base.get_output_embeddings()  # type: ignore[no-untyped-call]
    for part in output.modules() if output else ():
        # Not a quantised one
        is_plain = type(part).forward is nn.Linear.forward
        if isinstance(part, nn.Linear) and is_plain and _is_last(part, model, inputs):
            return part
    return None


def _is_last(layer: nn.Linear, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    shapes = []

    def mark(hidden: Tensor) -> Tensor:
        shapes.append(hidden.shape[:-1])
        return torch.full((), MARK, dtype=hidden.dtype, device=hidden.device)

    with shadowed(layer, mark):
        try:
            logits = model(use_cache=False, **inputs).logits
        except (IndexError, RuntimeError):  # the model processes its logits further
            return False
    is_marked = logits.ndim == 0 and logits.item() == MARK
    return is_marked and shapes == [inputs["input_ids"].shape]


@contextmanager
def shadowed(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module within the block; its hooks still run."""
    before = vars(module).get("forward")  # set by accelerate

    @functools.wraps(module.forward)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = replaced
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode within the block, then restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Check RoPE in memory, reset `dynamic` RoPE, and set eval mode within the block."""
    for one in check_rope(model)[:1]:
        logger.warning("the RoPE in memory is not the config's: %s", one)
    reset_dynamic(model)
    with in_eval_mode(model):
        yield
