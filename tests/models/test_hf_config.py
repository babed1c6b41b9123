from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.models.hf_config import HFConfig, HFConfigError, from_dict, load_hf_config


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_round_trip_and_transformers_agree(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from transformers import AutoConfig

    hf = replace(request.getfixturevalue(family), eos_token_id=(3, 4), tie_word_embeddings=True)
    assert from_dict(hf.to_dict()) == hf
    (tmp_path / "config.json").write_text(json.dumps(hf.to_dict()))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).model_type == hf.family and theirs.head_dim == 16
    theirs.save_pretrained(tmp_path / "again")
    assert load_hf_config(tmp_path / "again") == hf  # transformers writes rope_parameters and num_local_experts
    assert load_hf_config(tmp_path / "config.json") == hf


def test_both_rope_forms_and_their_disagreement(moe: HFConfig) -> None:
    raw = moe.to_dict()
    new = {k: v for k, v in raw.items() if k != "rope_theta"}
    old = {k: v for k, v in raw.items() if k != "rope_parameters"}
    assert from_dict(new) == from_dict(old) == moe
    with pytest.raises(HFConfigError, match="disagree"):
        from_dict(raw | {"rope_theta": 5.0})
    with pytest.raises(HFConfigError, match="rope_theta is missing"):
        from_dict({k: v for k, v in old.items() if k != "rope_theta"})


def test_unsupported_and_missing_fields_are_one_error(moe: HFConfig) -> None:
    raw = moe.to_dict() | {
        "attention_bias": True,
        "use_sliding_window": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "hidden_act": "gelu",
        "quantization_config": {"bits": 4},
        "hidden_size": "big",
    }
    del raw["vocab_size"], raw["num_experts"]
    with pytest.raises(HFConfigError) as error:
        from_dict(raw)
    for name in (
        "attention_bias",
        "use_sliding_window",
        "yarn",
        "hidden_act",
        "quantization_config",
        "hidden_size",
        "vocab_size is missing",
        "num_experts is missing",
    ):
        assert name in str(error.value), name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"top_k": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"head_dim": 15}, "even"),
        ({"mlp_only_layers": (4,)}, "mlp_only_layers"),
        ({"layers": 0}, "num_hidden_layers 0 must be >= 1"),
    ],
)
def test_inconsistent_sizes_are_refused(moe: HFConfig, change: dict[str, Any], text: str) -> None:
    with pytest.raises(HFConfigError, match=text):
        replace(moe, **change)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(HFConfigError, match="does not exist"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HFConfigError, match="not valid JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(HFConfigError, match="not valid JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(HFConfigError, match="'llama' is not supported"):
        load_hf_config(tmp_path)


JUNK: tuple[Any, ...] = ("x", -1, 0, 1.5, True, [], ["x"], {}, {"a": 1}, 10**30)


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_junk_in_any_field_is_an_error_or_a_value(family: str, request: pytest.FixtureRequest) -> None:
    raw = request.getfixturevalue(family).to_dict() | {"layer_types": None, "rope_scaling": None}
    for key in raw:
        for junk in JUNK:
            try:
                from_dict(raw | {key: junk})
            except HFConfigError as error:
                assert "\n" not in str(error)
    for key in ("hidden_size", "rms_norm_eps", "head_dim", "rope_theta", "tie_word_embeddings"):
        with pytest.raises(HFConfigError, match=f"{key} must be"):
            from_dict(raw | {key: "x"})


def test_moe_pattern_follows_transformers(moe: HFConfig) -> None:
    assert replace(moe, layers=6, decoder_sparse_step=2, mlp_only_layers=(3,)).moe_pattern == (
        False,
        True,
        False,
        False,
        False,
        True,
    )
    assert moe.with_vocab(50).vocab == 50


def test_the_tiny_model_of_the_recipes(root: Path) -> None:
    hf = load_hf_config(root / "recipes" / "base" / "models" / "tiny_qwen3_moe")
    assert (hf.family, hf.hidden, hf.layers, hf.num_experts, hf.top_k) == ("qwen3_moe", 128, 2, 8, 2)
