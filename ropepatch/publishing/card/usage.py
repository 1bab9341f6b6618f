"""How to load a checkpoint: lines that are right for its rope, by what the record says of each engine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ropepatch.publishing.card.markdown import fenced, plain, table, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ropepatch.extension.record import Engine
    from ropepatch.publishing.card.extended import Extended

TOKENIZERS = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}


def sections(made: Extended) -> Iterator[str]:
    """A section for each of the engines that most people use, and a table of all."""
    if made.is_adapter:
        yield from _adapter(made)
        return
    yield from _transformers(made)
    yield from _vllm(made)
    yield from _llama_cpp(made)
    if made.record.engines:
        yield "### Who reads this rope"
        yield "By the engines' sources."
        rows = [[plain(one.engine), plain(one.reads), plain(one.note)] for one in made.record.engines]
        yield table(["engine", "reads it", "note"], rows)


def _transformers(made: Extended) -> Iterator[str]:
    names, where = ["AutoModelForCausalLM"], _python(made)
    lines = [f"model = AutoModelForCausalLM.from_pretrained({where})"]
    if made.files & TOKENIZERS:
        names.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({where})")
    yield "### transformers"
    yield fenced("\n".join([f"from transformers import {', '.join(names)}", "", *lines]), "python")
    engine = made.engine("transformers 5.x")
    if engine is not None and engine.reads != "yes":
        yield from _reservation(engine)


def _adapter(made: Extended) -> Iterator[str]:
    """An adapter is right only on the rope that it was trained under."""
    begin, folder = "import ropepatch\n", text(made.name)
    if "/" in made.name:
        begin = f"{begin}from huggingface_hub import snapshot_download\n"
        folder = f"snapshot_download({_python(made)})"
    known = made.base_id or made.record.model == "tiny"
    base = "" if known else f", base={text('path/to/' + made.base_name)}"
    yield "### With ropepatch"
    yield fenced(f"{begin}\nmodel, tokenizer = ropepatch.load_adapter({folder}{base})", "python")
    yield "PEFT alone would put the adapter on the rope of the base model, which it was not trained under."


def _vllm(made: Extended) -> Iterator[str]:
    engine = made.engine("vLLM")
    if engine is None:
        return
    yield "### vLLM"
    if engine.reads == "no":
        yield f"vLLM does not read this rope: {plain(engine.note)}."
        return
    yield fenced(" ".join(["vllm serve", _shell(made), *engine.switches]), "bash")
    yield from _reservation(engine)


def _llama_cpp(made: Extended) -> Iterator[str]:
    engine = made.engine("llama.cpp")
    if engine is None or (engine.reads != "no" and not made.fits_gguf):
        return
    yield "### llama.cpp"
    if not made.fits_gguf:
        yield f"llama.cpp does not read this rope: {plain(engine.note)}."
        return
    file = shlex.quote(f"{made.short_name}.gguf")
    lines = [f"ropepatch export {_shell(made)} --gguf", f"llama-cli -m {file} -c {made.target}"]
    yield fenced("\n".join(lines), "bash")


def _python(made: Extended) -> str:
    """Its name and branch as arguments of Python."""
    return text(made.name) + (f", revision={text(made.branch)}" if made.branch else "")


def _shell(made: Extended) -> str:
    """Its name and branch as words of a command line."""
    branch = f" --revision {shlex.quote(made.branch)}" if made.branch else ""
    return shlex.quote(made.name) + branch


def _reservation(engine: Engine) -> Iterator[str]:
    if engine.note:
        only = "Only partly: " if engine.reads == "partly" else "Note: "
        yield f"{only}{plain(engine.note)}."
