"""Records that ropepatch wrote before they had a version, one for each way to write one."""

import json
from pathlib import Path
from typing import Any

RECORDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((Path(__file__).parents[1] / "extension" / "records").glob("*.json"))
}
SWAPPED = RECORDS.pop("swapped")  # that of a swapped encoding, which has other keys
