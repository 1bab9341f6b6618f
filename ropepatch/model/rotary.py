"""The rotary module of a model in memory: replacing it and restoring it.

The code is the same for every architecture. If a release of transformers breaks ropepatch, fix it here.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.errors import RopepatchError


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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with the model; PEFT would train a copy of only this module, which attention does not read."""
        if not memo:
            raise RopepatchError(
                f"{self.state}, and its rotary module is not copied alone",
                hint="copy the model; with PEFT's modules_to_save, name only rotary_emb.module of a swap",
            )
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

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
    kinds = *type(base).__mro__, type(base.config)
    known = "transformers.", "torch.", "builtins"  # torch derives one in fully_shard
    return all(kind.__module__.startswith(known) for kind in kinds)
