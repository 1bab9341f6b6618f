"""Where a model keeps its rope, read off its structure; the same code for every architecture.

Where a release of transformers breaks ropepatch, it is mended here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.model.config import text_config
from ropepatch.model.stock import stock_code
from ropepatch.scaling.rope import Frequencies, Rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GLOBAL_LAYERS = "full_attention"  # the layer type that sees the whole context, in transformers' words
MOST_PAIRS = 1 << 15


@dataclass(frozen=True)
class RotarySite:
    """A model's rotary module.

    Args:
        path: Its name in `model.named_modules()`.
        rotary_class: The stock class.
        layer_type: Where the rope differs by layer type, the type that is scaled; None for one rope.
    """

    path: str
    rotary_class: type[nn.Module]
    layer_type: str | None

    def attribute(self, name: str) -> str:
        """The attribute under which the stock module keeps `inv_freq` or `attention_scaling`."""
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    def parameters(self, config: PreTrainedConfig) -> dict[str, Any]:
        """The `rope_parameters` in force."""
        return self.of(config.rope_parameters)

    def of(self, rope_parameters: dict[str, Any]) -> dict[str, Any]:
        """The ones of the layers that are scaled, out of all `rope_parameters`."""
        flat: dict[str, Any] = (
            rope_parameters if self.layer_type is None else rope_parameters[self.layer_type]
        )
        return flat

    def replaced(self, rope_parameters: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
        """All `rope_parameters` with `flat` in the place of the ones of the layers that are scaled."""
        return flat if self.layer_type is None else rope_parameters | {self.layer_type: flat}


def find_rotary(model: nn.Module) -> RotarySite:
    """The one rotary module of a model.

    Raises:
        RopepatchError: If there is none, there are several, or its interface is not LLaMA's; with the reason.
    """
    config: Any = model.config
    model_type = config.model_type
    if any(type(module).__name__ == "ScaledRope" for module in model.modules()):
        raise RopepatchError("this model is already patched", hint="call remove() on its patch first")
    if any(type(module).__name__ == "SwappedPositions" for module in model.modules()):
        raise RopepatchError(
            "the position encoding of this model is swapped", hint="call remove() on its swap first"
        )
    found = {name: module for name, module in model.named_modules() if _holds_frequencies(module)}
    if not found:
        raise _refusal(model_type, "it has no rotary module (positions are learned, biased or absent)")
    if len(found) > 1:
        raise _refusal(model_type, f"it has {len(found)} rotary modules: {', '.join(list(found)[:3])}, ...")
    ((path, module),) = found.items()
    if getattr(text_config(config), "is_heterogeneous", False):
        raise _refusal(model_type, "its configuration differs from layer to layer")
    arguments = list(inspect.signature(type(module).forward).parameters)
    if arguments[1:3] != ["x", "position_ids"]:
        raise _refusal(
            model_type, f"its {type(module).__name__} is called with {arguments[1:]}, not (x, position_ids)"
        )
    if not isinstance(getattr(module, "rope_type", None), dict):
        if not hasattr(module, "inv_freq") or not hasattr(module, "attention_scaling"):
            raise _refusal(
                model_type, f"its {type(module).__name__} has no inv_freq with an attention_scaling"
            )
        return RotarySite(path, type(module), None)
    if not hasattr(module, f"{GLOBAL_LAYERS}_inv_freq"):
        raise _refusal(model_type, f"its rope differs by layer type and none is called {GLOBAL_LAYERS}")
    return RotarySite(path, type(module), GLOBAL_LAYERS)


@contextmanager
def float32_on_cpu() -> Iterator[None]:
    """Tables are computed alike whatever default dtype and device the user has set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT, torch.compile or data-parallel wrappers.

    Raises:
        RopepatchError: If there is none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise RopepatchError(
        f"{type(model).__name__} holds no transformers model", hint="pass what AutoModelForCausalLM returned"
    )


def other_tables(config: PreTrainedConfig, site: RotarySite) -> dict[str, list[float]]:
    """The frequencies and attention factors of the layer types that are not scaled."""
    if site.layer_type is None:
        return {}
    with stock_code(f"compute the frequencies of {config.model_type}"), float32_on_cpu():
        module: Any = site.rotary_class(config)
        others = {kind: getattr(module, f"{kind}_inv_freq").tolist() for kind in module.rope_type}
        factors = {f"{kind} a": [getattr(module, f"{kind}_attention_scaling")] for kind in module.rope_type}
    return {kind: row for kind, row in (others | factors).items() if kind.split()[0] != site.layer_type}


