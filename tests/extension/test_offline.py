"""With a local folder, no command uses the network or runs code of the folder."""

import json
from pathlib import Path

import pytest
from checkpoint_folders import edit_json, write_checkpoint
from run_recipes import run_python

# All network access and stdin are blocked and recorded. HF_HUB_OFFLINE=0, otherwise the library would not
# even try.
SHUT_IN = """
import io, json, socket, sys

attempts = []


def refuse(*arguments, **keywords):
    attempts.append(repr(arguments[:2]))
    raise OSError("no network here")


socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refuse
socket.getaddrinfo = socket.create_connection = refuse
sys.stdin = io.TextIOWrapper(io.RawIOBase())
sys.stdin.read = sys.stdin.readline = refuse

from ropepatch.cli import main

codes, asked = [], []
for line in json.loads(sys.argv[1]):
    sys.argv = ["ropepatch", *line]
    try:
        main()
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code or 0)
    asked.append(attempts[:])
    attempts.clear()
json.dump({"codes": codes, "attempts": asked}, open("outcome.json", "w"))
"""


def shut_in(place: Path, *lines: list[str]) -> dict:
    variables = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(place / "home")}
    done = run_python("-c", SHUT_IN, json.dumps(lines), cwd=place, **variables)
    outcome = json.loads((place / "outcome.json").read_text())
    return outcome | {"stdout": done.stdout, "stderr": done.stderr}


@pytest.fixture
def place(tmp_path) -> Path:
    write_checkpoint(tmp_path / "source")
    (tmp_path / "text.txt").write_text("word1 word2 word3 word4 word5 " * 200)
    return tmp_path


def test_no_command_uses_the_network_for_a_local_folder_or_runs_its_code(place):
    """A command that needs the network is detected."""
    (place / "source" / "modeling.py").write_text("open('ran', 'w')\n")
    named = {
        f"Auto{kind}": "modeling.Model"
        for kind in ("Config", "Model", "ModelForCausalLM")
    }
    edit_json(place / "source" / "config.json", auto_map=named)
    tokenizer = {"auto_map": {"AutoTokenizer": ["modeling.Model", None]}}
    edit_json(place / "source" / "tokenizer_config.json", **tokenizer)
    measure = ["--text", "text.txt", "--windows", "1"]
    lines = [
        ["plan", "source", "--to", "256"],
        ["extend", "source", "--to", "256", "--out", "out"],
        ["eval", "source", *measure],
        [
            "compare",
            "source",
            "--to",
            "256",
            *measure,
            "--methods",
            "yarn,ntk",
            "--haystacks",
            "0",
        ],
        ["doctor", "out"],
        ["export", "out", "--fold-attention", "--out", "folded"],
        ["eval", "tiny", "--method", "yarn", "--to", "512", "--windows", "1"],
    ]
    outcome = shut_in(
        place, *lines, ["doctor", "source"], ["plan", "a-lab/a-model", "--to", "256"]
    )
    assert outcome["codes"][: len(lines)] == [0] * len(lines), outcome["stderr"]
    *local, remote = outcome["attempts"]
    assert not any(local)
    assert outcome["codes"][-1] == 2
    assert remote
    assert "warning: auto_map (remote code) is dropped" in outcome["stdout"]
    assert not list(place.rglob("ran"))
    assert not (place / "out" / "modeling.py").exists()
    assert "auto_map" not in json.loads((place / "out" / "config.json").read_text())
