"""What a layer is: :class:`MLAConfig`, published presets and the reader of Hugging Face configs.

This package needs the standard library only.
"""

from .errors import ConfigError
from .huggingface import from_hf_config
from .mla_config import MLAConfig
from .presets import (
    PRESETS,
    deepseek_v2,
    deepseek_v2_lite,
    deepseek_v3,
    deepseek_v32,
    get_preset,
    glm5,
    kimi_k2,
    tiny,
)

__all__ = [
    "PRESETS",
    "ConfigError",
    "MLAConfig",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v32",
    "from_hf_config",
    "get_preset",
    "glm5",
    "kimi_k2",
    "tiny",
]
