"""Whether an engine computes a checkpoint's rope: `reading.json`, and what a server's answers say by it."""
