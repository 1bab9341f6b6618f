"""A model's head, which makes logits of hidden states: found, and run for a few positions at a time.

Logits of all tokens of a long text take more memory than the model. Shapes: B rows of T tokens, C positions
of a chunk, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError

MARK = 4096.0  # exact in 16 bits, and above what a model caps its logits at


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its token ids."""
    embedding: Any = model.get_input_embeddings().weight
    return torch.device("cpu") if embedding.is_meta else embedding.device  # meta: offloaded by accelerate


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """What the model runs below its head; None if it has no such part or cannot give single positions."""
    if not any(map(gives_positions, model.modules())):  # any: wrappers such as PEFT's pass keywords on
        return None
    decoder = getattr(model, "get_decoder", lambda: None)()
    # Llama 4 answers with the whole model, head included; in Gemma 4 the decoder takes logits_to_keep itself.
    return getattr(decoder, "model", decoder) if decoder and gives_positions(decoder) else decoder


def gives_positions(module: nn.Module) -> bool:
    """Whether its forward can be asked for the logits of some positions alone."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def cache_keyword(model: nn.Module) -> str | None:
    """Under which name its forward takes the key-value cache, and its output holds it; None if it takes none.

    transformers 5.24 calls `cache` what was `past_key_values`, and warns of the old name.
    """
    for module in model.modules():  # wrappers such as PEFT's pass keywords on
        taken = inspect.signature(module.forward).parameters
        if name := next((name for name in ("cache", "past_key_values") if name in taken), None):
            return name
    return None


def reading_on(model: PreTrainedModel) -> Callable[..., Any]:
    """A function that reads further tokens of a text, where its last call ended, and returns the output.

    Raises:
        RopepatchError: If the model takes no key-value cache.
    """
    name = cache_keyword(model)
    if name is None:
        raise RopepatchError(f"{type(model).__name__} takes no key-value cache", hint="use another model")
    held: dict[str, Any] = {}

    def read(ids: Tensor, **more: Any) -> Any:
        output = model(input_ids=ids, use_cache=True, **held, **more)
        held[name] = output[name]
        return output

    return read


@contextmanager
def decoded_once(
    model: PreTrainedModel,
    decoder: nn.Module,
    ids: Tensor,
    through: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> Iterator[tuple[Callable[[Tensor], Tensor], list[Tensor]]]:
    """The logits [B, C, V] of positions [C] of ids [B, T], a function within the block.

    Every call runs the whole model, but for its decoder, which runs in the first call only: so the head is
    the model's own code, with all its family does before and after the projection. `through` is applied to
    the hidden states [B, T, H] once they are computed.

    Yields:
        The function, and the hidden states of the decoder, one per call.
    """
    forward = decoder.forward
    outputs: list[Any] = []
    states: list[Tensor] = []

    @functools.wraps(forward)
    def decode_once(*args: Any, **kwargs: Any) -> Any:
        outputs.append(outputs[0] if outputs else _changed(forward(*args, **kwargs), through))
        states.append(_hidden(outputs[-1]))
        return outputs[-1]

    def logits_at(positions: Tensor) -> Tensor:
        # Positions, never their number: for a number, Gemma 4's decoder leaves out all other rows.
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits
        return logits

    with shadowed(decoder, decode_once):
        yield logits_at, states


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def _changed(output: Any, through: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return through(output)
    output[next(iter(output))] = through(output[0])
    return output


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target [...] under its logits [..., V], in nats: float32 [...]."""
    rows = logits.flatten(end_dim=-2).float()
    losses = F.cross_entropy(rows, targets.flatten().to(rows.device), reduction="none")
    return losses.view(targets.shape)


def find_linear_head(model: nn.Module, base: PreTrainedModel, inputs: Mapping[str, Any]) -> nn.Linear | None:
    """The layer whose output is the model's logits as they are; None where there is none, or not one alone.

    Some families scale or cap their logits, and a LoRA may be on the head. A short pass finds out, in which
    the layer returns a mark instead, which must come out of the model unchanged.

    Args:
        model: Wrapped or not.
        base: The transformers model within.
        inputs: Of the pass: what the model takes, with `input_ids` [1, T].
    """
    output: nn.Module | None = base.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = [part for part in output.modules() if isinstance(part, nn.Linear)] if output is not None else []
    layers = [layer for layer in linear if type(layer).forward is nn.Linear.forward]  # not a quantised one
    return next((layer for layer in layers if _returns_logits(layer, model, inputs)), None)


def _returns_logits(layer: nn.Linear, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the model hands on what this layer gives for all its tokens, as it is."""
    shapes = []

    def mark(hidden: Tensor) -> Tensor:
        shapes.append(hidden.shape[:-1])
        return torch.full((), MARK, dtype=hidden.dtype, device=hidden.device)

    with shadowed(layer, mark):
        try:
            logits = model(use_cache=False, **inputs).logits
        except (IndexError, RuntimeError):  # of a model that goes on with logits of the usual shape
            return False
    return shapes == [inputs["input_ids"].shape] and logits.ndim == 0 and logits.item() == MARK


_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
_FINDING = Lock()


@contextmanager
def held(module: nn.Module) -> Iterator[None]:
    """This thread alone has hold of a module within the block; another that wants it waits.

    A model has one lock, whichever of its wrappers, or of itself and its decoder, is given.
    """
    models = (part for part in module.modules() if isinstance(part, PreTrainedModel))
    whole = next(models, None)
    with _FINDING:
        lock = _LOCKS.setdefault(module if whole is None else whole.base_model, RLock())
    with lock:
        yield


@contextmanager
def shadowed(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for one instance within the block, within its hooks; other threads see the usual one.

    Raises:
        RopepatchError: If the module is a copy that was made within such a block.
    """
    with held(module):
        before = vars(module).get("forward")  # of a loader that has put its own there
        if getattr(before, "shadows", module) is not module:
            raise RopepatchError(
                "this model was copied while it was measured", hint="copy it again, before or after that"
            )
        usual, thread = module.forward, get_ident()

        @functools.wraps(usual)
        def by_thread(*args: Any, **kwargs: Any) -> Any:
            return (forward if get_ident() == thread else usual)(*args, **kwargs)

        by_thread.shadows = module  # type: ignore[attr-defined]  # a mark on the function
        module.forward = by_thread
        try:
            yield
        finally:
            if before is None:
                del module.forward
            else:
                module.forward = before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, for one thread at a time; afterwards every module is back in its own mode.

    What a stock `dynamic` rope has read before plays no part.
    """
    with held(model):
        _start_over(model)
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _start_over(model: nn.Module) -> None:
    """Let stock `dynamic` ropes forget the longest text they read; before transformers 5.13 they never do."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None) if hasattr(module, "original_max_seq_len") else None
        named = {f"{name}_": kind for name, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        for prefix in (prefix for prefix, kind in named.items() if "dynamic" in (kind or "")):
            now, first = (getattr(module, f"{prefix}{name}") for name in ("inv_freq", "original_inv_freq"))
            module.register_buffer(f"{prefix}inv_freq", first.to(now.device, copy=True), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
