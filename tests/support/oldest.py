"""Features that the oldest supported transformers, 5.4, lacks; tests of them are skipped there."""

import pytest
import transformers
from transformers import CONFIG_MAPPING

OLDEST = transformers.__version__.startswith("5.4.")
# Architectures that it cannot build, or whose configs it rejects because of booleans of its own classes.
BROKEN = ()
if OLDEST:
    BROKEN = (
        *(
            "cohere2",
            "ernie4_5",
            "ernie4_5_moe",
            "falcon_h1",
            "olmo",
            "olmo2",
            "olmo3",
            "olmoe",
            "phimoe",
        ),
        *("emu3", "llama4", "qwen3_5", "qwen3_5_moe"),
    )
# Tiny models that it cannot run, or the model type of whose text part it lacks.
NOT_YET = ("lfm2", "olmo_hybrid", "mllama") if OLDEST else ()


def needs(model_type):
    """Skip a test of an architecture that the oldest transformers does not have or cannot build."""
    if model_type in BROKEN or (OLDEST and model_type not in CONFIG_MAPPING):
        pytest.skip(
            f"transformers {transformers.__version__} cannot build {model_type}"
        )
