"""Check that an engine applies a checkpoint's RoPE scaling, with the fingerprint in `reading.json`."""
