"""The one exception users see, and what strangers wrote made fit for their terminal."""

MOST = 1000  # characters of a message


def printable(text: str, most: int = MOST) -> str:
    """One line for a terminal: control characters, which can move its cursor, escaped, and its middle cut.

    Args:
        text: Of a file, a name or an error, by whomever.
        most: The characters that are kept.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class RopepatchError(Exception):
    """Something the user can mend: what was wrong, what was expected, and what to do next.

    Args:
        message: One line: what, got, expected.
        hint: One line: the next thing to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(printable(message))
        self.hint = printable(hint) if hint else hint
        if hint:
            self.add_note(f"hint: {self.hint}")  # which a traceback shows, in a notebook say
