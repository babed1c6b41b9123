"""What a checkpoint holds of a rank's tensors, as pieces of global tensors that any layout can read.

Weights are described by Megatron's own ``sharded_state_dict``. Optimizer state is described in the same terms: one
piece for each parameter and moment, under the parameter's key. That is what Megatron's own optimizer formats do not do
alike for the plain and the distributed optimizer, and not at all between one and several expert-parallel ranks.

Invariants (``tests/training/test_checkpoint_layouts.py``):

1. What one layout saves, any other loads: tensor, pipeline (interleaved too), expert, expert-tensor and data
   parallelism, distributed optimizer on or off. The run goes on along the same curve.
2. A tensor that the model lacks, or that the checkpoint lacks, or of another shape, is one line that names it. Another
   padding of the same vocabulary is no other shape (``tests/integration/test_hf_layouts.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from megatron_ext.models import cpu_platform
from megatron_ext.models.forward import unwrap, vocab_of
from megatron_ext.moe.policies import router_parameters
from megatron_ext.training.checkpoints.files import CheckpointError, read_mark

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
    )

# Bytes of optimizer state that loading holds besides the optimizer's own.
LOAD_BYTES = 1 << 30

Piece: TypeAlias = "ShardedTensor | ShardedTensorFactory"
State = dict[str, Any]


@dataclass(frozen=True)
class OptimizerFacts:
    """What is the same for every parameter: ``moments`` names of tensors kept for each (empty before the first step),
    ``step`` steps taken, ``master`` whether full-precision copies of the weights are kept."""

    moments: tuple[str, ...]
    step: int
    master: bool


@dataclass(frozen=True)
class Kept:
    """One parameter's optimizer state on this rank: ``moments`` and ``master`` flat, of the part [``start``, ``end``)
    of the flattened parameter that this rank keeps; ``owner`` the torch optimizer and its parameter."""

    param: torch.Tensor
    optimizer: torch.optim.Optimizer
    owner: torch.Tensor | None
    start: int
    end: int
    master: bool
    group: dist.ProcessGroup | None

    @property
    def state(self) -> dict[str, Any]:
        assert self.owner is not None
        return self.optimizer.state[self.owner]


# -- weights -----------------------------------------------------------------------------------------------------------
def model_state(chunks: Sequence[torch.nn.Module]) -> State:
    """Weights and persistent buffers of this rank's chunks; the pieces refer to the live tensors."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    with cpu_platform.quiet_import():  # Megatron warns of its own calls
        return {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def reference_state(
    chunks: Sequence[torch.nn.Module], model: State, values: Sequence[torch.Tensor]
) -> dict[str, Piece]:
    """Other weights of the same model (``Trainer.snapshot``), in the model's pieces."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    pieces = _by_parameter(model)
    return {
        str(number): _piece(pieces[id(p)], "reference", value)  # experts share a key, so that it names no piece
        for number, (p, value) in enumerate(zip(parameters, values, strict=True))
        if id(p) in pieces
    }


def load_model(folder: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Writes a checkpoint's weights into the chunks, bare or wrapped, in whatever layout they are."""
    state = model_state(chunks)
    check_keys(folder, state, vocab_of(chunks[0]))
    loaded = _load(folder, state)
    for i, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{i}"], strict=True)


def load_reference(folder: Path, chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """The reference weights of a checkpoint, for ``Trainer.weights``."""
    model = model_state(chunks)
    values = [torch.empty_like(p, requires_grad=False) for chunk in chunks for p in chunk.parameters()]
    loaded = _load(folder, {"reference": reference_state(chunks, model, values)})["reference"]
    with torch.no_grad():
        for number, value in enumerate(values):
            value.copy_(loaded[str(number)])
    return values


def router_state(
    chunks: Sequence[torch.nn.Module], model: State, values: Mapping[str, torch.Tensor]
) -> dict[str, Piece]:
    """Other values of the model's routers (``moe.policies.router_parameters``), in the model's pieces."""
    pieces = _by_parameter(model)
    return {name: _piece(pieces[id(p)], "router_start", values[name]) for name, p in router_parameters(chunks)}


def load_router_start(folder: Path, chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The values that ``router_state`` described; empty where the checkpoint holds none."""
    if not any(key.startswith("router_start.") for key in dist_checkpointing.load_tensors_metadata(str(folder))):
        return {}
    values = {name: torch.empty_like(p, requires_grad=False) for name, p in router_parameters(chunks)}
    return dict(_load(folder, {"router_start": router_state(chunks, model_state(chunks), values)})["router_start"])


def check_keys(folder: Path, model: State, vocab: int) -> None:
    """Raises ``CheckpointError`` unless the checkpoint holds exactly the model's tensors, in their shapes. Of the rows
    of a vocabulary the ids count: what follows is zero (``models.vocab``), and Megatron reads it as such.
    """
    saved = {
        key: tuple(piece.global_shape)
        for key, piece in dist_checkpointing.load_tensors_metadata(str(folder)).items()
        if not key.startswith(("optimizer.", "reference.", "router_start."))
    }
    tensors = list(_tensors(load_preprocess(model)[0]))
    own = {piece.key: tuple(piece.global_shape) for piece in tensors}
    of_vocabulary = {piece.key for piece in tensors if piece.allow_shape_mismatch}
    every: list[set[str]] = [set(own)]
    if dist.get_world_size() > 1:
        every = [set()] * dist.get_world_size()
        dist.all_gather_object(every, set(own))
    if missing := sorted(own.keys() - saved.keys()):
        raise CheckpointError(f"{folder}: lacks {len(missing)} tensors of the model, first {missing[0]!r}")
    if extra := sorted(saved.keys() - set().union(*every)):
        raise CheckpointError(f"{folder}: has {len(extra)} tensors that the model lacks, first {extra[0]!r}")
    mark = read_mark(folder)
    for key, shape in own.items():
        found = saved[key]
        if key in of_vocabulary:
            # Where the mark says no vocabulary, no row of it is padding.
            found, shape = (mark.get("vocab", found[0]), *found[1:]), (vocab, *shape[1:])
        if found != shape:
            raise CheckpointError(f"{folder}: {key} has shape {found}, the model {shape}")


# -- optimizer ---------------------------------------------------------------------------------------------------------
def optimizer_facts(optimizer: Any) -> OptimizerFacts:
    """Raises ``CheckpointError`` when parameters have taken different numbers of steps."""
    moments: set[str] = set()
    steps: set[int] = set()
    master = False
    for kept in _kept(optimizer):
        master |= kept.master
        if kept.owner is None:
            continue
        state = kept.state
        moments |= {name for name, value in state.items() if name != "step" and isinstance(value, torch.Tensor)}
        if "step" in state:
            steps.add(int(state["step"]))
    steps |= {int(group["step"]) for part in _parts(optimizer) for group in part.param_groups if "step" in group}
    if len(steps) > 1:
        raise CheckpointError(f"parameters have taken different numbers of optimizer steps: {sorted(steps)}")
    return OptimizerFacts(tuple(sorted(moments)), steps.pop() if steps else 0, master)


def optimizer_state(optimizer: Any, model: State, facts: OptimizerFacts) -> dict[str, Piece]:
    """Moments and master weights in the model's pieces. All data-parallel ranks call it together: what they keep of a
    parameter is put together, and stays with the one that will write it."""
    pieces = _by_parameter(model)
    found: dict[str, Piece] = {}
    for number, kept in enumerate(_kept(optimizer)):
        piece = pieces[id(kept.param)]
        for name in (*facts.moments, *(["master"] if kept.master else [])):
            whole = _gather(kept, name)
            if not is_main_replica(piece.replica_id):
                whole = torch.empty_like(whole, device="meta")  # only its shape is asked for
            found[f"{name}/{number}"] = _piece(piece, f"optimizer.{name}", whole)
    return found


def load_optimizer(folder: Path, optimizer: Any, model: State, facts: OptimizerFacts) -> None:
    """Puts saved moments, master weights and step into the optimizer, each rank taking the part that it keeps."""
    own = optimizer_facts(optimizer)
    if own.master != facts.master:
        raise CheckpointError(
            f"{folder}: was saved {'with' if facts.master else 'without'} fp32 master weights, and this optimizer "
            f"keeps {'some' if own.master else 'none'}; use the same backend.dtype"
        )
    _set_step(optimizer, facts)
    pieces = _by_parameter(model)
    for batch in _batches(_kept(optimizer), LOAD_BYTES):
        wanted: dict[str, Piece] = {}
        for number, kept in enumerate(batch):
            for name in (*facts.moments, *(["master"] if kept.master else [])):
                whole = torch.empty(kept.param.shape, dtype=torch.float32, device=kept.param.device)
                wanted[f"{name}/{number}"] = _piece(pieces[id(kept.param)], f"optimizer.{name}", whole)
        loaded = _load(folder, {"optimizer": wanted})["optimizer"] if wanted else {}
        with torch.no_grad():
            for number, kept in enumerate(batch):
                if kept.owner is None:
                    continue
                part = slice(kept.start, kept.end)
                for name in facts.moments:
                    whole = loaded[f"{name}/{number}"]
                    kept.state[name] = whole.reshape(-1)[part].clone().view(kept.owner.shape)
                if kept.master:
                    kept.owner.copy_(loaded[f"master/{number}"].reshape(-1)[part].view(kept.owner.shape))


def _set_step(optimizer: Any, facts: OptimizerFacts) -> None:
    """Forgets what the optimizer knew. torch counts a parameter's steps beside its moments, fused optimizers a
    group's."""
    for part in _parts(optimizer):
        part.optimizer.state.clear()
        for group in part.param_groups:
            if "step" in group:
                group["step"] = facts.step
    if not facts.moments:
        return
    for kept in _kept(optimizer):
        if kept.owner is not None and isinstance(kept.optimizer, torch.optim.Adam | torch.optim.AdamW):
            kept.optimizer.state[kept.owner] = {"step": torch.tensor(float(facts.step))}


def _parts(optimizer: Any) -> Iterator[Any]:
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return (part for part in parts if not part.is_stub_optimizer)


def _kept(optimizer: Any) -> Iterator[Kept]:
    """Every parameter that is optimized, in an order that the data-parallel ranks share."""
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            yield from _kept_distributed(part)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            for own, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                for p, main in zip(own, masters, strict=True):
                    yield Kept(p, part.optimizer, main, 0, p.numel(), True, None)
            for group in part.fp32_from_fp32_groups:
                for p in group:
                    yield Kept(p, part.optimizer, p, 0, p.numel(), False, None)
        elif isinstance(part, FP32Optimizer):
            for group in part.param_groups:
                for p in group["params"]:
                    yield Kept(p, part.optimizer, p, 0, p.numel(), False, None)
        else:
            raise CheckpointError(f"Megatron's {type(part).__name__} cannot be checkpointed by this project yet")


def _kept_distributed(part: Any) -> Iterator[Kept]:
    for buffer in part.buffers:
        for p in buffer.params:
            master = p.dtype is not torch.float32
            if p not in part.model_param_group_index_map:
                yield Kept(p, part.optimizer, None, 0, 0, master, part.data_parallel_group)
                continue
            group, order = part.model_param_group_index_map[p]
            main = part.optimizer.param_groups[group]["params"][order]
            span = part._get_model_param_range_map(p)["param"]
            yield Kept(p, part.optimizer, main, span.start, span.end, master, part.data_parallel_group)


def _gather(kept: Kept, name: str) -> torch.Tensor:
    """The whole local parameter's ``name``: this rank's own, or put together over the data-parallel ranks."""
    part = None
    if kept.owner is not None:
        part = kept.owner.detach() if name == "master" else kept.state[name]
    if kept.group is None:
        assert part is not None
        return part
    whole = torch.zeros(kept.param.numel(), dtype=torch.float32, device=kept.param.device)
    if part is not None:
        whole[kept.start : kept.end] = part.reshape(-1)
    dist.all_reduce(whole, group=kept.group)  # every element is kept by one rank, the others add zero
    return whole.view(kept.param.shape)


def _batches(kept: Iterable[Kept], size: int) -> Iterator[list[Kept]]:
    batch: list[Kept] = []
    held = 0
    for item in kept:
        batch.append(item)
        held += 3 * 4 * item.param.numel()
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# -- pieces ------------------------------------------------------------------------------------------------------------
def _piece(model: Piece, prefix: str, value: torch.Tensor) -> Piece:
    """The piece of another tensor that is laid out as a model's parameter is."""
    key = f"{prefix}.{model.key}"
    if isinstance(model, ShardedTensorFactory):
        return replace(model, key=key, data=value)
    return replace(model, key=key, data=value, dtype=value.dtype)


def _by_parameter(model: State) -> dict[int, Piece]:
    """The piece of each live tensor, by ``id``."""
    return {
        id(piece.data): piece for piece in _leaves(model) if isinstance(piece, ShardedTensor | ShardedTensorFactory)
    }


def _tensors(state: Any) -> Iterator[ShardedTensor]:
    return (leaf for leaf in _leaves(state) if isinstance(leaf, ShardedTensor))


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for value in node.values():
            yield from _leaves(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _leaves(value)
    else:
        yield node


def _load(folder: Path, state: State) -> State:
    with cpu_platform.quiet_import():  # it logs what it thinks of old formats
        loaded: State = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    return loaded
