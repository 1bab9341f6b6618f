import pytest

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Method, Suite, read_suite
from ropepatch.evaluation.tasks import LmEvalTask, PerplexityTask, RetrievalTask

SUITE = """
models: [tiny]
methods: [ntk, {name: rerope, window: 9}, {name: yarn, beta_fast: 16}]
to: [1k, 4x]
tasks:
  - {task: perplexity, windows: 3, lengths: [256, 1k, 4x]}
  - {task: retrieval, kinds: [fact], haystacks: 2}
  - {task: lm-eval, tasks: [some_task], metadata: {seed: 3}}
"""


def suite_of(folder, text):
    (file := folder / "mine.yml").write_text(text)
    return read_suite(str(file))


def test_a_suite_is_read_as_written(tmp_path):
    assert suite_of(tmp_path, SUITE) == Suite(
        models=("tiny",),
        methods=(
            Method(name="ntk"),
            Method(name="rerope", parameters={"window": 9}),
            Method(name="yarn", parameters={"beta_fast": 16}),
        ),
        to=("1k", "4x"),
        tasks=(
            PerplexityTask(windows=3, lengths=(256, "1k", "4x")),
            RetrievalTask(kinds=("fact",), haystacks=2),
            LmEvalTask(tasks=("some_task",), metadata={"seed": 3}),
        ),
    )


@pytest.mark.parametrize("name", ["demo", "encodings", "harness", "ruler", "standard"])
def test_every_suite_that_comes_with_ropepatch_is_read(name):
    assert read_suite(name).tasks


def test_a_method_is_called_by_name_and_parameters():
    both = {"beta_fast": 16, "beta_slow": 2}
    assert (
        Method(name="yarn", parameters=both).label == "yarn (beta_fast=16, beta_slow=2)"
    )
    long, other = (
        Method(name="custom", parameters={"divisors": (1.5,) * 63 + (last,)}).label
        for last in (1.5, 2.0)
    )
    assert long.startswith("custom (divisors=64 numbers ")
    assert len(long) < 40
    assert long != other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("ntk,", "ntkk,"), "unknown method 'ntkk'"),
        (("{name: yarn, beta_fast: 16}", "[ntk]"), "a method must be a name"),
        (
            ("windows: 3", "windoes: 3"),
            "unknown perplexity task key 'windoes'",
        ),
        (("task: perplexity", "task: perplexities"), "unknown task 'perplexities'"),
        (
            ("windows: 3", "stride: 8, gain: true"),
            "gain cannot be combined with stride",
        ),
        (
            ("{task: retrieval, kinds: [fact], haystacks: 2}", "retrieval"),
            "a task must be a mapping",
        ),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path, change, message):
    assert change[0] in SUITE
    with pytest.raises(RopepatchError, match=r"mine\.yml: ") as caught:
        suite_of(tmp_path, SUITE.replace(*change))
    assert message in str(caught.value)
