"""The checkpoint a user names: a local folder, a Hub id or `tiny`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple, NoReturn

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import check_name, check_regular
from ropepatch.model.record_file import FILE as RECORD
from ropepatch.model.weights import INDEX, SINGLE
from ropepatch.settings import HUB_NAME, parse_yaml, shown

TINY = Path(__file__).parents[1] / "data" / "tiny" / "checkpoint"
HUB_ID = re.compile(rf"{HUB_NAME}(/{HUB_NAME})?", re.ASCII)
SHARED = re.compile(
    rf"{HUB_ID.pattern}(:[\w.+-]+)?", re.ASCII
)  # a dataset may have a config
ADDRESS = re.compile(r"(https?://)(?:[^/]*@)?([^/]+).*")
PASSED_ON = ("license", "license_name", "license_link", "language")
ADAPTER = "adapter_config.json"
READING = "reading.json"  # the fingerprint
TEMPLATES = "additional_chat_templates"  # the only subfolder of a checkpoint that transformers uses
# The files, other than weights, of transformers, tokenizers, processors and engines. Any other file may be
# private, and Mistral's params.json would give engines the unscaled RoPE.
KNOWN = (
    *(
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
    *(
        "tokenizer.json",
        "tokenizer.[0-9]*.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ),
    *(
        "added_tokens.json",
        "tokenizer.model",
        "tokenizer.model.v*",
        "tekken.json",
        "tiktoken.model",
    ),
    *(
        "*.tiktoken",
        "vocab.json",
        "vocab.txt",
        "vocab.bpe",
        "merges.txt",
        "encoder.json",
        "emoji.json",
    ),
    *("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "bpe.model"),
    *(
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
    ),
    *(
        "audio_tokenizer_config.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
    ),
)
LICENCE = re.compile(  # LICENSE-2.0.txt, not LICENSE.bin, nor LICENSE_KEY.txt
    r"(?!.*(key|pass|secret|token(?!izer)|credential|private))"
    r"(LICEN[SC]ES?|NOTICES?|USE_POLICY)([ _-][^.]*)?(\.(\d+|txt|md|rst|html|pdf))*",
    re.IGNORECASE,
)
DOWNLOADED = [
    *(*KNOWN, f"{TEMPLATES}/*.jinja", "README.md", ADAPTER, RECORD, READING, INDEX),
    *("LICEN[SC]E*", "[Ll]icen[sc]e*", "NOTICE*", "USE_POLICY*"),
]


class Place(NamedTuple):
    """Where the files of a model are.

    Args:
        folder: The local folder.
        name: The name that the user gave.
        revision: The commit of a checkpoint from the Hub.
    """

    folder: Path
    name: str
    revision: str | None


def locate(
    model: str | Path,
    revision: str | None = None,
    *,
    weights: bool,
    include: Sequence[str] = (),
) -> Place:
    """Find a local folder, or download a Hub id; without weights only config.json.

    `tiny` is the bundled checkpoint; a folder of that name is `./tiny`.
    """
    name = "./tiny" if model == Path("tiny") else str(model)
    check_name(name)
    expected = "MODEL is a checkpoint folder or a Hub id like owner/name"
    if not isinstance(model, str | os.PathLike):
        raise RopepatchError(
            f"MODEL must be a folder or a Hub id, got {shown(model)}", hint=expected
        )
    if isinstance(model, str) and not model.strip():
        raise RopepatchError(
            f"MODEL must not be empty, got {model!r}",
            hint=f"{expected}; . is this folder",
        )
    try:
        folder = TINY if name == "tiny" else Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (
        OSError,
        RuntimeError,
    ) as error:  # name too long, no permission, no such ~user
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(
            f"cannot look for {name}: {reason}", hint=expected
        ) from error
    models = [folder]
    if is_folder:
        models = (
            [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
        )
    if exists and (
        file := next((one for one in models if one.suffix.lower() == ".gguf"), None)
    ):
        raise RopepatchError(
            f"{file} is a GGUF file, which only `ropepatch plan` and `ropepatch extend` support",
            hint="give the file itself; to measure or train, use the checkpoint that it was made from",
        )
    if is_folder:
        if revision is not None:
            what = (
                "tiny comes with ropepatch and"
                if name == "tiny"
                else f"{name} is a local folder, which"
            )
            raise RopepatchError(
                f"{what} has no revisions", hint=f"leave {argument('revision')} out"
            )
        check_no_adapter(folder, name)
        return Place(folder, name, None)
    if exists:
        message = f"{name} is a file, not a checkpoint folder"
        raise RopepatchError(message, hint="name the folder that holds config.json")
    if isinstance(model, Path) or not HUB_ID.fullmatch(name):
        raise RopepatchError(f"no folder {name}", hint=f"{_meant(name)}{expected}")
    return (
        download(name, revision, include=include)
        if weights
        else _from_hub(name, revision, ["config.json", ADAPTER, *include])
    )


def is_adapter(folder: Path) -> bool:
    """Whether the folder contains a PEFT adapter instead of a model."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").exists()


