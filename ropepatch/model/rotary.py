"""The rotary module of a model: finding it by its structure, replacing it and restoring it.

The code is the same for every architecture. If a release of transformers breaks ropepatch, fix it here.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import GLOBAL_LAYERS, SLIDING_LAYERS, WITHOUT_ROPE
from ropepatch.model.config import dual_chunk_original, text_config
from ropepatch.model.stock import stock_code
from ropepatch.scaling.rope import ORIGINAL, Frequencies, Rope

MAX_PAIRS = 1 << 15
SEQUENCE = "max_sequence_length"  # FastChat's key of the extended context length


@dataclass(frozen=True)
class RotarySite:
    """A model's rotary module.

    Args:
        path: Its name in `model.named_modules()`.
        rotary_class: The stock class.
        layer_type: The scaled layer type if RoPE differs by layer type; else None.
    """

    path: str
    rotary_class: type[nn.Module]
    layer_type: str | None

    def attribute(self, name: str) -> str:
        """Return the stock module's name of `inv_freq` or `attention_scaling`."""
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    def of(self, rope_parameters: dict[str, Any]) -> dict[str, Any]:
        """Select the rope_parameters of the scaled layer type."""
        selected: dict[str, Any] = (
            rope_parameters[self.layer_type] if self.layer_type else rope_parameters
        )
        return selected

    def replaced(
        self, rope_parameters: dict[str, Any], flat: dict[str, Any]
    ) -> dict[str, Any]:
        """Replace the rope_parameters of the scaled layer type by `flat`."""
        return (
            flat
            if self.layer_type is None
            else rope_parameters | {self.layer_type: flat}
        )


def find_rotary(model: nn.Module) -> RotarySite:
    """Find the rotary module of a model; raise a `RopepatchError` unless it is one like LLaMA's."""
    if substitute := find_substitute(model, RotarySubstitute):
        raise RopepatchError(substitute[1].state, hint=substitute[1].way_back)
    config: Any = model.config
    refusal = partial(_refusal, config.model_type)
    modules = language_ropes(model)
    if not modules and text_config(config).model_type in WITHOUT_ROPE:
        raise RopepatchError(
            f"the attention of {config.model_type} has no RoPE: it needs no scaling for a longer context",
            hint="write the longer length as max_position_embeddings into config.json",
        )
    if not modules:
        raise refusal(
            "it has no rotary module (positions are learned, biased or absent)"
        )
    if len(modules) > 1 and getattr(config, "thinker_config", None):
        raise RopepatchError(
            f"{config.model_type} is several models, of which its thinker reads text",
            hint="save that alone, by from_pretrained and save_pretrained of transformers' class with "
            "Thinker in its name, and extend it",
        )
    if len(modules) > 1:
        raise refusal(
            f"it has {len(modules)} rotary modules: {', '.join(list(modules)[:3])}, ..."
        )
    ((path, module),) = modules.items()
    rotary_class = type(module)
    if others := [
        name
        for name, one in model.named_modules()
        if type(one) is rotary_class and one is not module
    ]:
        raise refusal(
            f"it has another {rotary_class.__name__} beside that of its decoder, {others[0]}"
        )
    if state := list(module.state_dict()):
        raise refusal(
            f"its {rotary_class.__name__} has weights of its own ({', '.join(state)})"
        )
    arguments = list(inspect.signature(rotary_class.forward).parameters)
    if arguments[1:3] != ["x", "position_ids"]:
        raise refusal(
            f"its {rotary_class.__name__} is called with {arguments[1:]}, not (x, position_ids)"
        )
    if not isinstance(getattr(module, "rope_type", None), dict):
        if not hasattr(module, "inv_freq") or not hasattr(module, "attention_scaling"):
            raise refusal(
                f"its {rotary_class.__name__} has no inv_freq with an attention_scaling"
            )
        return RotarySite(path, rotary_class, None)
    layers = getattr(text_config(config), "layer_types", None) or []
    if set(layers) == {SLIDING_LAYERS}:
        raise RopepatchError(
            f"all {len(layers)} layers of this {config.model_type} have a sliding window of "
            f"{text_config(config).sliding_window} tokens: nothing attends further",
            hint=f"a test model needs a layer of {GLOBAL_LAYERS} in layer_types",
        )
    if not hasattr(module, f"{GLOBAL_LAYERS}_inv_freq"):
        raise refusal(
            f"its RoPE differs by layer type and none is called {GLOBAL_LAYERS}"
        )
    return RotarySite(path, rotary_class, GLOBAL_LAYERS)


