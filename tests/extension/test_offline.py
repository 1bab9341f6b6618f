"""With a local folder, no command uses the network or runs code of the folder."""

import json
import socket

import pytest
from checkpoint_folders import edit_json, write_checkpoint

LOCAL = [
    "extend source --to 256 --out out --no-reading",
    "eval source --text text.txt --windows 1",
    "doctor out",
    "export out --fold-attention --out folded",
    "eval tiny --lengths 64 --windows 1",
]


@pytest.fixture
def attempts(monkeypatch):
    """All uses of the network, which is blocked although the Hub is switched on."""
    made = []

    def refuse(*arguments, **options):
        made.append(arguments[:2])
        raise OSError("no network here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return made


def test_no_command_uses_the_network_or_runs_foreign_code(tmp_path, attempts, run_here):
    """A command that needs the network is detected."""
    source = write_checkpoint(tmp_path / "source")
    (tmp_path / "text.txt").write_text("word1 word2 word3 word4 word5 " * 200)
    (source / "modeling.py").write_text("open('ran', 'w')\n")
    kinds = ("Config", "Model", "ModelForCausalLM")
    named = {f"Auto{kind}": "modeling.Model" for kind in kinds}
    edit_json(source / "config.json", auto_map=named)
    tokenizer = {"AutoTokenizer": ["modeling.Model", None]}
    edit_json(source / "tokenizer_config.json", auto_map=tokenizer)
    for line in LOCAL:
        done = run_here(*line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    run_here("doctor", "source", cwd=tmp_path)
    assert not attempts
    assert run_here("plan", "a-lab/a-model", "--to", "256").returncode == 2
    assert attempts
    assert not list(tmp_path.rglob("ran"))
    assert not (tmp_path / "out" / "modeling.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
