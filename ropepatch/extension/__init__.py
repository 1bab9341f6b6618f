"""From a scaling to a patched model and a checkpoint that stock transformers loads."""

import random

_state = random.getstate()
import rich.style  # noqa: E402, F401  # when it is first imported, it draws from Python's random state

random.setstate(_state)
