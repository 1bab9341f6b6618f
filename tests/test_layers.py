"""Allowed imports between modules, and the public names of the package."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ropepatch

PACKAGE = Path(ropepatch.__file__).parent
# A subpackage may import those on earlier lines; subpackages on one line must not import each other.
LAYERS = [
    {"errors"},
    {"columns", "files"},
    {"settings"},
    {"scaling"},
    {"data"},
    {"model"},
    {"doctor"},
    {"attention", "processes"},
    {"encodings", "extension", "progress"},
    {"evaluation", "probing"},
    {"report"},
    {"training", "publishing", "gallery"},
    {"verbs"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, layer in enumerate(LAYERS) for room in layer}
MEASURES_A_PLAN = {
    "measuring.py",
    "tasks.py",
    "suites.py",
}  # only these of evaluation import `extension`
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
LAUNCHED = {
    *("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    *("is_main_process", "process_index", "num_processes"),
}


@cache
def nodes(file):
    return [*ast.walk(ast.parse((PACKAGE / file).read_text("utf-8")))]


def imports(file):
    """All that a file imports, including inside functions and only for types."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def upward_imports(file):
    """The imports of a file that are not from lower layers."""
    room, _, rest = file.partition("/")
    own = room.removesuffix(".py")
    for name in imports(file):
        package, _, inner = name.partition(".")
        other = inner.split(".")[0]
        other = other if other in LEVEL else "__init__"
        if package != "ropepatch" or other == own:
            continue
        measures = own == "evaluation" and other == "extension"
        if LEVEL[other] >= LEVEL[own] or (measures and rest not in MEASURES_A_PLAN):
            yield file, name


def test_modules_import_only_lower_layers():
    files = [file for file in FILES if file not in ("__init__.py", "__main__.py")]
    assert not [one for file in files for one in upward_imports(file)]


def test_every_module_belongs_to_a_listed_layer():
    listed = {file.removesuffix(".py").split("/")[0] for file in FILES}
    assert listed == set(LEVEL)
    assert len(listed) <= 25


def distributed_state_in(file):
    """The names in a file of launcher variables, torch.distributed or the process state of accelerate."""
    words = {
        getattr(node, "attr", None) or getattr(node, "value", None)
        for node in nodes(file)
        if isinstance(node, ast.Attribute)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }
    return {
        word
        for word in words | imports(file)
        if word in LAUNCHED or re.search(r"^torch\.distributed\b|PartialState$", word)
    }


def test_only_processes_py_reads_distributed_state():
    assert [file for file in FILES if distributed_state_in(file)] == ["processes.py"]


def test_scaling_depends_only_on_torch_and_pydantic():
    allowed = {"ropepatch", "torch", "pydantic", *sys.stdlib_module_names}
    for file in FILES:
        if file.startswith("scaling/") or file == "errors.py":
            assert {name.split(".")[0] for name in imports(file)} <= allowed, file


def test_the_public_names_match_the_lists_of_the_package():
    typed = {
        alias.name: node.module
        for node in nodes("__init__.py")
        if isinstance(node, ast.ImportFrom) and node.names[0].asname
        for alias in node.names
    }
    assert typed == ropepatch.HOME | {"RopepatchError": "ropepatch.errors"}
    assert set(ropepatch.__all__) == {*typed}
    assert all(getattr(ropepatch, name) is not None for name in ropepatch.__all__)
    assert not {file.stem for file in PACKAGE.iterdir()} & {*ropepatch.__all__}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ropepatch.nonsense


def test_modules_have_no_circular_imports():
    modules = {
        f"ropepatch/{file}".removesuffix(".py")
        .removesuffix("/__init__")
        .replace("/", "."): file
        for file in FILES[1:]
    }
    behind = {
        file: {
            modules.get(name) or modules.get(name.rpartition(".")[0])
            for name in imports(file)
        }
        for file in FILES
    }
    TopologicalSorter(behind).prepare()  # or it raises a CycleError
