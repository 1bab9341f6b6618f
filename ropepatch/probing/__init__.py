"""Whether an engine computes a checkpoint's rope: `reading.json`, and what a server's answers say by it."""

from ropepatch.probing.asking import Probed as Probed
from ropepatch.probing.asking import probe as probe