def language_ropes(model: nn.Module) -> dict[str, nn.Module]:
    """Return the rotary modules of a model by path; for a multimodal model those of its language model."""
    any_model: Any = model
    config = any_model.config
    decoder = any_model if text_config(config) is config else any_model.get_decoder()
    within = set(map(id, decoder.modules()))
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in within and holds_frequencies(module)
    }


class OwnConfigs:
    """Copies of a model's configurations, which other models may share, while the model is changed.

    Args:
        model: The model; every module that has a configuration gets the copy.
        ours: The names of the changed values; a user's changes of other values persist.
    """

    def __init__(self, model: nn.Module, ours: Iterable[str]) -> None:
        self.ours = set(ours)
        shared: dict[int, PreTrainedConfig] = {}
        copies: dict[int, Any] = {}  # one copy each, even if one contains another
        for held_by, name, config in _configs(model):
            shared[id(config)] = config
            held_by[name] = copy.deepcopy(config, copies)
        self.pairs = [
            (config, copies[key], dict(vars(copies[key])))
            for key, config in shared.items()
        ]

    def put_back(self, model: nn.Module) -> None:
        """Restore the shared configurations in every module that has a copy."""
        for held_by, name, config in _configs(model):
            held_by[name] = next(
                (shared for shared, own, _ in self.pairs if own is config), config
            )
        for shared, own, before in self.pairs:
            ours = {own.attribute_map.get(name, name) for name in self.ours}
            for name, value in vars(own).items():
                if name not in ours and value is not before.get(name):
                    vars(shared)[name] = value


def _configs(
    model: nn.Module,
) -> Iterator[tuple[dict[str, Any], str, PreTrainedConfig]]:
    """Yield every configuration of a module: the module's attributes, the name and the value."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                yield vars(module), name, value


@contextmanager
def own_configs(model: nn.Module, *ours: str) -> Iterator[OwnConfigs]:
    """Give a model `OwnConfigs`, and restore the shared ones if the block raises."""
    configs = OwnConfigs(model, ours)
    try:
        yield configs
    except BaseException:
        configs.put_back(model)
        raise


class RotarySubstitute(nn.Module):
    """A removable replacement of a model's rotary module, which moves with the model.

    The stock module is not registered: `model.to(bfloat16)` would round its frequencies by up to 0.4%, which
    at position 131072 is 160 radians for the second pair of Llama-2, and re-initialisation would reset them.
    No subclass has a name with "RotaryEmbedding", since transformers re-initialises such classes.
    """

    # Why it cannot be replaced again
    state: ClassVar[str] = "the rotary module of this model is replaced"
    way_back: ClassVar[str] = "remove its replacement first"
    shows: ClassVar[str] = "stock"  # the module that provides missing attributes

    stock: nn.Module
    configs: OwnConfigs  # unless the configuration does not change

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.__dict__["stock"] = stock
        self.tables = {
            name: table.cpu()
            for name, table in stock.named_buffers()
            if not table.is_meta
        }
        self.device = next(stock.buffers()).device

    def follow(self, device: torch.device) -> None:
        """Move the stock module's buffers to the model's device, also from the meta device."""
        self.device = device
        for name, table in self.tables.items():
            setattr(self.stock, name, table.to(device))

    def __getattr__(self, name: str) -> Any:
        if self.shows in self.__dict__ and name not in self.__dict__["_modules"]:
            return getattr(self.__dict__[self.shows], name)
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch
        self.follow(fn(torch.zeros(1, device=self.device)).device)
        return self


Substitute = TypeVar("Substitute", bound=RotarySubstitute)


def find_substitute(
    model: nn.Module, kind: type[Substitute]
) -> tuple[str, Substitute] | None:
    """Find a substitute of a class, with its path."""
    for path, module in model.named_modules():
        if isinstance(module, kind):
            return path, module
    return None


class Substitution(ABC, Generic[Substitute]):
    """The handle of a replaced rotary module, and a context manager that restores the original."""

    def __init__(
        self, model: PreTrainedModel, path: str, substitute: Substitute
    ) -> None:
        self.model = model
        self.path = path
        self._substitute = substitute

    @property
    def in_force(self) -> bool:
        """Whether the replacement has not been removed."""
        return self.model.get_submodule(self.path) is self._substitute

    def remove(self) -> None:
        """Restore the original rotary module and configuration; a second call does nothing."""
        if self.in_force:
            self._undo()
            self.model.set_submodule(self.path, self._substitute.stock)
            self._substitute.configs.put_back(self.model)

    @abstractmethod
    def _undo(self) -> None:
        """Undo all other changes than those of rotary module and configuration."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = (
            f"{self.path}: {self._substitute.extra_repr()}"
            if self.in_force
            else "removed"
        )
        return f"{type(self).__name__}({type(self.model).__name__}, {state})"


