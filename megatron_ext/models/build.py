"""Builds the Megatron ``GPTModel`` chunks of one rank from an HF configuration.

Invariants (``tests/models/test_build.py``):

1. The Megatron configuration agrees with the HF one in every compared field; overrides may not break that.
2. Routers compute in fp32. With coefficient 0 no auxiliary loss exists: the load-balancing type is ``none`` and nothing
   is attached to the graph.
3. Fresh weights depend on the seed alone, not on the layout (``fresh.py``); every parameter is written exactly once.
4. The Transformer Engine spec is imported only when the back end asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F

from megatron_ext.config.schema import ModelConfig, ParallelConfig
from megatron_ext.models import cpu_platform
from megatron_ext.models.attention import PackedAttention
from megatron_ext.models.backends import ResolvedBackend
from megatron_ext.models.fresh import FreshReader
from megatron_ext.models.hf_compare import compare
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_io import SafetensorsReader
from megatron_ext.models.hf_map import Layout, check_divisible
from megatron_ext.models.hf_weights import load_tensors
from megatron_ext.models.norm import RMSNorm
from megatron_ext.models.swiglu import SwiGLU
from megatron_ext.models.vocab import VocabRows
from megatron_ext.models.wide_norm import WideKeyNorm, WideQueryNorm

cpu_platform.install()
with cpu_platform.quiet_import():
    import torch
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
        get_transformer_layer_offset,
    )


class BuildError(ValueError):
    """A model that cannot be built as configured; one line per reason."""


def transformer_fields(
    hf: HFConfig, model: ModelConfig, parallel: ParallelConfig, backend: ResolvedBackend
) -> dict[str, Any]:
    """The fields of Megatron's ``TransformerConfig`` that this project sets."""
    te = backend.layer_spec == "te"
    gpu = backend.device == "cuda"
    bf16 = backend.dtype is torch.bfloat16
    balanced = model.aux_loss_coefficient > 0
    fields: dict[str, Any] = {
        "num_layers": hf.layers,
        "hidden_size": hf.hidden,
        "num_attention_heads": hf.heads,
        "num_query_groups": hf.kv_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.intermediate,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_eps,
        "qk_layernorm": hf.qk_norm != "none",
        "add_qkv_bias": hf.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "transformer_engine" if te else "local",
        # Weights are written by load_tensors, each exactly once; drawing them first would be wasted work.
        "perform_initialization": False,
        "use_cpu_initialization": not gpu,
        "params_dtype": backend.dtype,
        "pipeline_dtype": backend.dtype,
        "bf16": bf16,
        # Fusions of Megatron's own need Apex or Transformer Engine; off is always right, overrides may turn them on.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": te,
        # Megatron's name for "the activation is a module of the layer spec"; here it is ``swiglu.SwiGLU``.
        "use_te_activation_func": not te and not gpu,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": te,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        # Rows of a step differ in length, so pipeline stages tell each other the shape.
        "variable_seq_lengths": True,
        # The only dispatcher that takes varying lengths; Megatron checks it for dense models too.
        "moe_token_dispatcher_type": "alltoall",
        "moe_layer_freq": [int(moe) for moe in hf.moe_pattern],
    }
    if parallel.virtual_pipeline > 1 and backend.communication == "gloo":
        # Interleaved stages deadlock or, worse, mix up tensors over gloo's batched point-to-point calls.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if any(hf.moe_pattern):
        fields |= {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate,
            "moe_router_topk": hf.top_k,
            "moe_router_score_function": hf.score_function,
            "moe_router_enable_expert_bias": hf.expert_bias,
            "moe_router_num_groups": hf.expert_groups if hf.expert_groups > 1 else None,
            "moe_router_group_topk": hf.top_groups if hf.expert_groups > 1 else None,
            "moe_router_topk_scaling_factor": hf.routed_scaling if hf.routed_scaling != 1.0 else None,
            "moe_shared_expert_intermediate_size": hf.shared_intermediate or None,
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss" if balanced else "none",
            "moe_aux_loss_coeff": model.aux_loss_coefficient if balanced else 0.0,
            "moe_grouped_gemm": te,
            "moe_permute_fusion": te,
        }
    return fields