def stock_table(config: PreTrainedConfig, site: RotarySite) -> Frequencies:
    """What the stock rotary module computes from a configuration when it is built."""
    with stock_code(f"compute the frequencies of {config.model_type}"), float32_on_cpu():
        with torch.device("meta"):
            pairs = getattr(site.rotary_class(config), site.attribute("inv_freq")).numel()
        if pairs > MOST_PAIRS:
            raise RopepatchError(
                f"{2 * pairs} rotary dimensions are not plausible", hint="check head_dim in config.json"
            )
        module = site.rotary_class(config)
        inv_freq = getattr(module, site.attribute("inv_freq"))
        return Frequencies(
            inv_freq.detach().clone(), float(getattr(module, site.attribute("attention_scaling")))
        )


def scaled_twin(stock: Any, site: RotarySite, frequencies: Frequencies) -> nn.Module:
    """A shallow copy of a stock rotary module whose forward computes with other frequencies."""
    twin: Any = copy.copy(stock)
    # Under any other type the stock forward may recompute its frequencies.
    kind = "default" if site.layer_type is None else {**stock.rope_type, site.layer_type: "default"}
    twin.rope_type = kind
    twin._buffers = dict(stock._buffers)
    setattr(twin, site.attribute("inv_freq"), frequencies.inv_freq)
    setattr(twin, site.attribute("attention_scaling"), frequencies.attention_factor)
    scaled: nn.Module = twin
    return scaled


def check_table_rules(config: PreTrainedConfig, site: RotarySite) -> None:
    """Refuse a rotary module whose forward does not follow its own `inv_freq` and `attention_scaling`."""
    layer = () if site.layer_type is None else (site.layer_type,)
    with stock_code(f"run the rotary module of {config.model_type}"), torch.no_grad(), float32_on_cpu():
        stock = site.rotary_class(config)
        table = Frequencies(getattr(stock, site.attribute("inv_freq")), 1.0)
        half = Frequencies(table.inv_freq / 2, 3.0)
        positions, x = torch.arange(5)[None], torch.zeros(1, 5, 8)
        expected, got = (
            site.rotary_class.forward(scaled_twin(stock, site, frequencies), x, step * positions, *layer)
            for frequencies, step in ((table, 1), (half, 2))
        )
    pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
    if not all(torch.allclose(3 * one, other, atol=1e-6) for one, other in pairs):
        raise _refusal(
            config.model_type, f"{site.rotary_class.__name__} recomputes its frequencies in forward"
        )


def read_rope(config: PreTrainedConfig, site: RotarySite) -> Rope:
    """The rope a configuration describes; of a model that is already scaled, with the frequencies it carries.

    Raises:
        RopepatchError: If the rope follows the sequence length, or its numbers make no rope.
    """
    parameters = site.parameters(config)
    if parameters.get("llama_4_scaling_beta"):
        raise _refusal(
            config.model_type, "its query temperature reads the same rope_parameters (llama_4_scaling_beta)"
        )
    kind = parameters.get("rope_type", "default")
    lists = parameters.get("short_factor"), parameters.get("long_factor")
    if kind == "dynamic" or (kind == "longrope" and lists[0] != lists[1]):
        raise RopepatchError(
            f"this model's rope ({kind}) already follows the sequence length: nothing fixed to extend",
            hint="start from the checkpoint it was made from, or set one static rope first",
        )
    table = stock_table(config, site)
    window = _window(config, parameters)
    theta = parameters["rope_theta"]
    plain = Rope(2 * len(table.inv_freq), theta, window)
    if kind == "default" and torch.equal(plain.inv_freq(), table.inv_freq):
        return plain
    if parameters.get("mscale_all_dim"):
        raise RopepatchError(
            f"{config.model_type} ties its softmax scale to the rope scaling it already has (mscale_all_dim)",
            hint="start from the unscaled base checkpoint",
        )
    return Rope(plain.rotary_dim, theta, window, tuple(table.inv_freq.tolist()), table.attention_factor)


def _window(config: PreTrainedConfig, parameters: dict[str, Any]) -> int:
    """L: the tokens the model reads now; Qwen's YaRN configurations leave max_position_embeddings behind."""
    window = getattr(config, "max_position_embeddings", None)
    if not isinstance(window, int):
        raise RopepatchError(
            f"max_position_embeddings must be an integer, got {window!r}",
            hint="write the number of tokens the model was trained to read into config.json",
        )
    if parameters.get("rope_type") in ("yarn", "longrope") and parameters.get("factor"):
        scaled = parameters["factor"] * parameters["original_max_position_embeddings"]
        return max(window, int(scaled))
    return window


def _holds_frequencies(module: nn.Module) -> bool:
    return any(
        name == "inv_freq" or name.endswith("_inv_freq") for name, _ in module.named_buffers(recurse=False)
    )


def _refusal(model_type: str, reason: str) -> RopepatchError:
    return RopepatchError(
        f"{model_type} is not supported: {reason}", hint="the README lists the supported model types"
    )