@contextmanager
def rotating_by(model: nn.Module, path: str, rotary: nn.Module) -> Iterator[None]:
    """Replace the rotary module within the block."""
    stock = model.get_submodule(path)
    model.set_submodule(path, rotary)
    try:
        yield
    finally:
        model.set_submodule(path, stock)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside PEFT, torch.compile or data-parallel wrappers."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    message = f"{type(model).__name__} holds no transformers model"
    raise RopepatchError(
        message, hint="pass what AutoModelForCausalLM or ropepatch.load returned"
    )


def is_stock(model: nn.Module) -> bool:
    """Return whether all classes of a model are transformers', so that its checkpoint needs no code."""
    base = base_model(model)
    # skip classes that torch derives, as fully_shard does
    first = next(
        kind for kind in type(base).__mro__ if not kind.__module__.startswith("torch.")
    )
    return all(
        kind.__module__.startswith("transformers.")
        for kind in (first, type(base.config))
    )


def other_tables(config: PreTrainedConfig, site: RotarySite) -> dict[str, list[float]]:
    """Compute the frequencies and attention factors of the unscaled layer types."""
    if site.layer_type is None:
        return {}
    with (
        stock_code(f"compute the frequencies of {config.model_type}"),
        torch.device("cpu"),
    ):
        module: Any = site.rotary_class(config)
        kinds = [kind for kind in module.rope_type if kind != site.layer_type]
        frequencies = {
            kind: getattr(module, f"{kind}_inv_freq").tolist() for kind in kinds
        }
        factors = {
            f"{kind} a": [getattr(module, f"{kind}_attention_scaling")]
            for kind in kinds
        }
    return frequencies | factors


def stock_table(
    config: PreTrainedConfig, site: RotarySite, *, beyond_switch: bool = False
) -> Frequencies:
    """Compute the frequencies of a configuration by building its stock rotary module.

    For a `longrope` with two lists, they are those up to the switch unless `beyond_switch`.
    """
    with (
        stock_code(f"compute the frequencies of {config.model_type}"),
        torch.device("cpu"),
    ):
        if beyond_switch and switches(parameters := site.of(config.rope_parameters)):
            config, beyond = (
                copy.deepcopy(config),
                {"short_factor": parameters["long_factor"]},
            )
            config.rope_parameters = site.replaced(
                config.rope_parameters, parameters | beyond
            )
        with torch.device("meta"):
            pairs = getattr(
                site.rotary_class(config), site.attribute("inv_freq")
            ).numel()
        if pairs > MAX_PAIRS:
            message = f"{2 * pairs} rotary dimensions are not plausible"
            raise RopepatchError(message, hint="check head_dim in config.json")
        module = site.rotary_class(config)
        inv_freq = getattr(module, site.attribute("inv_freq"))
        attention_factor = float(getattr(module, site.attribute("attention_scaling")))
        return Frequencies(inv_freq.detach().clone(), attention_factor)


def scaled_twin(stock: Any, site: RotarySite, frequencies: Frequencies) -> nn.Module:
    """Copy a stock rotary module with other frequencies."""
    twin: Any = copy.copy(stock)
    # With any other type the stock forward may recompute its frequencies.
    twin.rope_type = (
        "default"
        if site.layer_type is None
        else {**stock.rope_type, site.layer_type: "default"}
    )
    twin._buffers = dict(stock._buffers)
    setattr(twin, site.attribute("inv_freq"), frequencies.inv_freq)
    setattr(twin, site.attribute("attention_scaling"), frequencies.attention_factor)
    scaled: nn.Module = twin
    return scaled


