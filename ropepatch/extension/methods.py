"""What `--method` may name: a scaling of the rope, a scaling file, or an attention map."""

from __future__ import annotations

from collections.abc import Collection

from ropepatch.attention import MAPS, AttentionMap
from ropepatch.scaling import METHODS, Scaling
from ropepatch.scaling.file import is_scaling_file, read_scaling
from ropepatch.settings import find_named


def find_method(name: str) -> type[Scaling] | type[AttentionMap]:
    """The scaling or the attention map of that name.

    Raises:
        RopepatchError: If there is none; with the nearest name and the list.
    """
    kinds: dict[str, type[Scaling] | type[AttentionMap]] = {**METHODS, **MAPS}
    return find_named(name, kinds, "method", METHODS.other_names | MAPS.other_names)


def check_method(method: str, parameters: Collection[str]) -> None:
    """Refuse what is no method or scaling file, or names that are no parameters of it; a file takes none.

    Raises:
        RopepatchError: On an unknown method or parameter, or a file that is not a scaling.
    """
    if is_scaling_file(method):
        read_scaling(method, beside=parameters)
        return
    find_method(method).refuse_unknown(name for name in parameters if name != "factor")
