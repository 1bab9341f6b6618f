"""A command is thin: words to values, values to one call, a result to the screen."""

import ast
from pathlib import Path

import ropepatch.cli

LONGEST = 45  # lines from the first statement to the last, without signature and docstring


def bodies(text: str) -> dict[str, int]:
    """The lines of the body of every function."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            statements = node.body[ast.get_docstring(node) is not None :] or node.body
            found[node.name] = statements[-1].end_lineno - statements[0].lineno + 1
    return found


def test_no_body_of_a_command_is_long():
    files = sorted(Path(ropepatch.cli.__file__).parent.glob("*.py"))
    long = {
        f"{file.name}: {name}": lines
        for file in files
        for name, lines in bodies(file.read_text(encoding="utf-8")).items()
        if lines > LONGEST
    }
    assert long == {}
