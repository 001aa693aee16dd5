"""Configuration of the model: the released sizes, a tiny twin, and the checkpoint's config.json."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SPARSE = "minicpm4"
LIGHTNING = "lightning-attn"
_SPELLINGS = {"minicpm4": SPARSE, "lightning": LIGHTNING, "lightning_attn": LIGHTNING, "lightning-attn": LIGHTNING}

BLOCK = 64
"""Keys in a block, and in a page of the cache."""
K1_SIZE, K1_STRIDE = 32, 16
"""Window and stride of the fine compressed keys."""
K2_SIZE, K2_STRIDE = 128, 64
"""Window and stride of the coarse compressed keys (four times K1; not in the checkpoint's config)."""


class ConfigError(ValueError):
    """A configuration that cannot be read, or asks for what this model does not do; names the key."""


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """Block selection of the sparse layers (InfLLM-V2)."""

    topk: int = 64
    window_size: int = 2048
    init_blocks: int = 1
    dense_len: int = 8192

    @property
    def local_blocks(self) -> int:
        """Window in blocks, not counting the query's own (32: so 33 are forced)."""
        return self.window_size // BLOCK

    @property
    def chosen(self) -> int:
        """Blocks chosen for a query, forced ones included (96)."""
        return self.topk + self.local_blocks


@dataclasses.dataclass(frozen=True)
class SalaConfig:
    """Sizes and scalings of a MiniCPM-SALA model; the defaults are the released 9B."""

    hidden_size: int = 4096
    intermediate_size: int = 16384
    vocab_size: int = 73448
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int = 128
    lightning_heads: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 256
    mixer_types: tuple[str, ...] = tuple(
        SPARSE if i in (0, 9, 16, 17, 22, 29, 30, 31) else LIGHTNING for i in range(32)
    )
    sparse: SparseConfig = SparseConfig()
    bos_token: int = 1
    eos_tokens: tuple[int, ...] = (2, 73440)

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.mixer_types)

    @property
    def residual_scale(self) -> float:
        """Factor of each residual branch: scale_depth / √layers."""
        return self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logit_divisor(self) -> float:
        """What the last hidden state is divided by before the head: hidden_size / dim_model_base."""
        return self.hidden_size / self.dim_model_base

    def with_profile(self, profile: str) -> SalaConfig:
        """Return this model under `released` (dense below dense_len keys) or `race` (always sparse).

        Raises ValueError for another name.
        """
        if profile == "released":
            return self
        if profile == "race":
            return dataclasses.replace(self, sparse=dataclasses.replace(self.sparse, dense_len=0))
        raise ValueError(f"profile {profile!r} is neither 'released' nor 'race'")


PRESETS: Mapping[str, SalaConfig] = {
    "sala-9b": SalaConfig(),
    # Heads as released, so that the same kernels serve it; blocks chosen (8 · 64 = 512 keys) stay below
    # dense_len, as the released 96 · 64 = 6144 stay below 8192; half of the chosen blocks are free.
    "sala-tiny": SalaConfig(
        hidden_size=256,
        intermediate_size=512,
        vocab_size=512,
        dim_model_base=16,
        mixer_types=(SPARSE, LIGHTNING, LIGHTNING, SPARSE, SPARSE),
        sparse=SparseConfig(topk=6, window_size=128, init_blocks=1, dense_len=640),
        eos_tokens=(2, 504),
    ),
}
"""Models by name: the released sizes, and a twin with the same layer kinds and rules that a laptop runs."""


