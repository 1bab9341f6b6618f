"""What can be known is said before the work; what fails after it loses nothing."""

import re
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from made_results import reading

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import read_result
from ropepatch.pipeline import inputs


def unwritable(place: Path, monkeypatch) -> None:
    """As a folder is that belongs to somebody else; the tests may run as root, whom nothing stops."""
    shut = place.resolve()

    def refusing(**options):
        if Path(options["dir"]).resolve() == shut:
            raise PermissionError(13, "Permission denied")
        return TemporaryFile(**options)

    monkeypatch.setattr(inputs, "TemporaryFile", refusing)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval tiny --report shut/r.html", "error: cannot write shut/r.html: Permission denied"),
        ("eval tiny --report shut", "error: shut already exists"),
        ("eval tiny --out shut/results", "error: cannot write shut/results: Permission denied"),
        ("eval tiny --out file/results", "error: cannot write file/results: Not a directory"),
        ("eval tiny --out dangling", "error: dangling is no folder"),
        ("eval tiny --report dangling", "error: dangling already exists"),
        ("compare tiny --to 512 --report shut/r.html", "error: cannot write shut/r.html: Permission denied"),
        ("fit tiny --to 512 --out shut/x.json", "shut/x.json: Permission denied"),
        ("fit tiny --to 512 --out file/x.json", "file/x.json: Not a directory"),
        ("fit tiny --to 512 --out x.json --link-weights", "error: --link-weights beside a scaling file"),
        ("eval tiny --suite s.yaml", "haystacks must be"),
        (
            "extend tiny --to 512 --text nofile.txt --dry-run",
            "error: --text beside --method yarn: nothing reads",
        ),
        ("extend tiny --to 512 --field body", "error: --field beside --method yarn: nothing reads"),
        ("extend tiny --to 512 --method fit --split train", "error: --split of --text, which is missing"),
    ],
)
def test_what_cannot_be_written_or_has_no_effect_is_said_before_anything_is_measured(
    words, message, tmp_path, run_here, monkeypatch
):
    (tmp_path / "shut").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "s.yaml").write_text(
        "to: 1x\ntasks: [{task: perplexity}, {task: retrieval, haystacks: none}]\n"
    )
    unwritable(tmp_path / "shut", monkeypatch)
    monkeypatch.setattr("ropepatch.encodings.loading.load_model", None)
    before = sorted(tmp_path.rglob("*"))
    done = run_here(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_that_fails_after_all_leaves_the_results(tmp_path, monkeypatch):
    def fails(results, page, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ropepatch.report.write_report", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RopepatchError, match=r"no report: .*No space left") as refused:
        ropepatch.evaluate("tiny", windows=1, lengths=[128], report=tmp_path / "r.html")
    (folder,) = tmp_path.glob("ropepatch-results-*")
    assert str(folder) in refused.value.hint
    assert {read_result(file).task for file in folder.glob("*.json")} == {"perplexity"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "null") for key in ("value", "at", "n")),
        *(("value", value) for value in ("9e400", '"x"')),
        *((key, "[]") for key in ("length", "clusters")),
        ("low", '{"a": [1]}'),
    ],
)
def test_a_result_that_was_edited_is_drawn_or_refused_in_a_line(key, value, tmp_path, run_here):
    reading("yarn", [2.0, 1.9, 1.8]).write(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    edited = re.sub(rf'"{key}": (\[[^:]*\]|{{[^}}]*}}|[^,\n}}]+)(?=,?\n)', f'"{key}": {value}', text)
    assert edited != text
    (tmp_path / "a.json").write_text(edited)
    done = run_here("plot", "a.json", "--out", "figures", cwd=tmp_path)
    assert done.returncode in (0, 2), done.stderr
    assert done.returncode == 0 or done.stderr.startswith("error: ")
    assert (tmp_path / "figures").is_dir() == (done.returncode == 0)
