"""Progress output without a terminal."""

import pytest

from ropepatch import progress


@pytest.mark.parametrize(
    ("every", "said"), [(0.0, "fit: 25%, 0 s left\nfit: 4\n"), (60.0, "")]
)
def test_progress_is_printed_as_lines_at_intervals_without_a_terminal(
    every, said, monkeypatch, capsys
):
    monkeypatch.setattr(progress, "EVERY", every)
    with progress.bar("fit") as advance:
        advance(1, 4)
        advance(4, None)
    assert capsys.readouterr().err == said
