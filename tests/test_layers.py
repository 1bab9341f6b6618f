"""Who may import whom, and what the package promises to whoever installs it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ropepatch

PACKAGE = Path(ropepatch.__file__).parent
# Each layer may import the ones before it; modules on one line may not import each other.
LAYERS = [
    {"errors", "seeds"},
    {"folders", "lengths", "parameters", "shipped", "strict", "whole_files"},
    {"rope"},
    {"scaling"},
    {"scaling_file"},
    {"bands", "engines", "export", "legacy", "source", "stock", "suites"},
    {"adapters"},
    {"survey", "weights"},
    {"encodings"},
    {"loading"},
    {"config_changes"},
    {"plan_text", "planning"},  # a plan prints itself through plan_text, imported when it is printed
    {"patching"},
    {"verification"},
    {"adapted", "checkpoint", "plots", "tiny"},
    {"fitting"},
    {"card", "doctor", "folding", "gguf_file", "report", "tasks", "training"},
    {"hub", "measuring"},
    {"choosing"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TORCH_ONLY = {"errors", "parameters", "rope", "scaling", "bands", "engines", "export", "legacy"}
TOUCH_TRANSFORMERS = {
    "stock",
    "encodings",
    "fitting",
    "adapters",
    "loading",
    "patching",
    "planning",
    "survey",
    "checkpoint",
    "doctor",
    "evaluation",
    "measuring",
    "tasks",
    "tiny",
    "adapted",
    "training",
    "verification",
}
# may import evaluation
MEASURE = {"plots", "tiny", "fitting", "choosing", "report", "card", "tasks", "training", "measuring", "cli"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def ours(file: Path) -> set[str]:
    parts = {name.split(".")[1] for name in imports(file) if name.startswith("ropepatch.")}
    return parts & ({*LEVEL} | {"evaluation"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_downwards(file):
    name = layer(file)
    if name == "__init__":
        return
    if name == "evaluation":
        assert ours(file) <= {"errors", "seeds", "strict", "whole_files", "evaluation"}
        return
    allowed = {other for other in LEVEL if LEVEL[other] < LEVEL[name]} | {name}
    allowed |= {"evaluation"} if name in MEASURE else set()
    allowed |= LAYERS[LEVEL[name]] if name in {"plan_text", "planning"} else set()
    allowed |= {"checkpoint", "hub"} if name == "planning" else set()  # plan.push(), imported when called
    assert ours(file) <= allowed


@pytest.mark.parametrize(
    "file", [file for file in FILES if layer(file) in TORCH_ONLY], ids=lambda file: file.name
)
def test_the_mathematics_needs_torch_alone(file):
    outside = {name.split(".")[0] for name in imports(file)} - {"ropepatch", "torch"}
    assert outside <= set(sys.stdlib_module_names)


def test_only_the_files_named_here_import_transformers():
    importing = {
        layer(file) for file in FILES if any(name.split(".")[0] == "transformers" for name in imports(file))
    }
    assert importing == TOUCH_TRANSFORMERS


def test_every_module_has_a_place_in_the_layers():
    assert {layer(file) for file in FILES} - {"__init__", "evaluation"} == set(LEVEL)


def test_an_upward_import_would_be_seen(tmp_path):
    file = tmp_path / "rope.py"
    file.write_text("from ropepatch.planning import Plan\n")
    assert imports(file) == {"ropepatch.planning", "ropepatch.planning.Plan"}


def test_the_public_names_are_what_the_package_lists():
    assert set(ropepatch.__all__) == {"RopepatchError", *ropepatch._HOME}
    for name in ropepatch.__all__:
        assert getattr(ropepatch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ropepatch.nonsense


def test_no_public_name_is_hidden_by_a_module_of_the_same_name():
    code = "import ropepatch.patching, ropepatch.planning, ropepatch; assert callable(ropepatch.patch)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_longer_than_350_lines():
    lengths = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert max(lengths.values()) <= 350, lengths