def check_table_rules(config: PreTrainedConfig, site: RotarySite) -> None:
    """Raise a `RopepatchError` if a module's forward does not use `inv_freq` and `attention_scaling`."""
    layer = () if site.layer_type is None else (site.layer_type,)
    with (
        stock_code(f"run the rotary module of {config.model_type}"),
        torch.no_grad(),
        torch.device("cpu"),
    ):
        stock = site.rotary_class(config)
        table = Frequencies(getattr(stock, site.attribute("inv_freq")), 1.0)
        half = Frequencies(table.inv_freq / 2, 3.0)
        positions, x = (
            _positions(site.of(config.rope_parameters)),
            torch.zeros(1, 5, 8, dtype=torch.float32),
        )
        expected, got = (
            site.rotary_class.forward(
                scaled_twin(stock, site, frequencies), x, step * positions, *layer
            )
            for frequencies, step in ((table, 1), (half, 2))
        )
    pairs = (
        zip(expected, got, strict=True)
        if isinstance(expected, tuple)
        else [(expected, got)]
    )
    if not all(torch.allclose(3 * one, other, atol=1e-6) for one, other in pairs):
        reason = f"{site.rotary_class.__name__} recomputes its frequencies in forward"
        raise _refusal(config.model_type, reason)


def _positions(parameters: dict[str, Any]) -> Tensor:
    """Make test positions: [1, T], or [A, 1, T] for RoPE with A position axes (M-RoPE)."""
    positions = torch.arange(5)[None]
    axes = len(
        parameters.get("mrope_section") or parameters.get("xdrope_section") or ()
    )
    return (
        torch.stack([positions * (axis + 1) for axis in range(axes)])
        if axes
        else positions
    )


def read_rope(config: PreTrainedConfig, site: RotarySite) -> Rope:
    """Return the RoPE parameters of a configuration, with the frequencies if it is already scaled.

    Length-dependent RoPE is taken at the full context length: `dynamic` does not change it, and for
    `longrope` with two lists it is the one beyond the switch.
    """
    parameters = site.of(config.rope_parameters)
    for key, value in _leaves(config.rope_parameters):
        if isinstance(value, float) and not math.isfinite(value):
            raise RopepatchError(
                f"{key} must be a finite number, got {value}", hint="fix config.json"
            )
    table = stock_table(config, site, beyond_switch=True)
    window = _window(config, parameters)
    theta, d = parameters["rope_theta"], 2 * len(table.inv_freq)
    if alpha := parameters.get("alpha"):  # HunYuan: NTK-aware with a fixed factor
        theta *= alpha ** (d / (d - 2))
    try:
        plain = Rope(d, theta, window)
    except RopepatchError as error:
        raise RopepatchError(
            str(error), hint=error.hint or "correct config.json"
        ) from error
    kind = parameters.get("rope_type", "default")
    if kind in ("default", "dynamic") and torch.equal(plain.inv_freq(), table.inv_freq):
        return plain
    return Rope(
        d, theta, window, tuple(table.inv_freq.tolist()), table.attention_factor
    )


def switches(parameters: dict[str, Any]) -> bool:
    """Return whether `longrope` has different divisors up to the original context length and beyond."""
    return parameters.get("short_factor") != parameters.get("long_factor")


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every number and text in nested dictionaries and lists, with its key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield from (
                (key, item)
                for item in (value if isinstance(value, list | tuple) else [value])
            )


def _window(config: PreTrainedConfig, parameters: dict[str, Any]) -> int:
    """Return the current context length in tokens; for Qwen's YaRN and Vicuna not in config.json."""
    window = getattr(config, "max_position_embeddings", None)
    if not isinstance(window, int):
        raise RopepatchError(
            f"max_position_embeddings must be an integer, got {window!r}",
            hint="write the model's context length in tokens into config.json",
        )
    if parameters.get("rope_type") in ("yarn", "longrope") and parameters.get("factor"):
        scaled = parameters["factor"] * parameters[ORIGINAL]
        return max(window, int(scaled))
    if parameters.get("rope_type") == "linear":
        return (
            stated_window(window, parameters["factor"], getattr(config, SEQUENCE, None))
            or window
        )
    return dual_chunk_original(config) or window


def stated_window(
    window: int, factor: float, max_sequence_length: object
) -> int | None:
    """Return the context length of a linear checkpoint if `max_sequence_length` states it, else None.

    max_position_embeddings is either this (deepseek-coder) or the original length (Vicuna, LongChat).
    """
    stated = max_sequence_length if type(max_sequence_length) is int else 0
    return stated if window <= stated <= factor * window else None


def holds_frequencies(module: nn.Module) -> bool:
    """Return whether a module has a buffer of frequencies."""
    names = (name for name, _ in module.named_buffers(recurse=False))
    return any(name == "inv_freq" or name.endswith("_inv_freq") for name in names)


def _refusal(model_type: str, reason: str) -> RopepatchError:
    return RopepatchError(
        f"{model_type} is not supported: {reason}",
        hint="the documentation lists the supported model types",
    )
