"""Run notebooks in an empty folder, and store their outputs: what they show, without progress lines.

    python docs/notebooks.py [NOTEBOOK ...]   without names, all of recipes/notebooks

Pictures get a palette of 128 colours, a third of their size. `smollm2.ipynb` downloads a model.
"""

import base64
import io
import json
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parents[1] / "recipes" / "notebooks"


def small(picture: str) -> str:
    """A PNG in base64, with a palette."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    colours = image.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    file = io.BytesIO()
    colours.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def run(file: Path) -> None:
    """Run the notebook, and write it again with its outputs."""
    book = nbformat.read(file, 4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(book, timeout=7200, resources=place).execute()
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        del cell.metadata["execution"]
        cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        for out in cell.outputs:
            if "image/png" in out.get("data", {}):
                out.data["image/png"] = small(out.data["image/png"])
    book.metadata.language_info = {"name": "python"}
    text = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FOLDER.glob("*.ipynb")):
        run(Path(name))
