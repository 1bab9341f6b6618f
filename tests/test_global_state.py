"""No public function changes global state of the process, unless its docstring says so."""

import inspect
import locale
import logging
import os
import random
import shutil
import signal
import sys
import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from checkpoint_folders import edit_json
from completions_server import Manners, serving
from engines import Engine
from hub_server import Hub, speak_to
from hub_server import serving as serving_hub
from peft import LoraConfig, get_peft_model
from run_recipes import ask_little, run_python, small_recipe
from transformers.utils import logging as transformers_logging

import ropepatch
from ropepatch.evaluation.intervals import Mean
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.progress import silent

SEEDS = {"Python's random state", "numpy's random state", "torch's random state"}
SETTERS = {"train"}  # their docstrings say that they set the seeds


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Arguments of the functions: a checkpoint, a folder of results, an adapter."""
    place = tmp_path_factory.mktemp("made")
    extended = ropepatch.extend(
        "tiny", place / "extended", to="2x", reading=True
    ).folder
    ropepatch.evaluate(
        "tiny", lengths="64", windows=2, out=place / "results", say=silent
    )
    model, _ = ropepatch.load("tiny", device="cpu")
    handle, adapter = ropepatch.patch(model, to="2x"), place / "adapter"
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(
        adapter
    )
    handle.record(adapter)
    return {"extended": extended, "results": place / "results", "adapter": adapter}


def recipe():
    return small_recipe(trainer={"max_steps": 1})


def probed(made):
    extended = made["extended"]
    with serving(Engine(extended), Checkpoint(extended).tokenizer, Manners()) as url:
        return ropepatch.probe(url, extended, timeout=60.0)


def rejected(made, out):
    shutil.copytree(made["extended"], out)
    edit_json(out / "config.json", num_hidden_layers=9)
    with pytest.raises(ropepatch.RopepatchError, match="missing keys"):
        ropepatch.load(out)


def retrieved(verb, **options):
    return lambda made, out, tiny: verb(*tiny, lengths="128", haystacks=3, **options)


def undone(change):
    def run(made, out, tiny):
        with change(tiny[0]):
            pass

    return run


CALLS = {
    "active": lambda made, out, tiny: ropepatch.active(tiny[0]),
    "compare": lambda made, out, tiny: ropepatch.compare(
        "tiny",
        to="2x",
        methods="yarn",
        windows=3,
        haystacks=0,
        report=out.with_suffix(".html"),
        say=silent,
    ),
    "diagnose": lambda made, out, tiny: ropepatch.diagnose(made["extended"]),
    "difference": lambda made, out, tiny: ropepatch.difference(
        Mean.of([(1, 2)]), Mean.of([(2, 2)])
    ),
    "evaluate": lambda made, out, tiny: ropepatch.evaluate(
        "tiny", lengths="64", windows=2, say=silent
    ),
    "explore": lambda made, out, tiny: ropepatch.explore(
        "tiny", out=out.with_suffix(".html")
    ),
    "extend": lambda made, out, tiny: ropepatch.extend(
        "tiny", out, to="2x", say=silent
    ),
    "fold_attention": lambda made, out, tiny: ropepatch.fold_attention(
        made["extended"], out
    ),
    "load": lambda made, out, tiny: ropepatch.load("tiny"),
    "load(rejected)": lambda made, out, tiny: rejected(made, out),
    "load_adapter": lambda made, out, tiny: ropepatch.load_adapter(made["adapter"]),
    "passkey": retrieved(ropepatch.passkey),
    "patch": undone(lambda model: ropepatch.patch(model, to="2x")),
    "patch(remapping)": undone(
        lambda model: ropepatch.patch(model, "self-extend", to="2x")
    ),
    "perplexity": lambda made, out, tiny: ropepatch.perplexity(
        *tiny, ["Once upon a time"]
    ),
    "plan": lambda made, out, tiny: str(ropepatch.plan("tiny", to="2x")),
    "plot": lambda made, out, tiny: ropepatch.plot(made["results"]),
    "probe": lambda made, out, tiny: probed(made),
    "push": lambda made, out, tiny: ropepatch.push(made["extended"], "local/model"),
    "read_recipe": lambda made, out, tiny: ropepatch.read_recipe("tiny"),
    "read_results": lambda made, out, tiny: ropepatch.read_results(made["results"]),
    "retrieve": retrieved(ropepatch.retrieve, keys=1),
    "swap": undone(lambda model: ropepatch.swap(model, "alibi")),
    "train": torch.inference_mode()(
        lambda made, out, tiny: ropepatch.train(
            "tiny", out, recipe=recipe(), say=silent
        )
    ),
    "train(dry)": lambda made, out, tiny: ropepatch.train(
        "tiny", recipe=recipe(), dry_run=True
    ),
}


def process_state():
    """The global state of the process, by name."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "Python's random state": random.getstate(),
        "numpy's random state": str(np.random.get_state(legacy=False)),
        "torch's random state": torch.get_rng_state().tolist(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "determinism": (
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        "warnings filters": (list(warnings.filters), warnings.showwarning),
        "loggers": {
            one.name: (one.level, list(one.handlers), one.disabled, one.propagate)
            for one in loggers
            if isinstance(one, logging.Logger)
        },
        "logging": (
            logging.root.manager.disable,
            transformers_logging.is_progress_bar_enabled(),
        ),
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "rcParams": dict(mpl.rcParams),
        "recursion limit": sys.getrecursionlimit(),
        "hooks": (sys.excepthook, sys.stdout, sys.stderr),
        "folder": Path.cwd(),
        "locale": locale.setlocale(locale.LC_ALL),
    }


@pytest.mark.parametrize("name", CALLS)
def test_api_functions_do_not_change_global_process_state(
    name, made, tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ask_little(monkeypatch)
    with serving_hub(Hub(token="hf_any")) as hub, warnings.catch_warnings():
        speak_to(hub, monkeypatch)
        warnings.simplefilter("error")
        # Of huggingface_hub
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
        before = process_state()
        CALLS[name](made, tmp_path / "out", tiny)
        after = process_state()
    after["loggers"] = {key: after["loggers"][key] for key in before["loggers"]}
    changed = {key for key, value in before.items() if after[key] != value}
    assert changed <= (SEEDS if name in SETTERS else set())


def test_the_table_of_calls_covers_every_api_function():
    assert {name.partition("(")[0] for name in CALLS} == {
        name for name in ropepatch.HOME if inspect.isfunction(getattr(ropepatch, name))
    } - {"make_scaling", "make_remapping", "make_encoding"}


@pytest.mark.slow
def test_importing_the_planning_module_does_not_change_pythons_random_state():
    code = "import random; state = random.getstate(); import ropepatch.extension.planning; "
    run_python("-c", f"{code}assert random.getstate() == state")
