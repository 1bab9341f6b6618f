"""What `--method` may name: a scaling of the rope, a scaling file, or an attention map."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from ropepatch.attention import MAPS, AttentionMap
from ropepatch.attention.maps import OTHER_NAMES as OTHER_MAPS
from ropepatch.scaling import METHODS, Scaling
from ropepatch.scaling.file import is_scaling_file, read_scaling
from ropepatch.scaling.method import OTHER_NAMES
from ropepatch.settings.parameters import find_kind, refuse_parameters


def find_method(name: str) -> type[Scaling] | type[AttentionMap]:
    """The scaling or the attention map of that name.

    Raises:
        RopepatchError: If there is none; with the nearest name and the list.
    """
    kinds: dict[str, type[Scaling] | type[AttentionMap]] = {**METHODS, **MAPS}
    return find_kind(name, kinds, "method", OTHER_NAMES | OTHER_MAPS)


def check_method(method: str, parameters: Collection[str]) -> None:
    """Refuse what is no method or scaling file, or names that are no parameters of it; a file takes none.

    Raises:
        RopepatchError: On an unknown method or parameter, or a file that is not a scaling.
    """
    if is_scaling_file(method):
        read_scaling(method, beside=parameters)
        return
    known = [field.name for field in fields(find_method(method))]
    refuse_parameters(method, [name for name in known if name != "factor"], set(parameters) - {"factor"})