def transformer_config(
    hf: HFConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    backend: ResolvedBackend,
    overrides: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron's configuration of the model. ``overrides`` are ``TransformerConfig`` fields (a router policy's).

    Raises ``BuildError`` for an unknown override, or a field that disagrees with the HF configuration.
    """
    known = {f.name for f in dataclasses.fields(TransformerConfig) if f.init}
    unknown = sorted(set(overrides or {}) - known)
    if unknown:
        raise BuildError(f"not fields of Megatron's TransformerConfig: {', '.join(unknown)}")
    fields = transformer_fields(hf, model, parallel, backend) | dict(overrides or {})
    with cpu_platform.quiet_import():
        config = TransformerConfig(**fields)
    mismatches = compare(hf, config)
    if mismatches:
        raise BuildError("the HF config and the model disagree:\n" + "\n".join(mismatches))
    return config


class _LocalProvider(LocalSpecProvider):
    """Megatron's local modules, with this project's activation where the configuration asks for a module."""

    def activation_func(self) -> type[SwiGLU]:
        return SwiGLU


def _local_spec(hf: HFConfig, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layers of this chunk from Megatron's own modules with this project's norm and attention."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=partial(PackedAttention, rope_theta=hf.rope_theta, rotary_dim=hf.rotary_dim),
            linear_proj=RowParallelLinear,
            q_layernorm={"head": RMSNorm, "layer": WideQueryNorm, "none": None}[hf.qk_norm],
            k_layernorm={"head": RMSNorm, "layer": WideKeyNorm, "none": None}[hf.qk_norm],
        ),
    )

    def layer(moe: bool) -> ModuleSpec:
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RMSNorm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=RMSNorm,
                mlp=get_mlp_module_spec_for_backend(
                    backend=_LocalProvider(),
                    num_experts=hf.num_experts if moe else None,
                    moe_grouped_gemm=False,
                    use_te_activation_func=config.use_te_activation_func,
                ),
                mlp_bda=get_bias_dropout_add,
                # The names under which a distributed checkpoint keeps them, shared with the Transformer Engine spec.
                sharded_state_dict_keys_map={
                    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
                },
            ),
        )

    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [layer(moe) for moe in hf.moe_pattern[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _chunk(hf: HFConfig, config: TransformerConfig, model: ModelConfig, te: bool, vp_stage: int | None) -> GPTModel:
    if te:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        for layer in spec.layer_specs if hf.qk_norm == "layer" else ():
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm, attention.k_layernorm = WideQueryNorm, WideKeyNorm
    else:
        spec = _local_spec(hf, config, vp_stage)
    whole = vp_stage is None
    rows = VocabRows(hf.vocab, model.vocab_multiple)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=rows.padded,
        max_sequence_length=model.max_context,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=whole, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=whole, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        # The local attention applies RoPE itself, by position in each packed sequence.
        position_embedding_type="rope" if te else "none",
        rotary_base=hf.rope_theta,
        rotary_percent=(hf.rotary_dim or hf.head_dim) / hf.head_dim,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
    )
    chunk.vocab_rows = rows
    return chunk


def build_model(
    hf: HFConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    backend: ResolvedBackend,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 1,
) -> list[GPTModel]:
    """This rank's model chunks (one, or ``parallel.virtual_pipeline``), on the back end's device, weights written.

    Process groups must be up (``parallel.initialize``). Weights come from ``model.weights`` when it names an HF folder,
    else they are drawn from ``seed``. bf16 parameters are bf16; norms and routers compute in fp32.
    """
    errors = check_divisible(hf, Layout.of(parallel, vocab_multiple=model.vocab_multiple))
    if model.max_context > hf.max_position_embeddings:
        errors.append(
            f"model.max_context {model.max_context} exceeds max_position_embeddings {hf.max_position_embeddings}"
        )
    if any(hf.moe_pattern) and parallel.tensor > 1 and not parallel.sequence:
        errors.append("MoE training with parallel.tensor > 1 needs parallel.sequence=true")
    if model.aux_loss_coefficient < 0:
        errors.append(f"model.aux_loss_coefficient must be >= 0, got {model.aux_loss_coefficient}")
    if errors:
        raise BuildError("\n".join(errors))
    config = transformer_config(hf, model, parallel, backend, overrides)
    te = backend.layer_spec == "te"
    stages: list[int | None] = [None] if parallel.virtual_pipeline == 1 else list(range(parallel.virtual_pipeline))
    with cpu_platform.quiet_import():
        chunks = [_chunk(hf, config, model, te, stage) for stage in stages]
    for chunk in chunks:
        chunk.to(backend.torch_device)
    reader = SafetensorsReader(model.weights) if model.weights else FreshReader(hf, model, seed)
    if isinstance(reader, SafetensorsReader):
        reader.check(hf)
    load_tensors(chunks, hf, reader)
    return chunks
