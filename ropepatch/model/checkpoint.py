"""A checkpoint, or a model in memory."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NoReturn,
    Self,
    TypeVar,
)

import torch
from pydantic import BaseModel, ConfigDict, StrictStr, ValidationError
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import check_name, read_json, write_json
from ropepatch.model.config import (
    KEY,
    NEEDS_ROPEPATCH,
    Config,
    Kind,
    loader_of,
    no_progress_bars,
    saved_remapping,
    stock_code,
    without_remapping,
)
from ropepatch.model.loading import SAFELY, check_report, load_tokenizer, warn_once
from ropepatch.model.rotary import base_model
from ropepatch.model.weights import (
    INDEX,
    SINGLE,
    Weights,
    fingerprint,
    read_headers,
    sha256,
)
from ropepatch.settings import HUB_NAME, Count, Length, refusal, shown
from ropepatch.settings import Number as Number
from ropepatch.settings import Whole as Whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE = "modeling_position_remapping.py"  # in the checkpoint's folder, for transformers
RECORD = "ropepatch.json"
RECORD_VERSION: Final = 1  # of the layout; older records have no version

Text = StrictStr
Tokens = Count
Keys = dict[Text, Any]  # free-form values


class Part(BaseModel):
    """A record, or an object within one; unlike settings it keeps unknown keys."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    def to_dict(self) -> dict[str, Any]:
        """Return the given keys, JSON-ready."""
        return self.model_dump(exclude_unset=True)


Content = TypeVar("Content", bound=Part)


def validated(
    kind: type[Content], content: Mapping[str, Any], hint: str, file: str = RECORD
) -> Content:
    """Parse the content of a record file; an error names the first key that is missing or wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise RopepatchError(
            f"{file}: {refusal(error, kind, content)}", hint=hint
        ) from error


TINY = Path(__file__).parents[1] / "data" / "tiny" / "checkpoint"
HUB_ID = re.compile(rf"{HUB_NAME}(/{HUB_NAME})?", re.ASCII)
ADAPTER = "adapter_config.json"
ADAPTER_BASE = "base_model_name_or_path"  # its key for the base model
ADAPTER_WEIGHTS = "adapter_model.safetensors"
READING = "reading.json"  # the fingerprint
# Chat templates, and the modules of sentence-transformers
NESTED = (
    "additional_chat_templates/*.jinja",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
)

# The files, other than weights, of transformers, tokenizers, processors and engines. Any other file may be
# private, and Mistral's params.json would give engines the unscaled RoPE.
KNOWN = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer.[0-9]*.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "encoder.json",
    "emoji.json",
    "spiece.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "bpe.model",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "audio_tokenizer_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
LICENCE = re.compile(  # LICENSE-2.0.txt, not LICENSE.bin, nor LICENSE_KEY.txt
    r"(?!.*(key|pass|secret|token(?!izer)|credential|private))"
    r"(LICEN[SC]ES?|NOTICES?|USE_POLICY)([ _-][^.]*)?(\.(\d+|txt|md|rst|html|pdf))*",
    re.IGNORECASE,
)
DOWNLOADED = [
    *KNOWN,
    *NESTED,
    "README.md",
    ADAPTER,
    RECORD,
    READING,
    INDEX,
    "LICEN[SC]E*",
    "[Ll]icen[sc]e*",
    "NOTICE*",
    "USE_POLICY*",
]

# The errors of the Hub's client for an answer of another server, e.g. the page of a captive portal
UNPARSED = AssertionError, AttributeError, LookupError, TypeError


def _local(model: str | Path, name: str) -> Path | None:
    """Find a local folder; None for what may be a Hub id.

    `tiny` is the bundled checkpoint; a folder of that name is `./tiny`.
    """
    check_name(name)
    expected = "MODEL is a checkpoint folder or a Hub id like owner/name"
    if not isinstance(model, str | os.PathLike) or not name.strip():
        raise RopepatchError(
            f"MODEL must be a folder or a Hub id, got {shown(model)}",
            hint=f"{expected}; . is this folder",
        )
    try:
        folder = TINY if name == "tiny" else Path(name).expanduser()
        if folder.is_dir():
            return folder
        exists = folder.exists()
    # The name is too long, no permission, no such ~user
    except (OSError, RuntimeError) as error:
        raise RopepatchError(
            f"cannot look for {name}: {error}", hint=expected
        ) from error
    if exists:
        raise RopepatchError(
            f"{name} is a file, not a checkpoint folder",
            hint="name the folder that holds config.json; only `ropepatch plan` and `ropepatch extend` "
            "support a GGUF file",
        )
    if isinstance(model, Path) or not HUB_ID.fullmatch(name):
        raise RopepatchError(f"no folder {name}", hint=f"{_meant(name)}{expected}")
    return None


def is_adapter(folder: Path) -> bool:
    """Whether the folder contains a PEFT adapter instead of a model."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").exists()


