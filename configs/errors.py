"""The one error of this package and the refusal of unknown keywords."""

import difflib
from collections.abc import Iterable, Mapping

__all__ = ["ConfigError", "refuse_unknown_fields"]

# Names that other code bases use for one of our fields; a typo matcher alone would point at the wrong one
# (Hugging Face's qk_head_dim is Dn + Dr, and qk_rope_head_dim looks more like qk_head_dim than like the right name).
_FOREIGN_NAMES = {
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "rope_theta": "rotary_base",
    "rope_factor": "rotary_scaling_factor",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}


class ConfigError(ValueError):
    """A layer configuration that cannot be built; the message is one line naming field, value and allowed values."""


def refuse_unknown_fields(owner: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise for the first keyword that is no field, naming the closest known one.

    Args:
        owner: what was called, for the message (``"MLAConfig"``, ``"glm5"``).
        given: the keywords as passed.
        known: names of all fields.

    Raises:
        ConfigError: a keyword is not in ``known``.
    """
    names = list(known)
    for name, value in given.items():
        if name in names:
            continue
        closest = _FOREIGN_NAMES.get(name) or difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{owner} has no field {name!r} (given {value!r}); the closest known field is {closest!r}")
