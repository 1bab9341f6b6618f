"""Architectures grouped by the code of their rotary module in the installed modeling files."""

import ast
import functools
import re
from pathlib import Path

import pytest
import transformers
from tiny_models import COMPOSITE_TYPES, ROTARY_TYPES, tiny_config
from transformers.models.auto.configuration_auto import model_type_to_module_name

from ropepatch import RopepatchError
from ropepatch.extension.planning import plan_method
from ropepatch.model.checkpoint import InMemory

MODELS = Path(transformers.__file__).parent / "models"
ROTARY_CLASS = re.compile(
    r"^class \w*Rotary\w*\(.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL
)


def forward_bodies(model_type):
    """The forward methods of the rotary classes in an architecture's module; empty if it imports them."""
    sources = sorted(
        (MODELS / model_type_to_module_name(model_type)).glob("modeling_*.py")
    )
    classes = (
        ast.parse(text).body[0]
        for file in sources
        for text in ROTARY_CLASS.findall(file.read_text("utf-8"))
    )
    return tuple(
        ast.dump(ast.Module(method.body, []))
        for rotary in classes
        if isinstance(rotary, ast.ClassDef)
        for method in rotary.body
        if isinstance(method, ast.FunctionDef) and method.name == "forward"
    )


def _grouped():
    by_body = {}
    for model_type in sorted(
        {*ROTARY_TYPES} - {*COMPOSITE_TYPES}, key=lambda name: (name != "llama", name)
    ):
        by_body.setdefault(forward_bodies(model_type), []).append(model_type)
    return {group[0]: group for group in by_body.values()}


# Architectures whose rotary modules have the same code, by the first of them; llama comes first.
FAMILIES = _grouped()


def every_family(*also):
    """Parametrise over every architecture; those neither first in their family nor named run in the sweep."""
    now = {*FAMILIES, *also}
    return pytest.mark.parametrize(
        "model_type",
        [
            name if name in now else pytest.param(name, marks=pytest.mark.sweep)
            for name in ROTARY_TYPES
            if name not in COMPOSITE_TYPES
        ],
    )


@functools.cache
def refusal(model_type):
    """The error for an unsupported architecture, from its config only; None if it is supported."""
    try:
        plan_family(tiny_config(model_type), "ntk")
    except RopepatchError as error:
        return str(error)
    return None


def plan_family(model, method):
    """A plan for four times the original length of a tiny model, or of its config.

    It also scales models whose RoPE is in sliding-window layers only, as `ropepatch eval` can.
    """
    config = getattr(model, "config", model).get_text_config()
    window = getattr(config, "max_position_embeddings", 64)
    scaled = method == "yarn" and plan_family(model, "ntk").config.rope.is_scaled
    given = {"ramp": "rotations"} if scaled else {}
    return plan_method(InMemory.of(model), method, given, 4 * window)
