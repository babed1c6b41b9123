"""A tap on a model's routers: who listens sees each router's logits and choice, who selects decides the choice.

Megatron's router runs unchanged: the tap stands around ``routing`` of each router instance, and in the place that the
router keeps for a replayed choice. Which micro-batch a router works on travels with the micro-batch's own packed
parameters (``models.packing.PackedBatch.run``), so that interleaved stages and recomputed activations need no order.

Invariants (``tests/moe/test_tap.py``):

1. Every MoE layer of a chunk calls back exactly once a forward, and once more when its activations are recomputed;
   ``RouterCall.recomputed`` says which. Layers are numbered over the whole model, pipeline stages included.
2. A call's rows are the micro-batch's tokens ``start .. start + count``, in the order in which this rank runs them;
   what follows is filler that Megatron needs.
3. Nothing is kept outside the instance: two models, and two taps of one model after another, do not see each other.
4. With nobody listening or selecting, routers compute as if there were no tap.
5. After ``drop_graphs`` no layer keeps a graph of its last forward: a model that nobody names any more is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from megatron_ext.models import cpu_platform
from megatron_ext.models.forward import Routing
from megatron_ext.models.packing import PackedBatch

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass(eq=False)
class MicroRun:
    """One forward of a micro-batch through one chunk, and its backward.

    ``micro`` is the caller's micro-batch, ``number`` its place among those of the pass, ``tokens`` what this rank runs
    of it without filler. ``calls[layer]`` says of each router call whether gradients were on (activation checkpointing
    runs the first forward without, and recomputes with them).
    """

    micro: Any
    number: int
    tokens: int
    calls: dict[int, list[bool]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RouterCall:
    """One call of one router, n rows over E experts.

    ``layer`` is the layer's number in the whole model, ``position`` its number among the model's MoE layers (both from
    0). ``logits`` fp32 [n, E] with their graph. Rows 0 .. ``count`` are the micro-batch's tokens ``start .. start +
    count`` as this rank runs them (under sequence parallelism its slice). ``recomputed``: the same forward again, for
    its backward. ``chosen`` int64 [n, k]: the experts that the router itself would have chosen, the largest score
    first, where someone selects in its stead (else None: ``routing_map`` is the router's own choice).
    """

    run: MicroRun
    router: TopKRouter
    layer: int
    position: int
    logits: torch.Tensor
    start: int
    count: int
    recomputed: bool
    chosen: torch.Tensor | None = None


class Listener(Protocol):
    """Called behind each router: ``probs`` [n, E] and ``routing_map`` bool [n, E] as the layer will use them. Returns
    what replaces ``probs`` (the same values with an auxiliary loss attached, say), or None to leave them."""

    def __call__(self, call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor | None: ...


class Selector(Protocol):
    """Called in the place of the router's top-k. ``own`` int64 [n, k] are the experts that the router chose; returns
    int64 [n, k], the experts to use. Scores and gradients are the router's, whoever chose."""

    def __call__(self, call: RouterCall, own: torch.Tensor) -> torch.Tensor: ...


@dataclass(eq=False)
class _Site:
    """One MoE layer of a chunk: its router, and the micro-batch that it works on while it does."""

    chunk: torch.nn.Module
    layer: TransformerLayer
    router: TopKRouter
    number: int
    position: int
    run: MicroRun | None = None
    call: RouterCall | None = None


class RouterTap:
    """The tap of one model's chunks on this rank. It touches the routers only while someone listens or selects."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._sites: list[_Site] = []
        self._listeners: list[Listener] = []
        self._selector: Selector | None = None
        self._handles: list[Any] = []
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
                    self._sites.append(_site(chunk, module))

    @property
    def layers(self) -> list[int]:
        """Numbers (from 0, in the whole model) of the MoE layers that this rank holds, in order."""
        return sorted(site.number for site in self._sites)

    def layers_of(self, chunk: torch.nn.Module) -> list[int]:
        """Those of one of the chunks that the tap was made for."""
        return sorted(site.number for site in self._sites if site.chunk is chunk)

    def routers(self) -> list[tuple[int, TopKRouter]]:
        """The routers that this rank holds with their layers' numbers, in layer order."""
        return sorted(((site.number, site.router) for site in self._sites), key=lambda pair: pair[0])

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Calls ``listener`` behind every router while the context is open, in the order of registration."""
        self._on()
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            self._off()

    @contextmanager
    def selecting(self, selector: Selector) -> Iterator[None]:
        """Asks ``selector`` for the experts of every token while the context is open; one at a time."""
        if self._selector is not None:
            raise RuntimeError("two selectors of one model's experts: the first must end before the second begins")
        self._on()
        self._selector = selector
        for site in self._sites:
            site.router.router_replay = _Choice(self, site)
        try:
            yield
        finally:
            self._selector = None
            for site in self._sites:
                site.router.router_replay = None
            self._off()

    def drop_graphs(self) -> None:
        """Ends what Megatron's token dispatchers keep of the last forward, to be called behind a backward pass.

        They keep the routing weights with their graph. It ends in the parameters' gradient accumulators, which hold
        the hooks of Megatron's data-parallel wrapper and with them the model: a circle through C++, which Python's
        collector does not see. The model, and the process groups that it names, would never be freed. (Megatron's
        distributed optimizer keeps such graphs of its own, as views of fp32 parameters.)
        """
        for site in self._sites:
            dispatcher = site.layer.mlp.token_dispatcher
            for name, value in list(vars(dispatcher).items()):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(dispatcher, name, None)

    # -- one layer -------------------------------------------------------------------------------------------------
    def _on(self) -> None:
        if self._listeners or self._selector is not None:
            return
        for site in self._sites:
            self._attach(site)

    def _off(self) -> None:
        """Leaves the routers as they were once nobody is left."""
        if self._listeners or self._selector is not None:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for site in self._sites:
            del site.router.routing  # the instance's own; the class has the method
            site.run = None

    def _attach(self, site: _Site) -> None:
        if "routing" in vars(site.router):
            raise RuntimeError(f"layer {site.number}: its router has a tap already; that one must end first")
        own = site.router.routing

        def enter(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            packed = kwargs.get("packed_seq_params")
            run = packed.run if isinstance(packed, PackedBatch) else None
            site.run = run if isinstance(run, MicroRun) else None

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            run, site.run = site.run, None
            hidden = output[0] if isinstance(output, tuple) else output
            # Selective recomputation runs the router again inside this layer's backward, where no packed parameters
            # are at hand. The gradient of the layer's output comes just before.
            if run is not None and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(partial(_again, site, run))

        def routing(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if site.run is None:  # a forward that nobody named a micro-batch for
                return own(logits, *args, **kwargs)
            call = _call(site, site.run, logits)
            site.run.calls.setdefault(site.number, []).append(torch.is_grad_enabled())
            site.call = call
            try:
                probs, routing_map = own(logits, *args, **kwargs)
                call = site.call
            finally:
                site.call = None
            for listener in self._listeners:
                replaced = listener(call, probs, routing_map)
                probs = probs if replaced is None else replaced
            return probs, routing_map

        self._handles.append(site.layer.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(site.layer.register_forward_hook(leave, always_call=True))
        site.router.routing = routing

    def select(self, site: _Site, own: torch.Tensor) -> torch.Tensor:
        """The experts for a call that is under way, int64 [n, k]."""
        if site.call is None or self._selector is None:
            return own
        site.call = replace(site.call, chosen=own)
        return self._selector(site.call, own)


@dataclass(frozen=True, eq=False)
class _Choice:
    """Stands where Megatron's router looks for a replayed choice (``TopKRouter.router_replay``)."""

    tap: RouterTap
    site: _Site

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids [n, k] of the selected experts. The scores are gathered from ``scores`` [n, E], which is what
        leaves the router its gradient."""
        with torch.no_grad():
            _, own = default(scores.detach(), topk, num_groups, group_topk)
            own = own.gather(1, scores.detach().gather(1, own).argsort(dim=1, descending=True))
        ids = self.tap.select(self.site, own)
        return scores.gather(1, ids), ids


def _site(chunk: torch.nn.Module, layer: TransformerLayer) -> _Site:
    config, number, router = layer.config, layer.layer_number - 1, layer.mlp.router
    if not isinstance(router, TopKRouter):
        raise TypeError(f"layer {number}: {type(router).__name__} is no top-k router")
    if config.mtp_num_layers:
        raise ValueError(
            f"a tap on routers does not take multi-token prediction (mtp_num_layers={config.mtp_num_layers})"
        )
    pattern = config.moe_layer_freq
    return _Site(chunk, layer, router, number, sum(bool(moe) for moe in pattern[:number]))


@contextmanager
def recording(tap: RouterTap) -> Iterator[Routing]:
    """Records which experts the routers of the tap's model choose themselves while the context is open, the larger
    score first; recomputed activations are not another forward. A rank sees its own layers and its share of the tokens:
    ``training.ranks.replica.whole_routing`` puts the shares together."""
    routing = Routing()

    def record(call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        if call.recomputed:
            return
        chosen = call.chosen
        if chosen is None:
            # A chosen expert's probability may underflow to 0, so rank the others below it.
            ranked = torch.where(routing_map, probs.detach(), -1.0)
            chosen = ranked.topk(call.router.topk, dim=-1).indices
        routing.by_layer.setdefault(call.layer, []).append(chosen)

    with tap.listening(record):
        yield routing


def _again(site: _Site, run: MicroRun, gradient: torch.Tensor) -> None:
    site.run = run


def _call(site: _Site, run: MicroRun, logits: torch.Tensor) -> RouterCall:
    rows = logits.view(-1, logits.shape[-1])
    config = site.router.config
    start = site.router.tp_group.rank() * len(rows) if config.sequence_parallel else 0
    count = min(max(run.tokens - start, 0), len(rows))
    recomputed = bool(run.calls.get(site.number))
    return RouterCall(run, site.router, site.number, site.position, rows, start, count, recomputed)
