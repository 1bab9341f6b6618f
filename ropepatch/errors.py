"""The one exception users see, and the escaping of untrusted text for the terminal."""

MOST = 1000  # characters of a message


def printable(text: str, most: int = MOST) -> str:
    """Make one line for a terminal: escape control characters, which can move its cursor, and cut the middle.

    Args:
        text: Any text, e.g. an error message.
        most: The characters to keep.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class RopepatchError(Exception):
    """An error the user can fix.

    Args:
        message: One line: what, got, expected.
        hint: One line: the next thing to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(printable(message))
        self.hint = printable(hint) if hint else hint
        if hint:
            self.add_note(f"hint: {self.hint}")  # shown by a traceback, in a notebook say
