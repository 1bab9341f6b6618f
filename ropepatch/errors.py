"""The one exception users see."""


class RopepatchError(Exception):
    """Something the user can mend: what was wrong, what was expected, and what to do next.

    Args:
        message: One line: what, got, expected.
        hint: One line: the next thing to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # which a traceback shows, in a notebook say
