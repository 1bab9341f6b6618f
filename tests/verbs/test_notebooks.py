"""The notebooks run with less training and open in Colab; the encodings notebook has its own test."""

import ast
import json
import sys
import tomllib
from pathlib import Path

import pytest
from run_recipes import small_recipe, write_recipe_and_suite

from ropepatch.evaluation.measuring import read_suite
from ropepatch.training.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "recipes" / "notebooks").glob("*.ipynb"))
PNG = b"\x89PNG"


def cells_of(notebook, kind):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def shown(name, edits=()):
    """The values that the cells of a notebook show after edits, in order, and their variables."""
    values, names = [], {}
    for cell in cells_of(ROOT / "recipes" / "notebooks" / f"{name}.ipynb", "code"):
        for old, new in edits:
            cell = cell.replace(old, new)
        *body, last = ast.parse(cell).body
        if not isinstance(last, ast.Expr):
            body.append(last)
        exec(compile(ast.Module(body, []), name, "exec"), names)
        if isinstance(last, ast.Expr):
            values.append(
                eval(compile(ast.Expression(last.value), name, "eval"), names)
            )
    return values, names


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_install_only_in_colab(notebook, monkeypatch):
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "urls"
    ]["Repository"]
    at_colab = repository.replace(
        "https://github.com", "https://colab.research.google.com/github"
    )
    title, install = cells_of(notebook, "markdown")[0], cells_of(notebook, "code")[0]
    assert f"({at_colab}/blob/main/{notebook.relative_to(ROOT)})" in title
    ran = []
    monkeypatch.setattr("subprocess.run", lambda line, **_: ran.append(line))
    exec(install, {})
    assert ran == []
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    exec(install, {})
    *_, package = ran[-1]
    assert package.startswith("ropepatch[")
    assert package.endswith(f"@ git+{repository}")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_carry_the_outputs_of_one_whole_run(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, 1 + len(code))]
    for cell in code:
        source, outputs = "".join(cell["source"]), cell["outputs"]
        if "print(" in source or isinstance(ast.parse(source).body[-1], ast.Expr):
            assert outputs
        assert "error" not in {out["output_type"] for out in outputs}
        texts = [out.get("text") or out["data"]["text/plain"] for out in outputs]
        for place in ("/work", "/tmp", "/home", "/root", str(Path.home())):
            assert place not in "".join(map("".join, texts))
    assert notebook.stat().st_size < 120_000


@pytest.mark.slow
def test_the_extend_notebook_extends_a_model(place):
    (before, plan, pairs, found, extension, losses, window), _ = shown("extend")
    assert "perplexity" in repr(before).lower()
    assert (plan.target, window) == (1024, 1024)
    assert set(found.lengths) == {256, 512, 1024}
    assert extension.record["verified"]["logits"] == "equal"
    for figure in (pairs, losses):
        assert figure._repr_png_().startswith(PNG)
    assert [path.name for path in place.iterdir()] == ["tiny-1k"]


@pytest.mark.slow
def test_the_smollm2_notebook_runs_on_the_bundled_model(place):
    edits = [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "tiny"),
        ("16k", "1k"),
        ("8k", "256"),
    ]
    (plan, before, scaled, extension, rope), _ = shown("smollm2", edits)
    assert set(before.lengths) == set(scaled.lengths) == {256, plan.target}
    assert extension.record["verified"]["logits"] == "equal"
    assert rope["rope_type"] == "yarn"


@pytest.mark.slow
def test_the_compare_notebook_ranks_methods_on_a_text():
    (_, choice, drawn, frame, remapped, best), names = shown("compare")
    assert frame.label.iloc[0] == choice.ranking.rows[0].label
    assert {row.label for row in choice.ranking.rows} == {"baseline", *names["methods"]}
    assert {row.label for row in remapped.ranking.rows} == {
        "baseline",
        *names["remappings"],
    }
    assert "Ranking by loss" in repr(choice)
    assert best == choice.method
    assert drawn._repr_png_().startswith(PNG)
    assert all(
        "tales.txt" in str(result.parameters["text"])
        for result in choice.results
        if result.task == "perplexity"
    )


@pytest.mark.slow
def test_the_train_notebook_trains_and_distils_a_model(place, monkeypatch, capsys):
    write_recipe_and_suite(place)
    distil = read_recipe("distil")
    short = {
        "tiny": small_recipe(),
        "distil": distil.model_copy(
            update={"trainer": distil.trainer | {"max_steps": 2, "bf16": False}}
        ),
    }
    monkeypatch.setattr("ropepatch.verbs.train.read_recipe", short.get)
    monkeypatch.setattr(
        "ropepatch.verbs.evaluate.read_suite", lambda name: read_suite("suite.yaml")
    )
    (results, losses, keys, distilled, checks), _ = shown("train")
    assert "yarn + training" in repr(results)
    assert "distil" in distilled.record["training"]["recipe"]
    assert checks.keys() == {"trained", "distilled"}
    for figure in (losses, keys):
        assert figure._repr_png_().startswith(PNG)
    printed = capsys.readouterr()
    assert not printed.out
    assert "step 6/6" in printed.err
    assert (place / "tiny-2k" / "evaluation.html").is_file()
