"""`ropepatch` and `python -m ropepatch`."""

import gc
import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line; no signal ends it with a traceback, while it is imported or when it is done."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):  # not on Windows
        numbers.append(signal.SIGHUP)
    heard = [
        number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN
    ]
    for number in heard:
        signal.signal(number, _exit)
    # torch, transformers and datasets make many objects, and all of them stay
    gc.set_threshold(5000)
    from ropepatch.cli import main as run

    try:
        run()
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