def preset(name: str) -> SalaConfig:
    """The model called `name`; ConfigError lists the names if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"there is no model {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]


# Keys of config.json that say nothing about the forward pass. `mup_denominator` is read by nobody, and positions
# past `max_position_embeddings` are legal (the rotary tables grow).
_BOOKKEEPING = frozenset(
    (
        "architectures",
        "auto_map",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "use_cache",
        "initializer_range",
        "shift_labels",
        "max_position_embeddings",
        "mup_denominator",
        "pad_token_id",
        "attention_dropout",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "_attn_implementation",
    )
)

# Keys of which the model knows one value only.
_FIXED: Mapping[str, Any] = {
    "attn_use_rope": False,
    "lightning_use_rope": True,
    "attn_use_output_gate": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "qk_norm": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "lightning_scale": "1/sqrt(d)",
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
}
_FIXED_SPARSE: Mapping[str, Any] = {
    "kernel_size": K1_SIZE,
    "kernel_stride": K1_STRIDE,
    "block_size": BLOCK,
    "use_nope": False,
}
# Kept in the configuration under another name, or checked against another key.
_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_FLOATS = ("rms_norm_eps", "rope_theta", "scale_emb", "scale_depth")
_CHECKED = ("lightning_nh", "lightning_nkv", "lightning_head_dim", "num_hidden_layers", "mixer_types", "dim_model_base")
_KNOWN = _BOOKKEEPING.union(_FIXED, _SIZES, _FLOATS, _CHECKED, ("sparse_config", "bos_token_id", "eos_token_id"))


def from_json(source: str | os.PathLike[str] | Mapping[str, Any]) -> SalaConfig:
    """Read a configuration in the released key names, from a config.json (its path) or its contents.

    Every key must be known, and every switch must have the value that this model implements: what is not
    understood could change the arithmetic. ConfigError names the key, what it says, and what would be right.
    """
    raw = source if isinstance(source, Mapping) else _read(Path(source))
    for key in raw:
        if key == "quantization_config":
            raise ConfigError("quantization_config: the checkpoint is quantised; only bfloat16 weights are read")
        if key not in _KNOWN:
            raise ConfigError(f"{key}: not a key of this model's config.json")
    _refuse_other_values(raw, _FIXED, "")
    sizes = {key: _number(raw, key, int) for key in _SIZES}
    heads = _number(raw, "lightning_nh", int)
    _same(raw, "lightning_nkv", heads, "lightning_nh")
    _same(raw, "lightning_head_dim", sizes["head_dim"], "head_dim")
    if sizes["head_dim"] % 2:
        raise ConfigError(f"head_dim: {sizes['head_dim']} is odd; the rotary embedding turns pairs of channels")
    queries, keys = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if queries % keys:
        raise ConfigError(f"num_key_value_heads: {keys} does not divide num_attention_heads, {queries}")
    mixers = _mixers(raw)
    _same(raw, "num_hidden_layers", len(mixers), "the number of mixer_types")
    return SalaConfig(
        **sizes,
        **{key: _number(raw, key, float) for key in _FLOATS},
        lightning_heads=heads,
        dim_model_base=_number(raw, "dim_model_base", int),
        mixer_types=mixers,
        sparse=_sparse(raw),
        bos_token=_token(raw.get("bos_token_id", 1), "bos_token_id"),
        eos_tokens=_tokens(raw.get("eos_token_id", [2, 73440])),
    )


def to_json(config: SalaConfig) -> dict[str, Any]:
    """Write `config` in the released key names; `from_json` reads it back."""
    return {
        "architectures": ["MiniCPMSALAForCausalLM"],
        "model_type": "minicpm_sala",
        "dtype": "bfloat16",
        **{key: getattr(config, key) for key in (*_SIZES, *_FLOATS, "dim_model_base")},
        "lightning_nh": config.lightning_heads,
        "lightning_nkv": config.lightning_heads,
        "lightning_head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "mixer_types": list(config.mixer_types),
        **_FIXED,
        "sparse_config": {**dataclasses.asdict(config.sparse), **_FIXED_SPARSE},
        "bos_token_id": config.bos_token,
        "eos_token_id": list(config.eos_tokens),
    }


def _read(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}, not an object of keys and values")
    return raw


def _refuse_other_values(raw: Mapping[str, Any], fixed: Mapping[str, Any], prefix: str) -> None:
    for key, only in fixed.items():
        value = raw.get(key, only)
        # `1 == True` in Python, but a checkpoint that says 1 where a switch belongs is not to be trusted.
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise ConfigError(f"{prefix}{key}: {value!r} is not supported, only {only!r}")


def _number(raw: Mapping[str, Any], key: str, kind: Callable[[Any], Any], prefix: str = "", least: float = 0) -> Any:
    """`raw[key]`, a number above `least` (whole if `kind` is int)."""
    if key not in raw:
        raise ConfigError(f"{prefix}{key}: missing")
    value = raw[key]
    whole = kind is int
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not least < value < math.inf:
        raise ConfigError(f"{prefix}{key}: {value!r} is not a {'whole ' if whole else ''}number above {least:g}")
    return kind(value)


def _same(raw: Mapping[str, Any], key: str, value: int, other: str) -> None:
    if _number(raw, key, int) != value:
        raise ConfigError(f"{key}: {raw[key]} differs from {other}, {value}; the model has one for both")


def _mixers(raw: Mapping[str, Any]) -> tuple[str, ...]:
    names = raw.get("mixer_types")
    if not isinstance(names, (list, tuple)) or not names:
        raise ConfigError(f"mixer_types: {names!r} is not a list of layer kinds")
    for layer, name in enumerate(names):
        if name not in _SPELLINGS:
            raise ConfigError(f"mixer_types[{layer}]: {name!r} is none of {', '.join(_SPELLINGS)}")
    return tuple(_SPELLINGS[name] for name in names)


def _sparse(raw: Mapping[str, Any]) -> SparseConfig:
    sparse = raw.get("sparse_config")
    prefix = "sparse_config."
    if not isinstance(sparse, Mapping):
        raise ConfigError(f"sparse_config: {sparse!r} is not an object of keys and values")
    fields = [field.name for field in dataclasses.fields(SparseConfig)]
    for key in sparse:
        if key not in fields and key not in _FIXED_SPARSE:
            raise ConfigError(f"{prefix}{key}: not a key of this model's config.json")
    _refuse_other_values(sparse, _FIXED_SPARSE, prefix)
    # No initial block and dense_len 0 (always sparse) are legal.
    zero_allowed = ("init_blocks", "dense_len")
    values = {key: _number(sparse, key, int, prefix, -1 if key in zero_allowed else 0) for key in fields}
    if values["window_size"] % BLOCK:
        raise ConfigError(f"{prefix}window_size: {values['window_size']} is not a multiple of block_size, {BLOCK}")
    return SparseConfig(**values)


def _token(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key}: {value!r} is not a token id")
    return value


def _tokens(value: Any) -> tuple[int, ...]:
    return tuple(_token(item, "eos_token_id") for item in (value if isinstance(value, (list, tuple)) else [value]))
