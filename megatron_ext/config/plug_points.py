"""Builds the plug points that are small objects, and asks what only they know: what each refuses, and what it needs of
the others.

Losses, rewards, harness, credit edits, router policy and trackers are built, from their own arguments; environments and
engines are not.

Invariants (``tests/config/test_plug_points.py``):

1. Each plug point that cannot be built is a line that names it and says why; the others are judged all the same.
2. What plug points say about each other is judged among those that could be built.
3. An edit or a router policy that reads what nothing in the configuration writes is refused (``needs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_ext.config import keys, needs, targets
from megatron_ext.config.instantiate import instantiate
from megatron_ext.config.schema import Config
from megatron_ext.rewards.compose import RewardSet

ONE = ("harness", "rollout.engine", "tasks.source")  # maps that are one plug point and cannot be empty
FROZEN = ".FrozenRouter"
ROUTING_LOSSES = ("mutual_information", "consistency")  # their coefficients, arguments of a router policy


def problems(cfg: Config) -> Iterator[str]:
    """One line a problem."""
    for path in ONE:
        if "_target_" not in (node := keys.value(cfg, path)):
            yield f"{path}: needs _target_ (the import path of what it is), got {node!r}"
    build = _Builder(cfg)
    harness, router = build.one("harness"), build.one("model.router")
    rewards, terms, edits = build.rewards(), build.each("loss.terms"), build.each("credit.edits")
    build.each("tracking")
    yield from build.lines
    yield from _terms(cfg, terms)
    setters = [name for name, edit in edits.items() if edit.traits.scale.value == "sets"]
    if len(setters) > 1:
        yield f"credit.edits: {' and '.join(setters)} each set the scale of the advantage; keep one"
    yield from _routers(cfg, router, terms, edits)
    yield from needs.unmet_labels(edits, router, rewards, needs.labels_of(cfg.environments.get(cfg.tasks.environment)))
    yield from needs.unmet_ids(edits, harness)


@dataclass
class _Builder:
    """Builds plug points; ``lines`` are what those that cannot be built say. What composing the configuration has
    complained about is left out."""

    cfg: Config
    lines: list[str] = field(default_factory=list)

    def one(self, path: str) -> Any:
        """The plug point at ``path``; None where there is none, or none that can be built."""
        node = keys.value(self.cfg, path)
        if "_target_" not in node or any(targets.problems(path, node)):
            return None
        return self._build(path, partial(instantiate, node, where=path))

    def each(self, path: str) -> dict[str, Any]:
        """Entries of the map at ``path`` by name, those that can be built."""
        made = {
            name: self._build(f"{path}.{name}", partial(instantiate, node, skip=("order",), where=f"{path}.{name}"))
            for name, node in self._sound(path).items()
        }
        return {name: plug_point for name, plug_point in made.items() if plug_point is not None}

    def rewards(self) -> RewardSet | None:
        """The whole reward; None unless every part can be built and they go together."""
        sound = self._sound("rewards")
        made = [self._build(f"rewards.{n}", partial(RewardSet.from_config, {n: node})) for n, node in sound.items()]
        if None in made or len(sound) < len(self.cfg.rewards) or not sound:
            return None
        whole: RewardSet | None = made[0]
        if len(made) > 1:  # what they say about each other
            whole = self._build("rewards", partial(RewardSet.from_config, sound))
        return whole

    def _sound(self, path: str) -> dict[str, Any]:
        nodes = keys.value(self.cfg, path)
        return {name: node for name, node in nodes.items() if not any(targets.problems(path, {name: node}))}

    def _build(self, path: str, make: Callable[[], Any]) -> Any:
        """What ``make`` builds; None when it cannot."""
        try:
            return make()
        except Exception as error:  # it may be the user's code, and whatever that raises is an answer to this question
            text = " ".join(str(error).split())
            text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
            self.lines.append(text if text.startswith(path) else f"{path}: {text}")
            return None


def _terms(cfg: Config, terms: dict[str, Any]) -> Iterator[str]:
    if cfg.batch.tokens_per_row > 0:
        for name, term in terms.items():
            if term.unit.value == "sequence":
                yield (
                    f"batch.tokens_per_row={cfg.batch.tokens_per_row}: cuts segments, and loss.terms.{name} takes a "
                    "ratio over whole ones; set batch.tokens_per_row=0, or its granularity and correction_granularity "
                    "to token or step"
                )


def _routers(cfg: Config, router: Any, terms: dict[str, Any], edits: dict[str, Any]) -> Iterator[str]:
    node = cfg.model.router
    rate = node.get("bias_update_rate", 0)
    if isinstance(rate, (int, float)) and rate > 0:
        readers = [f"loss.terms.{name}" for name, term in terms.items() if term.needs_reference]
        readers += [f"credit.edits.{name}" for name, edit in edits.items() if edit.traits.reference]
        if readers:
            yield (
                f"model.router.bias_update_rate={rate}: expert biases move and the reference policy that "
                f"{', '.join(readers)} reads has none of its own; set it to 0"
            )
    acting = [f"{name}={node[name]}" for name in ROUTING_LOSSES if node.get(name)]
    if acting and node.get("_target_", "").endswith(FROZEN):
        yield (
            f"model.router: a frozen router does not learn from a routing loss ({', '.join(acting)}); choose "
            "megatron_ext.moe.structured.StructuredRouter, or leave the loss out"
        )
    coefficient = cfg.model.aux_loss_coefficient
    if router is not None and coefficient > 0 and router.config_overrides().get("moe_aux_loss_coeff") == 0.0:
        yield (
            f"model.aux_loss_coefficient={coefficient}: the router policy {node['_target_']} keeps the auxiliary loss "
            "off"
        )
    coefficient = cfg.warm_start.aux_loss_coefficient
    sound = bool(node) and not any(targets.problems("model.router", node))
    if sound and cfg.warm_start.enabled and coefficient > 0 and node.get("in_warm_start", False):
        yield (
            f"warm_start.aux_loss_coefficient={coefficient}: model.router.in_warm_start=true keeps the auxiliary loss "
            "off; set one of them to its default"
        )
