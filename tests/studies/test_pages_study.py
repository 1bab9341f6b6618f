"""The study of long prompts runs as a command, and resumes from its file."""

import json
import sys
from pathlib import Path

from run_recipes import tiny_with

STUDIES = Path(__file__).resolve().parents[2] / "eval" / "studies"
sys.path[:0] = [str(STUDIES), str(STUDIES / "pages")]

import pages_study  # noqa: E402, the path is above


def test_a_page_is_measured_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "book.txt").write_text(" ".join(map(str, range(2000))))
    model = tiny_with(tmp_path / "model", max_position_embeddings=512)
    rows = tmp_path / "rows.json"
    sizes = ["--to", "640", "--pages", "1", "--keys", "2", "--kinds", "number,quote"]
    places = ["--texts", str(tmp_path), "--json", str(rows), "--device", "cpu"]
    words = [str(model), *sizes, *places, "--methods", "yarn"]
    pages_study.main(words)
    (row,) = json.loads(rows.read_text())["rows"]
    assert len(row["losses"]) == 4  # of 128 tokens each; the last block is not full
    assert min(row["losses"]) > 0
    for kind in ("number", "quote"):
        for length in (256, 512, 640):
            answers = row[f"{kind} {length}"]
            assert len(answers["found"]) == len(answers["log_prob"]) == 2
            assert max(answers["log_prob"]) < 0
    capsys.readouterr()
    monkeypatch.setattr(pages_study, "measured", None)
    pages_study.main(words)
    assert "`quote`" in capsys.readouterr().out
    assert json.loads(rows.read_text())["rows"] == [row]
