"""GGUF files, single or split, read and written with the package `gguf`."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ropepatch.errors import RopepatchError, requiring
from ropepatch.files import check_regular
from ropepatch.model.weights import Progress

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter
    from gguf.gguf_reader import ReaderField, ReaderTensor

PART = re.compile(
    r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE
)
UNWRITTEN = (  # metadata that the reader adds, and those of split files
    "GGUF.version",
    "GGUF.tensor_count",
    "GGUF.kv_count",
    "split.no",
    "split.count",
    "split.tensors.count",
)
AGAIN = "download or convert it again; a split one needs all of its parts in one folder"
Keys = Mapping[str, int | float | str | None]  # metadata to write; None drops a key
Tensors = Mapping[str, NDArray[np.float32] | None]


@dataclass(frozen=True, eq=False)
class GgufFile:
    """Metadata and tensors of a model.

    Args:
        path: The path that the user gave; for a split model any part.
        parts: One reader per part; the first contains the metadata.
    """

    path: Path
    parts: tuple[GGUFReader, ...]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the headers of a file and of its other parts.

        Raises:
            RopepatchError: If one is missing, damaged, truncated or big-endian.
        """
        names = [path.name]
        if split := PART.fullmatch(path.name):
            name, count = split["name"], int(split["count"])
            names = [f"{name}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
        found = cls(path, tuple(_reader(path.with_name(name)) for name in names))
        held = sum(len(part.tensors) for part in found.parts)
        stated = found.get("split.tensors.count", held)
        if not held or stated != held or len(found.tensors) != held:
            raise RopepatchError(
                f"{path} holds {held} tensors, expected {stated or 'some'}", hint=AGAIN
            )
        return found

    @cached_property
    def fields(self) -> dict[str, ReaderField]:
        """The metadata by key, without those about parts."""
        fields = self.parts[0].fields
        return {key: fields[key] for key in fields if key not in UNWRITTEN}

    @cached_property
    def tensors(self) -> dict[str, ReaderTensor]:
        """The tensors of all parts by name."""
        return {tensor.name: tensor for part in self.parts for tensor in part.tensors}

    @property
    def stem(self) -> str:
        """The file name without suffix and part number."""
        split = PART.fullmatch(self.path.name)
        return split["name"] if split else self.path.stem

    @property
    def num_bytes(self) -> int:
        """The size of all parts."""
        return sum(int(part.data.nbytes) for part in self.parts)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value of the default's type; an integer if the default is None.

        Raises:
            RopepatchError: If it has another type, or is missing without a default.
        """
        kind = int if default is None else type(default)
        field = self.parts[0].fields.get(key)
        if field is None and default is not None:
            return default
        is_scalar = field and field.types[0].name != "ARRAY"
        value = field.contents() if field and is_scalar else None
        kinds: Any = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or isinstance(value, bool) != (kind is bool):
            raise RopepatchError(
                f"{self.path}: {key} must be of type {kind.__name__}, got {value!r}",
                hint=AGAIN,
            )
        return kind(value)

    def copy(
        self, out: Path, keys: Keys, tensors: Tensors, progress: Progress | None = None
    ) -> None:
        """Copy all parts into one file, with changes of some keys and small float32 tensors."""
        from gguf import GGMLQuantizationType, GGUFValueType

        kinds = {
            int: GGUFValueType.UINT32,
            float: GGUFValueType.FLOAT32,
            str: GGUFValueType.STRING,
        }
        writer = _writer(out, self.get("general.architecture", ""))
        writer.data_alignment = int(self.parts[0].alignment)
        written: dict[str, Any] = {
            key: _packed(field) for key, field in self.fields.items()
        } | dict(keys)
        written.pop("general.architecture", None)  # the writer adds this itself
        for key, value in written.items():
            if value is not None:
                kind = kinds.get(type(value)) or self.fields[key].types[0]
                writer.add_key_value(key, value, kind)
        data = {
            name: (table, GGMLQuantizationType.F32)
            for name, table in tensors.items()
            if table is not None
        }
        for name, one in self.tensors.items():
            if name not in tensors:
                data[name] = one.data, one.tensor_type
        for name, (table, stored_as) in data.items():
            writer.add_tensor_info(
                name, table.shape, table.dtype, table.nbytes, stored_as
            )
        with closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            done, total = 0, sum(table.nbytes for table, _ in data.values())
            for table, _ in data.values():
                writer.write_tensor_data(table)
                done += table.nbytes
                if progress:
                    progress(done, total)

    def check_copy(self, written: GgufFile, keys: Keys, tensors: Tensors) -> None:
        """Raise a `RopepatchError` unless a copy equals this file, except for these keys and tensors."""
        wrong = []
        for key in {*self.fields, *written.fields, *keys}:
            field = written.fields.get(key)
            if key not in keys:
                same = _packed(self.fields.get(key)) == _packed(field)
            else:
                expected = keys[key]
                if isinstance(expected, float):
                    expected = float(np.float32(expected))
                same = (field.contents() if field else None) == expected
            if not same:
                wrong.append(key)
        for name in {*self.tensors, *written.tensors, *tensors}:
            wanted = tensors[name] if name in tensors else self.tensors.get(name)
            if not _same(written.tensors.get(name), wanted):
                wrong.append(name)
        if wrong:
            raise RopepatchError(
                f"{min(wrong)} differs from what was written",
                hint="the copy was deleted; check the disk, and report the version of gguf",
            )


def _packed(field: ReaderField | None) -> bytes:
    """Return the bytes of a value, preceded by its type."""
    return b"".join(part.tobytes() for part in field.parts[2:]) if field else b""


def _same(
    copy: ReaderTensor | None, wanted: ReaderTensor | NDArray[np.float32] | None
) -> bool:
    if copy is None or wanted is None:
        return copy is wanted
    if isinstance(wanted, np.ndarray):
        return copy.tensor_type.name == "F32" and np.array_equal(copy.data, wanted)
    alike = copy.tensor_type == wanted.tensor_type and np.array_equal(
        copy.shape, wanted.shape
    )
    return alike and np.array_equal(_bytes(copy.data), _bytes(wanted.data))


def _bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    return data.reshape(-1).view(np.uint8)  # data of no dimensions have no view


@contextmanager
def _gguf_code(path: Path) -> Iterator[None]:
    """Convert the errors of the package to one line."""
    try:
        check_regular(path)
        with requiring("GGUF", "ropepatch[gguf]"), np.errstate(all="raise"):
            yield
    except OSError as error:
        reason = error.strerror or error
        raise RopepatchError(f"cannot read {path}: {reason}", hint=AGAIN) from error
    except (
        ValueError,
        LookupError,
        struct.error,
        ArithmeticError,
        MemoryError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise RopepatchError(
            f"{path} is truncated or damaged: {reason}", hint=AGAIN
        ) from error


def _reader(path: Path) -> GGUFReader:
    with _gguf_code(path):
        from gguf import GGUFReader, GGUFValueType

        class Reader(GGUFReader):
            """The package's reader, but lists are read at once: entry by entry, a vocabulary takes 30 s."""

            def _get_field_parts(
                self, orig_offs: int, raw_type: int
            ) -> tuple[Any, ...]:
                if self.byte_order == "S":
                    raise ValueError("it is big-endian")
                if raw_type != GGUFValueType.ARRAY:
                    found: tuple[Any, ...] = super()._get_field_parts(
                        orig_offs, raw_type
                    )
                    return found
                kind, count = struct.unpack_from("<IQ", self.data.data, orig_offs)
                end = orig_offs + 12
                if kind == GGUFValueType.STRING:
                    for _ in range(count):
                        end += 8 + struct.unpack_from("<Q", self.data.data, end)[0]
                else:
                    scalar = self.gguf_scalar_to_np[GGUFValueType(kind)]
                    end += count * np.dtype(scalar).itemsize
                data = [self.data[orig_offs:end]]
                return end - orig_offs, data, [0], [GGUFValueType.ARRAY]

        reader = Reader(path)
        end = 0
        for tensor in reader.tensors:
            if (begin := tensor.data_offset - reader.data_offset) != end:
                raise ValueError(
                    f"{tensor.name} begins at byte {begin} of the tensors, expected {end}"
                )
            end = begin + tensor.n_bytes + -tensor.n_bytes % int(reader.alignment)
        return reader


def _writer(path: Path, architecture: str) -> GGUFWriter:
    from gguf import GGUFValueType, GGUFWriter

    class Writer(GGUFWriter):
        """The package's writer, which also accepts values as packed bytes."""

        def _pack_val(
            self,
            val: Any,
            vtype: GGUFValueType,
            add_vtype: bool,
            sub_type: GGUFValueType | None = None,
        ) -> bytes:
            if isinstance(val, bytes):
                return val
            return super()._pack_val(val, vtype, add_vtype, sub_type)

    return Writer(path, architecture)
