"""config.json in the released key names: what is read, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from reference.config import LIGHTNING, SPARSE, ConfigError, SalaConfig, from_json, preset, to_json

RELEASED: dict[str, Any] = {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_use_output_gate": True,
    "attn_use_rope": False,
    "bos_token_id": 1,
    "dim_model_base": 256,
    "dtype": "bfloat16",
    "eos_token_id": [2, 73440],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.1,
    "intermediate_size": 16384,
    "lightning_head_dim": 128,
    "lightning_nh": 32,
    "lightning_nkv": 32,
    "lightning_scale": "1/sqrt(d)",
    "lightning_use_rope": True,
    "max_position_embeddings": 524288,
    "mixer_types": [
        "minicpm4" if i in (0, 9, 16, 17, 22, 29, 30, 31) else ("lightning-attn", "lightning_attn", "lightning")[i % 3]
        for i in range(32)
    ],
    "model_type": "minicpm_sala",
    "mup_denominator": 32,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "qk_norm": True,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "shift_labels": True,
    "sparse_config": {
        "block_size": 64,
        "dense_len": 8192,
        "init_blocks": 1,
        "kernel_size": 32,
        "kernel_stride": 16,
        "topk": 64,
        "use_nope": False,
        "window_size": 2048,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "vocab_size": 73448,
}


def _with(key: str, value: Any) -> dict[str, Any]:
    if key.startswith("sparse_config."):
        return {**RELEASED, "sparse_config": {**RELEASED["sparse_config"], key.removeprefix("sparse_config."): value}}
    return {**RELEASED, key: value}


def test_released_configuration_is_the_default(tmp_path: Path) -> None:
    assert from_json(RELEASED) == SalaConfig() == preset("sala-9b")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(RELEASED))
    assert from_json(path) == from_json(str(path)) == SalaConfig()


def test_derived_values() -> None:
    config = SalaConfig()
    assert config.sparse.local_blocks == 32
    assert config.sparse.chosen == 96
    assert config.logit_divisor == 16.0
    assert config.residual_scale == pytest.approx(0.24748737)
    assert config.mixer_types.count(SPARSE) == 8
    assert config.mixer_types.count(LIGHTNING) == 24
    assert config.with_profile("released") is config
    assert config.with_profile("race").sparse.dense_len == 0
    with pytest.raises(ValueError, match="fast"):
        config.with_profile("fast")


@pytest.mark.parametrize("name", ["sala-9b", "sala-tiny"])
def test_written_configuration_reads_back(name: str) -> None:
    for profile in ("released", "race"):
        config = preset(name).with_profile(profile)
        assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_tiny_has_both_kinds_of_layer_and_kernels_shapes() -> None:
    tiny = preset("sala-tiny")
    assert {SPARSE, LIGHTNING} == set(tiny.mixer_types)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.head_dim, tiny.lightning_heads) == (32, 2, 128, 32)
    assert tiny.sparse.chosen * 64 < tiny.sparse.dense_len < 1024
    with pytest.raises(ConfigError, match="sala-tiny"):
        preset("sala-small")


def test_absent_switches_have_the_released_values() -> None:
    needless = {"attention_bias", "hidden_act", "rope_scaling", "pretraining_tp", "tie_word_embeddings", "eos_token_id"}
    assert from_json({key: value for key, value in RELEASED.items() if key not in needless}) == SalaConfig()
    assert from_json(_with("eos_token_id", 2)) == dataclasses.replace(SalaConfig(), eos_tokens=(2,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_use_rope", True),
        ("attn_use_rope", 0),
        ("lightning_use_rope", False),
        ("attn_use_output_gate", False),
        ("use_output_gate", False),
        ("use_output_norm", False),
        ("qk_norm", False),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "yarn"}),
        ("lightning_scale", "1"),
        ("tie_word_embeddings", True),
        ("lightning_nkv", 2),
        ("lightning_head_dim", 64),
        ("num_hidden_layers", 31),
        ("num_key_value_heads", 3),
        ("hidden_size", "4096"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", 4096.5),
        ("rms_norm_eps", -1e-6),
        ("mixer_types", "minicpm4"),
        ("mixer_types", []),
        ("eos_token_id", [2, -1]),
        ("bos_token_id", "1"),
        ("sparse_config", None),
        ("sparse_config.kernel_size", 64),
        ("sparse_config.kernel_stride", 32),
        ("sparse_config.block_size", 128),
        ("sparse_config.use_nope", True),
        ("sparse_config.window_size", 2000),
        ("sparse_config.topk", 0),
        ("sparse_config.dense_len", -1),
        ("sparse_config.sinks", 4),
        ("quantization_config", {"bits": 4}),
        ("sliding_window", 4096),
    ],
)
def test_what_is_not_understood_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}\b"):
        from_json(_with(key, value))


def test_odd_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="^head_dim: 127 is odd"):
        from_json({**RELEASED, "head_dim": 127, "lightning_head_dim": 127})


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "lightning_nh", "scale_depth", "mixer_types"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}\b"):
        from_json({name: value for name, value in RELEASED.items() if name != key})


def test_unknown_mixer_is_named_with_its_layer() -> None:
    with pytest.raises(ConfigError, match=r"mixer_types\[3\].*mamba.*minicpm4, lightning"):
        from_json(_with("mixer_types", [*RELEASED["mixer_types"][:3], "mamba", *RELEASED["mixer_types"][4:]]))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        from_json(tmp_path / "config.json")
