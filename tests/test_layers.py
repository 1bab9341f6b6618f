"""Allowed imports between modules, and the public names of the package."""

import ast
import re
import sys
from collections.abc import Iterator
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
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(text: str) -> set[str]:
    """All modules that a file imports, including those inside functions and only for types."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} if node.module != "ropepatch" else set()
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def subpackages(names: set[str]) -> set[str]:
    ours = [name.split(".") for name in names if name.split(".")[0] == "ropepatch"]
    return {
        parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"
        for parts in ours
    }


def upward_imports(file: str, names: set[str]) -> Iterator[tuple[str, str]]:
    """The imports of a file that are not from lower layers."""
    own = file.removesuffix(".py").split("/")[0]
    for other in subpackages(names) - {own}:
        if LEVEL[other] >= LEVEL[own]:
            yield file, other
        if (own, other) == ("evaluation", "extension") and file.split("/")[
            1
        ] not in MEASURES_A_PLAN:
            yield file, other


def test_modules_import_only_lower_layers():
    named = {path.relative_to(PACKAGE).as_posix(): path for path in FILES}
    files = {
        file: path
        for file, path in named.items()
        if file not in ("__init__.py", "__main__.py")
    }
    assert not [
        one
        for file, path in files.items()
        for one in upward_imports(file, imports(path.read_text("utf-8")))
    ]


def test_every_module_belongs_to_a_listed_layer():
    listed = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert listed == set(LEVEL)
    assert len(listed) <= 25


def distributed_state_in(text: str) -> set[str]:
    """The names in a file of launcher variables, torch.distributed or the process state of accelerate."""
    nodes = list(ast.walk(ast.parse(text)))
    words = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)} | imports(
        text
    )
    launched = {
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "is_main_process",
        "process_index",
        "num_processes",
    }
    return {
        word
        for word in words
        if word in launched or re.search(r"torch\.distributed$|PartialState$", word)
    }


def test_only_processes_py_reads_distributed_state():
    found = {
        path.name: distributed_state_in(path.read_text(encoding="utf-8"))
        for path in FILES
    }
    assert {name for name, words in found.items() if words} == {"processes.py"}


def test_the_scaling_package_depends_only_on_torch_and_on_pydantic_for_parameters():
    for path in [*(PACKAGE / "scaling").glob("*.py"), PACKAGE / "errors.py"]:
        outside = {
            name.split(".")[0] for name in imports(path.read_text(encoding="utf-8"))
        }
        assert outside - {"ropepatch", "torch", "pydantic"} <= set(
            sys.stdlib_module_names
        ), path


def test_the_public_names_match_the_lists_of_the_package():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.names[0].asname
        for alias in node.names
    }
    assert typed == ropepatch.HOME | {"RopepatchError": "ropepatch.errors"}
    assert set(ropepatch.__all__) == {*typed}
    assert all(getattr(ropepatch, name) is not None for name in ropepatch.__all__)
    assert not {file.stem for file in PACKAGE.iterdir()} & {*ropepatch.__all__}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ropepatch.nonsense


NAMES = {
    ".".join(
        ("ropepatch", *file.relative_to(PACKAGE).with_suffix("").parts)
    ).removesuffix(".__init__"): (file.relative_to(PACKAGE).as_posix())
    for file in FILES
}


def files_behind(text: str) -> set[str]:
    """The files of the package that a file imports, including inside functions and only for types."""
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            own = NAMES.get(str(node.module))
            found |= {
                NAMES.get(f"{node.module}.{alias.name}", own) for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {NAMES.get(alias.name) for alias in node.names}
    return {file for file in found if file is not None}


def in_cycles(edges: dict[str, set[str]]) -> set[str]:
    """The files that import themselves through others."""
    reached = {file: set(others) for file, others in edges.items()}
    for through in edges:
        for others in reached.values():
            if through in others:
                others |= reached[through]
    return {file for file, others in reached.items() if file in others}


def test_modules_have_no_circular_imports():
    files = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in FILES
    }
    edges = {file: files_behind(text) - {"__init__.py"} for file, text in files.items()}
    assert not in_cycles(edges)