def is_carried(name: str) -> bool:
    """Return whether a file of this name is copied with a checkpoint."""
    is_known = any(fnmatchcase(name, pattern) for pattern in KNOWN)
    return is_known or LICENCE.fullmatch(name) is not None


def included(
    folder: Path, patterns: Sequence[str], *, but: Collection[str] = ()
) -> dict[str, Path]:
    """Find further files to copy with a checkpoint, by their paths in the folder.

    Args:
        folder: The checkpoint's folder.
        patterns: Patterns of paths, each of which must match; hidden files only match with their dot.
        but: Paths that are never copied.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    found: dict[str, Path] = {}
    for pattern in patterns:
        takes_hidden = "/." in f"/{pattern}"
        matching = [
            name
            for name in names
            if fnmatchcase(name, pattern)
            and name not in but
            and (takes_hidden or "/." not in f"/{name}")
        ]
        if not matching:
            raise RopepatchError(
                f"{argument('include', pattern)} names no file in {folder} that could be carried",
                hint="a pattern is a path in the folder, such as notes.md or 'examples/*'",
            )
        found |= {name: names[name] for name in matching}
    return found


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    """Download the files of a Hub id that match; with an index, its weight files too."""
    from huggingface_hub import snapshot_download

    # httpx's error, as the Hub's client imports it: the connection broke while downloading
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns)
        )
        if INDEX in patterns:
            files = [SINGLE, *_named_in(folder / INDEX)]
            snapshot_download(name, revision=folder.name, allow_patterns=files)
    except (HTTPError, OSError, ValueError, RuntimeError, *UNPARSED) as error:
        _explain(name, revision, error)
    return folder


def _named_in(index: Path) -> set[str]:
    """Return the weight files in an index, without validating it."""
    if not index.exists():
        return set()
    return set(
        re.findall(r'"([^"/]+\.safetensors)"', index.read_text(errors="replace"))
    )


def _explain(name: str, revision: str | None, error: Exception) -> NoReturn:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        message = f"{name} is gated"
        hint = "accept its licence on the Hub, then log in with `hf auth login`"
    elif isinstance(error, RevisionNotFoundError):
        message = f"{name} has no revision {revision}"
        hint = f"leave {argument('revision')} out for the newest"
    elif isinstance(error, RepositoryNotFoundError):
        message = f"no folder {name} here and no such model on the Hub"
        hint = f"{_meant(name)}check the spelling; for a private model log in with `hf auth login`"
    else:
        cause = " ".join(str(error.__cause__ or error).split())
        message = f"no folder {name} here, and no download: {cause}"
        hint = (
            f"{_meant(name)}check the path, the network, HF_ENDPOINT, `hf auth login` and the room in HF_HOME; "
            "a model downloaded before works offline"
        )
    raise RopepatchError(message, hint=hint) from error


def _meant(name: str) -> str:
    """Suggest `tiny` or a folder with a similar name, as the beginning of a hint."""
    files = Path(name).parent.glob("*/config.json")
    names = ["tiny", *(str(file.parent) for file in files)]
    near = get_close_matches(name, names, n=1, cutoff=0.75)
    return f"did you mean {near[0]}? " if near else ""


class Swapped(Part):
    """The record of a checkpoint with a swapped position encoding.

    Args:
        version: Version of the layout.
        needs_ropepatch: Why other libraries cannot load it, in one sentence.
        encoding: The name of the encoding that its weights need.
        parameters: The parameters of the encoding.
        model_type: The original model_type; config.json contains one that transformers rejects.
        architectures: The original architectures.
    """

    version: Literal[1]
    needs_ropepatch: Text
    encoding: Text
    parameters: dict[Text, Any]
    model_type: Text
    architectures: list[Text]


def write_swapped(folder: Path, encoding: str, parameters: Mapping[str, Any]) -> None:
    """Mark a folder that transformers wrote as a checkpoint with a swapped encoding."""
    config = read_json(folder / "config.json")
    record = {
        "version": RECORD_VERSION,
        "needs_ropepatch": "its position encoding is not RoPE: load it with ropepatch.load",
        "encoding": encoding,
        "parameters": dict(parameters),
        "model_type": config["model_type"],
        "architectures": config["architectures"],
    }
    write_json(folder / RECORD, record)
    config |= {"model_type": NEEDS_ROPEPATCH, "architectures": ["NeedsRopepatch"]}
    write_json(folder / "config.json", config)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder, or the files of a Hub id; files are read once, when needed.

    Args:
        folder: The folder.
        name: The name that the user gave; empty for a folder that ropepatch has written.
        revision: The commit of a checkpoint from the Hub.
        original: The original context length that the user gave instead of config.json's.
    """

    folder: Path
    name: str = ""
    revision: str | None = None
    original: Length | None = None

    @classmethod
    def find(
        cls,
        model: str | os.PathLike[str],
        revision: str | None = None,
        *,
        original: Length | None = None,
        weights: bool = False,
        include: Sequence[str] = (),
    ) -> Self:
        """Find a folder, or download a Hub id: config.json only, or everything including weights.

        Raises:
            RopepatchError: If there is no such model, or it cannot be downloaded.
        """
        if isinstance(model, os.PathLike):
            model = Path(model)
        name = "./tiny" if model == Path("tiny") else str(model)
        folder = _local(model, name)
        if folder is None:
            needed = DOWNLOADED if weights else ["config.json", ADAPTER]
            folder = _download(name, revision, [*needed, *include])
            return cls(folder, name, folder.name, original)
        if revision is not None:
            raise RopepatchError(
                f"{name} is a local folder, which has no revisions",
                hint=f"leave {argument('revision')} out",
            )
        return cls(folder, name, None, original)

    def complete(self, include: Sequence[str] = ()) -> Self:
        """Return the checkpoint with weights and all files downloaded, including those of ``include``.

        Raises:
            RopepatchError: If they cannot be downloaded.
        """
        if self.revision is not None:
            code = ["*.py"] if self.config.stand_in else []
            _download(self.name, self.revision, [*DOWNLOADED, *include, *code])
        return self

    @property
    def code(self) -> list[str]:
        """The pattern of the code files that a draft model or remote code keeps."""
        found = self.config.stand_in and any(self.folder.glob("*.py"))
        return ["*.py"] if found else []

    def check_unchanged(self) -> None:
        """Raise a `RopepatchError` if config.json has changed since it was read."""
        if read_json(self.folder / "config.json") != self.config.raw:
            raise changed_since(self.name)

    @cached_property
    def config(self) -> Config:
        """The content of config.json.

        Raises:
            RopepatchError: If it cannot be read.
        """
        if is_adapter(self.folder):
            raise RopepatchError(
                f"{self.name} holds a PEFT adapter, not a model",
                hint="merge it into its base model (merge_and_unload), save that, and extend what you saved",
            )
        return Config(read_json(self.folder / "config.json"), self.original)

    @property
    def raw(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.config.raw

    @property
    def kind(self) -> Kind:
        """The kind of checkpoint, by its model type."""
        return self.config.kind

    @cached_property
    def swapped(self) -> Swapped:
        """The record of a swapped position encoding."""
        content = {"version": RECORD_VERSION} | read_json(self.folder / RECORD)
        hint = "put config.json, ropepatch.json and the weights of the same checkpoint together"
        return validated(Swapped, content, hint)

    @property
    def positions(self) -> dict[str, Any]:
        """The JSON-ready encoding or position remapping that replaces RoPE; empty for RoPE."""
        if self.kind == "swapped":
            swapped = self.swapped.to_dict()
            return {
                "encoding": {key: swapped[key] for key in ("encoding", "parameters")}
            }
        if self.kind == "mapped":
            described = saved_remapping(self.raw)
            return {KEY: {key: described[key] for key in ("name", "parameters")}}
        return {}

    @cached_property
    def stock(self) -> Config:
        """The stock architecture and RoPE of these weights, without remapping or swapped encoding."""
        if self.kind == "swapped":
            own = self.swapped.model_dump(include={"model_type", "architectures"})
            return replace(self.config, raw=self.raw | own)
        if self.kind == "mapped":
            return replace(self.config, raw=without_remapping(self.raw))
        return self.config

    @cached_property
    def weights(self) -> Weights:
        """The weights by their headers; see `read_headers`."""
        return read_headers(self.folder)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the weights."""
        return fingerprint(self.weights)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return load_tokenizer(self.folder, self.stock.whole)

    def load(
        self,
        dtype: torch.dtype | None = None,
        device_map: str | dict[str, str] | None = None,
        quantization: Any = None,
        config: Config | None = None,
    ) -> PreTrainedModel:
        """Load the model with stock transformers, in eval mode, under the name that the user gave.

        Args:
            dtype: The dtype of the weights; None for that of the checkpoint.
            device_map: Where each layer is placed.
            quantization: How to quantise the weights.
            config: Another configuration than that of config.json, which transformers reads itself.

        Raises:
            RopepatchError: If it has a position remapping or a swapped encoding, its weights do not fit
                config.json, or the dtype does not support computation.
        """
        if self.config.unloaded:
            raise RopepatchError(
                f"{self.name or self.folder}: {self.config.unloaded}, so its weights are not loaded",
                hint="plan and extend change its config.json",
            )
        if dtype is not None and dtype.itemsize < 2:  # float8 is for storage only
            raise RopepatchError(
                f"no model computes in {str(dtype).removeprefix('torch.')}",
                hint="dtype is float32, bfloat16 or float16",
            )
        own = config or self.config
        how = SAFELY | {
            "dtype": dtype or "auto",
            "use_safetensors": True,
            "output_loading_info": True,
            "device_map": device_map,
            "quantization_config": quantization,
        }
        # Else stock transformers parses config.json itself
        if config or own.stand_in:
            how["config"] = copy.deepcopy(own.whole)
        load: Any = loader_of(own.whole).from_pretrained
        hint = "fix config.json or the weights so that transformers loads them"
        # transformers initialises missing weights at random, before they raise an error below.
        with (
            stock_code(f"load {self.folder}", hint),
            no_progress_bars(),
            torch.random.fork_rng(devices=[]),
        ):
            model, report = load(self.folder, **how)
        unused = check_report(model, report)
        model.config.return_dict = True
        if self.name:
            model.config.name_or_path = self.name
            model.config._commit_hash = self.revision
            if unused:
                warn_once(
                    f"{self.name}: its model does not use {len(unused)} of the weights, for instance "
                    f"{unused[0]}"
                )
        loaded: PreTrainedModel = model.eval()
        return loaded


@dataclass(frozen=True, eq=False)
class InMemory:
    """A model in memory, or a configuration.

    Args:
        name: The name of the checkpoint that it was loaded from, or of its class.
        revision: The commit of that checkpoint.
        config: Its configuration.
    """

    name: str
    revision: str | None
    config: Config

    @classmethod
    def of(
        cls, model: nn.Module | PreTrainedConfig, original: Length | None = None
    ) -> Self:
        """Take a model, wrapped or not, or a configuration.

        Raises:
            RopepatchError: If it has no supported RoPE.
        """
        base: Any = model if isinstance(model, PreTrainedConfig) else base_model(model)
        config = getattr(base, "config", base)
        revision = None if base is config else getattr(config, "_commit_hash", None)
        name = str(config.name_or_path or type(base).__name__)
        return cls(name, revision, Config.of(base, original))

    def complete(self, include: Sequence[str] = ()) -> Checkpoint:
        """Find the checkpoint by its name, with its weights and all its files.

        Raises:
            RopepatchError: If it is not found, cannot be downloaded, has custom code or another RoPE.
        """
        if self.config.custom is not None:
            raise RopepatchError(
                f"{self.name} has code of its own, and stock transformers loads no checkpoint of it",
                hint="patch and measure it in memory; to save, plan a checkpoint folder that needs no code",
            )
        revision = None if Path(self.name).is_dir() else self.revision
        original = self.config.original
        return Checkpoint.find(
            self.name, revision, original=original, weights=True, include=include
        )


def changed_since(name: str) -> RopepatchError:
    """Make the error of a checkpoint that changed after it was planned."""
    return RopepatchError(f"{name} changed since it was planned", hint="plan it again")


def code_of(folder: Path) -> dict[str, str]:
    """Return the name and sha256 of a folder's code for the record; empty without a file."""
    file = folder / CODE
    return {CODE: sha256(file)} if file.is_file() else {}


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Save a model without progress bars; report a file that cannot be written in one line."""
    try:
        with no_progress_bars():
            yield
    except SafetensorError as error:
        hint = f"make room, or choose another {argument('out')}"
        raise RopepatchError(f"cannot write {folder}: {error}", hint=hint) from error