def check_no_adapter(folder: Path, name: str) -> None:
    """Raise a `RopepatchError` for a folder with a PEFT adapter and no model."""
    if is_adapter(folder):
        raise RopepatchError(
            f"{name} holds a PEFT adapter, not a model",
            hint="merge it into its base model (merge_and_unload), save that, and extend what you saved",
        )


def download(name: str, revision: str | None, *, include: Sequence[str] = ()) -> Place:
    """Download the files of a Hub id that ropepatch needs, and those that match ``include``."""
    return _from_hub(name, revision, [*DOWNLOADED, *include])


def is_carried(name: str) -> bool:
    """Return whether a file of this name is copied with a checkpoint."""
    return (
        any(fnmatchcase(name, pattern) for pattern in KNOWN)
        or LICENCE.fullmatch(name) is not None
    )


def included(
    folder: Path, patterns: Sequence[str], *, but: Collection[str] = ()
) -> dict[str, Path]:
    """Find further files to copy with a checkpoint, by their paths in the folder.

    Args:
        folder: The checkpoint's folder.
        patterns: Patterns of paths, each of which must match; hidden files only match with their dot.
        but: Paths that are never copied.
    """
    names = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    found: dict[str, Path] = {}
    for pattern in patterns:
        matching = [
            name for name in names if fnmatchcase(name, pattern) and name not in but
        ]
        if "/." not in f"/{pattern}":
            matching = [name for name in matching if "/." not in f"/{name}"]
        if not matching:
            raise RopepatchError(
                f"{argument('include', pattern)} names no file in {folder} that could be carried",
                hint="a pattern is a path in the folder, such as notes.md or 'examples/*'",
            )
        found |= {name: names[name] for name in matching}
    return found


def _from_hub(name: str, revision: str | None, patterns: list[str]) -> Place:
    from huggingface_hub import snapshot_download

    # httpx's error, as the Hub's client imports it: the connection broke while downloading
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    with hub_answers(name):
        try:
            folder = Path(
                snapshot_download(name, revision=revision, allow_patterns=patterns)
            )
            if INDEX in patterns:
                files = [SINGLE, *_named_in(folder / INDEX)]
                snapshot_download(name, revision=folder.name, allow_patterns=files)
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            _explain(name, revision, error)
    return Place(folder, name, folder.name)


@contextmanager
def hub_answers(repo: str) -> Iterator[None]:
    """Report in one line that the Hub's client cannot parse a response, e.g. of a captive portal."""
    try:
        yield
    except RopepatchError:
        raise
    except Exception as error:
        modules = [
            frame.f_globals.get("__name__", "")
            for frame, _ in walk_tb(error.__traceback__)
        ]
        if not any(name.startswith("huggingface_hub") for name in modules):
            raise
        raise RopepatchError(
            f"what answered for {repo} is not what the Hub answers",
            hint="check HF_ENDPOINT, and whether a proxy stands between",
        ) from error


def _named_in(index: Path) -> set[str]:
    """Return the weight files in an index, without validating it."""
    return (
        set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text(errors="replace")))
        if index.exists()
        else set()
    )


