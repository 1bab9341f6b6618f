"""Fixtures of several test files.

They import torch when they are used: the process that starts the workers of xdist reads this file first.
"""

import functools
import gc
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from lacking import lacking

gc.disable()  # while the tests are imported, a quarter of the time of that


def pytest_addoption(parser):
    """`--part 2/3` runs all tests of `make test` and the second third of the slow and sweep tests."""
    parser.addoption(
        "--part",
        metavar="K/N",
        default="1/1",
        help="a part of the tests marked slow or sweep",
    )
    parser.addoption(
        "--bfloat16", action="store_true", help="as on a CPU with units for bfloat16"
    )


def pytest_collection_modifyitems(config, items):
    """Distribute slow tests by file, since a file shares slow fixtures; of a sweep keep every Nth item."""
    part, parts = map(int, config.getoption("--part").split("/"))
    seen = {}
    left_out = []
    for item in items:
        name = item.nodeid.split("[")[0]
        if item.get_closest_marker("sweep"):
            turn = seen[name] = seen.get(name, zlib.crc32(name.encode())) + 1
        elif item.get_closest_marker("slow"):
            turn = zlib.crc32(name.split("::")[0].encode())
        else:
            continue
        if turn % parts != part % parts:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cpu_units(request):
    """Report no bfloat16 units of the CPU on every machine, or all of them with `--bfloat16`."""
    import torch

    from ropepatch.model.precision import UNITS

    with pytest.MonkeyPatch.context() as patching:
        for supported in UNITS:
            patching.setattr(
                torch.cpu,
                supported,
                lambda: request.config.getoption("--bfloat16"),
                raising=False,
            )
        yield


@pytest.fixture(scope="session", autouse=True)
def skeletons():
    """Build the skeleton of a configuration once: nothing changes a skeleton."""
    from ropepatch.model import config as configs

    built, build = {}, configs.blueprint

    def blueprint(config):
        stated = config.to_json_string(use_diff=False)
        key = (type(config), configs.loader_of(config), stated)
        if key not in built:
            built[key] = build(config)
        return built[key]

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(configs, "blueprint", blueprint)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_repeated_work():
    """Leave out what nobody reads, and do once what has the same result."""
    import jinja2
    from transformers import PreTrainedConfig

    from ropepatch.model import checkpoint

    known, identify = {}, checkpoint.fingerprint

    def fingerprint(weights):
        states = [(file, file.stat()) for file in weights.files]
        key = tuple(
            (file, at.st_ino, at.st_size, at.st_mtime_ns) for file, at in states
        )
        if key not in known:
            known[key] = identify(weights)
        return known[key]

    with pytest.MonkeyPatch.context() as patching:
        report = "torch.utils.collect_env.get_pretty_env_info"  # for lm-eval
        patching.setattr(report, lambda: "")
        # for a line of the log that is not shown
        patching.setattr(PreTrainedConfig, "__repr__", object.__repr__)
        patching.setattr(jinja2, "Template", functools.cache(jinja2.Template))
        patching.setattr(checkpoint, "fingerprint", fingerprint)
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """Hear SIGINT and SIGHUP, also where `make test &` or `nohup` starts this process with them ignored."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny():
    """The bundled trained checkpoint; a test that changes the model must restore it."""
    import ropepatch

    return ropepatch.load("tiny", device="cpu")


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of the bundled checkpoint."""
    from tokenizer_makes import TOKENIZERS

    return TOKENIZERS["bundled"]()


@pytest.fixture
def model():
    """A small random LLaMA, which a test may change."""
    from tiny_models import tiny_model

    return tiny_model("llama")


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A small random checkpoint; tests must not change it."""
    from checkpoint_folders import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("template") / "tiny-llama")


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """The same checkpoint with sharded weights."""
    from checkpoint_folders import write_checkpoint

    return write_checkpoint(
        tmp_path_factory.mktemp("shards") / "tiny-llama", max_shard_size="30KB"
    )


@pytest.fixture(scope="session")
def shared():
    """The folder of real checkpoints and texts; without it the test is skipped, or fails in CI."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("ROPEPATCH_SHARED", default))
    if not folder.is_dir():
        lacking(f"no real checkpoints and texts at {folder} (set ROPEPATCH_SHARED)")
    return folder


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run `ropepatch` in this process, without the import time; return its output and exit code."""
    from ropepatch.cli import main

    def run(*words, cwd=None):
        line = ["ropepatch", *map(str, words)]
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", line)
            if cwd is not None:
                patch.chdir(cwd)
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code or 0
        return subprocess.CompletedProcess(line, code, *capsys.readouterr())

    return run
