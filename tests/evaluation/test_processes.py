"""One measurement by several processes, which are real ones."""

import pytest
import torch
from loss_models import LENGTHS, PROTOCOLS, build, protocol_name, tokens
from run_recipes import run_two_processes

import ropepatch
from ropepatch.evaluation.perplexity import perplexity

ASKED = {"lengths": [128, 640], "haystacks": 3}
SCRIPT = """
import sys
from pathlib import Path
import torch
from loss_models import LENGTHS, PROTOCOLS, build, decoder_passes, protocol_name, tokens
import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.processes import join

ASKED = {asked}
torch.set_num_threads(1)
processes = join("cpu")
rank, out = processes.rank, Path(sys.argv[1])
model = build()
found = {{"ranks": processes.count, "shares": []}}
for protocol in PROTOCOLS:
    options = dict(protocol, tokens_per_batch=70, split=True)
    with decoder_passes(model) as shapes:
        found[protocol_name(protocol)] = perplexity(model, None, tokens(*LENGTHS), **options).nll
    found["shares"].append(len(shapes))
found["one batch"] = perplexity(model, None, tokens(9), split=True).nll
found["kept"] = perplexity(model, None, tokens(*LENGTHS), split=True, keep=out / "kept").nll
with decoder_passes(model) as shapes:
    perplexity(model, None, tokens(*LENGTHS), split=True, keep=out / "kept")
found["read again"] = len(shapes)

def failing(done, total):
    if rank == 1:
        raise ValueError("the disk of rank 1")

found["errors"] = []
for documents, progress in ((tokens(*LENGTHS), failing), (tokens(9 + rank, 30), None)):
    try:
        perplexity(model, None, documents, split=True, progress=progress)
    except Exception as error:
        found["errors"].append(f"{{type(error).__name__}}: {{error}}")
read = []
found["answers"] = [*map(tuple, ropepatch.passkey(*ropepatch.load("tiny", device="cpu"), **ASKED, split=True,
                                                 progress=lambda done, total: read.append(total)).answers)]
found["tokens"] = read[-1]
torch.save(found, out / f"{{rank}}.pt")
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each of two processes found, started by torchrun and joined by accelerate."""
    out = tmp_path_factory.mktemp("ranks")
    script = out / "script.py"
    script.write_text(SCRIPT.format(asked=ASKED))
    run_two_processes(script, out, PYTHONWARNINGS="ignore")
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.fixture
def one_thread():
    """As the processes have: sums of another number of threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_each_process_returns_what_one_does_to_the_bit(launched, one_thread):
    assert [found["ranks"] for found in launched] == [2, 2]
    shares = list(zip(*(found["shares"] for found in launched), strict=True))
    assert all(abs(first - second) <= 1 and second > 0 for first, second in shares)
    for protocol in PROTOCOLS:
        alone = perplexity(
            build(), None, tokens(*LENGTHS), tokens_per_batch=70, **protocol
        ).nll
        for found in launched:
            assert len(found[protocol_name(protocol)]) == len(alone)
            assert all(map(torch.equal, found[protocol_name(protocol)], alone))
    for name in ("one batch", "kept"):
        first, second = (found[name] for found in launched)
        assert [len(nll) for nll in first] == (
            [8] if name == "one batch" else [n - 1 for n in LENGTHS]
        )
        assert all(map(torch.equal, first, second))
    assert [found["read again"] for found in launched] == [0, 0]


@pytest.mark.slow
def test_every_rank_finds_the_answers_that_one_process_does(launched, one_thread):
    alone = [
        *map(
            tuple,
            ropepatch.passkey(*ropepatch.load("tiny", device="cpu"), **ASKED).answers,
        )
    ]
    assert len({answer[4] for answer in alone}) == 2  # some are found, and some are not
    assert [found["answers"] for found in launched] == [alone, alone]
    read = [found["tokens"] for found in launched]
    assert sum(read) < 2400 > 2 * max(read) - 600


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_call_on_all(
    launched,
):
    assert [found["errors"] for found in launched] == [
        [
            "RopepatchError: rank 1 failed: ValueError: the disk of rank 1",
            "RopepatchError: rank 1 reads other documents than rank 0",
        ],
        [
            "ValueError: the disk of rank 1",
            "RopepatchError: rank 0 reads other documents than rank 1",
        ],
    ]
