"""Scaling files, as a user writes them."""

import json
from pathlib import Path


def write_scaling(file, scaling, rope, target):
    """Write a scaling with the RoPE and the target length that it is for."""
    content = {
        "ropepatch_scaling": 1,
        "method": scaling.name,
        "parameters": scaling.parameters(),
        "factor": scaling.factor,
        "target": target,
        **{key: value for key, value in rope if value is not None},
    }
    path = Path(file)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