def _explain(name: str, revision: str | None, error: Exception) -> NoReturn:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision}" if revision else ""
    answer = error if isinstance(error, HfHubHTTPError) else error.__cause__
    if isinstance(error, GatedRepoError):
        message, hint = (
            f"{name} is gated",
            "accept its licence on the Hub, then log in with `hf auth login`",
        )
    elif isinstance(error, RevisionNotFoundError):
        message, hint = (
            f"{name} has no revision {revision}",
            f"leave {argument('revision')} out for the newest",
        )
    elif isinstance(error, RepositoryNotFoundError):
        message = f"no folder {name} here and no such model on the Hub"
        hint = f"{_meant(name)}check the spelling; for a private model log in with `hf auth login`"
    elif isinstance(answer, HfHubHTTPError):
        status = answer.response.status_code
        message = f"no folder {name} here, and the Hub answered {status} for it{at}"
        hint = (
            "log in with `hf auth login`, or check HF_TOKEN"
            if status in (401, 403)
            else "try again later"
        )
    elif isinstance(error, OSError) and error.errno:
        message = f"cannot download {name}{at}: {os.strerror(error.errno)}"
        hint = (
            "downloads go to the folder in HF_HOME: make room there, or choose another"
        )
    elif constants.HF_HUB_OFFLINE:
        message = f"no folder {name} here, and the Hub is switched off (HF_HUB_OFFLINE)"
        hint = f"{_meant(name)}unset HF_HUB_OFFLINE to download it; what was downloaded before works without"
    else:
        message = f"no folder {name} here, and the Hub did not answer for it{at}"
        hint = f"{_meant(name)}check the path and the network; a model downloaded before works offline"
    raise RopepatchError(message, hint=hint) from error


def _meant(name: str) -> str:
    """Suggest `tiny` or a folder with a similar name, as the beginning of a hint."""
    here = Path(name).parent
    folders = (
        [str(here / file.parent.name) for file in here.glob("*/config.json")]
        if here.is_dir()
        else []
    )
    near = get_close_matches(name, ["tiny", *folders], n=1, cutoff=0.75)
    return f"did you mean {near[0]}? " if near else ""


def stated_by_card(folder: Path) -> dict[str, Any]:
    """Read the licence and language from the model card (README.md), for derived models."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        front = REGEX_YAML_BLOCK.search(
            (folder / "README.md").read_text(encoding="utf-8-sig")
        )
        metadata = parse_yaml(front[2]) or {} if front else {}
        texts = {key: metadata.get(key) for key in PASSED_ON}
        json.dumps(texts, ensure_ascii=False, default=str).encode()
    except (
        Exception
    ):  # no card, or invalid metadata: PyYAML passes on errors of int() and others
        return {}
    return {
        key: value
        for key, value in texts.items()
        if isinstance(value, str) or _are_texts(value)
    }


def _are_texts(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, str) for item in value)
    )


def check_inside(files: Collection[Path], folder: Path) -> None:
    """Raise a `RopepatchError` for a link that leads out of the checkpoint, or a non-regular file.

    The Hub's cache links a snapshot's files to its own blobs; these count as inside.
    """
    check_regular(*files)
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for file in files:
        target = file.resolve()
        if not (target.is_relative_to(home) or target.parent == blobs):
            raise RopepatchError(
                f"{file} is a link that leads out of the checkpoint, to {target}",
                hint="put the file itself there if it belongs to the checkpoint, else remove the link",
            )


def shown_name(name: str) -> str:
    """Return a model's or text's name for publication: a Hub id, a path's last part, a URL's host.

    `owner/name` is kept even if it is a relative path.
    """
    if address := ADDRESS.fullmatch(name):
        return address[1] + address[2]
    if SHARED.fullmatch(name):
        return name
    return re.split(r"[/\\]+", name.rstrip("/\\"))[-1] or "/"


def shown_command(command: str) -> str:
    """Shorten every path in a command line to its last part."""
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that do not close
        words = command.split()
    return shlex.join(map(_shown_word, words))


def _shown_word(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and not re.search(r"[/\\]", option):
        return f"{option}={shown_name(value)}"
    return shown_name(word)


# Keys whose values may be paths: models, methods or texts
NAMES = ("model", "name", "text", "recipe_texts")


def without_paths(content: Any) -> Any:
    """Return JSON-ready data with names and commands shortened for publication."""
    if isinstance(content, list):
        return [without_paths(item) for item in content]
    if not isinstance(content, dict):
        return content
    shown = {key: without_paths(value) for key, value in content.items()}
    for key in shown.keys() & {*NAMES, "command"}:
        show = shown_command if key == "command" else shown_name
        if isinstance(value := shown[key], str):
            shown[key] = show(value)
        elif isinstance(value, list):
            shown[key] = [
                show(item) if isinstance(item, str) else item for item in value
            ]
    return shown
