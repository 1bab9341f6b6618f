"""How to load a model: lines that are right for its rope, by what the record says of each engine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ropepatch.publishing.card.markdown import fenced, plain, table, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ropepatch.extension.record import Engine
    from ropepatch.publishing.card.extended import Extended

TOKENIZERS = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}


def sections(model: Extended) -> Iterator[str]:
    """A section for each of the engines that most people use, and a table of all."""
    if model.is_adapter:
        yield from _adapter(model)
        return
    yield from _transformers(model)
    yield from _vllm(model)
    yield from _llama_cpp(model)
    if model.record.engines:
        yield "### Who reads this rope"
        yield "By the engines' sources."
        rows = [[plain(one.engine), plain(one.reads), plain(one.note)] for one in model.record.engines]
        yield table(["engine", "reads it", "note"], rows)


def _transformers(model: Extended) -> Iterator[str]:
    names, where = ["AutoModelForCausalLM"], _python(model)
    lines = [f"model = AutoModelForCausalLM.from_pretrained({where})"]
    if model.files & TOKENIZERS:
        names.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({where})")
    yield "### transformers"
    yield fenced("\n".join([f"from transformers import {', '.join(names)}", "", *lines]), "python")
    engine = model.engine("transformers 5.x")
    if engine is not None and engine.reads != "yes":
        yield from _reservation(engine)


def _adapter(model: Extended) -> Iterator[str]:
    """An adapter is right only on the rope that it was trained under."""
    begin, folder = "import ropepatch\n", text(model.name)
    if "/" in model.name:
        begin = f"{begin}from huggingface_hub import snapshot_download\n"
        folder = f"snapshot_download({_python(model)})"
    is_public = model.base_id or model.record.model == "tiny"
    base = "" if is_public else f", base={text('path/to/' + model.base_name)}"
    yield "### With ropepatch"
    yield fenced(f"{begin}\nmodel, tokenizer = ropepatch.load_adapter({folder}{base})", "python")
    yield "PEFT alone would put the adapter on the rope of the base model, which it was not trained under."


def _vllm(model: Extended) -> Iterator[str]:
    engine = model.engine("vLLM")
    if engine is None:
        return
    yield "### vLLM"
    if engine.reads == "no":
        yield f"vLLM does not read this rope: {plain(engine.note)}."
        return
    yield fenced(" ".join(["vllm serve", _shell(model), *engine.switches]), "bash")
    yield from _reservation(engine)


def _llama_cpp(model: Extended) -> Iterator[str]:
    engine = model.engine("llama.cpp")
    if engine is None or (engine.reads != "no" and not model.fits_gguf):
        return
    yield "### llama.cpp"
    if not model.fits_gguf:
        yield f"llama.cpp does not read this rope: {plain(engine.note)}."
        return
    file = shlex.quote(f"{model.short_name}.gguf")
    lines = [f"ropepatch export {_shell(model)} --gguf", f"llama-cli -m {file} -c {model.record.target}"]
    yield fenced("\n".join(lines), "bash")


def _python(model: Extended) -> str:
    """Its name and branch as arguments of Python."""
    return text(model.name) + (f", revision={text(model.branch)}" if model.branch else "")


def _shell(model: Extended) -> str:
    """Its name and branch as words of a command line."""
    branch = f" --revision {shlex.quote(model.branch)}" if model.branch else ""
    return shlex.quote(model.name) + branch


def _reservation(engine: Engine) -> Iterator[str]:
    if engine.note:
        only = "Only partly: " if engine.reads == "partly" else "Note: "
        yield f"{only}{plain(engine.note)}."
