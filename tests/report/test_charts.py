"""The invariants of ``megatron_ext/report/charts.py``."""

from __future__ import annotations

from megatron_ext.report.charts import HOLE, SECTIONS, TWICE, hint, members, others
from megatron_ext.tracking.names import METRICS, lookup


def test_every_name_is_in_the_table() -> None:
    known = {metric.name for metric in METRICS}
    for section in SECTIONS:
        for spec in section.charts:
            ends = [end for pair in (spec.intervals or {}).values() for end in pair]
            for name in (*spec.metrics, *ends):
                assert name in known or lookup(name), name


def test_every_logged_metric_is_shown_once() -> None:
    logged = [metric.name.replace("<set>", "dev") for metric in METRICS]
    logged = [HOLE.sub("3", name) for name in logged]
    charted = [
        name for section in SECTIONS for spec in section.charts for m in spec.metrics for name in members(m, logged)
    ]
    rest = others(logged)
    assert len(charted) == len(set(charted)) and not set(charted) & set(rest)
    ends = {e for section in SECTIONS for s in section.charts for p in (s.intervals or {}).values() for e in p}
    before_and_after = {name for name in logged if name.startswith(("eval/before/", "eval/after/"))}  # in the header
    twice = {name for name in logged if TWICE.fullmatch(name)}
    assert twice == {"moe/layer/3/load_entropy"} and not twice & {*charted, *rest} and "moe/load_entropy" in rest
    assert set(charted) | set(rest) | ends >= set(logged) - before_and_after - twice


def test_layers_stand_in_their_order_and_a_total_is_no_phase() -> None:
    logged = [f"moe/layer/{n}/load_cv" for n in (10, 9, 1)] + ["time/step", "time/start", "time/update"]
    assert members("moe/layer/<layer>/load_cv", logged) == [f"moe/layer/{n}/load_cv" for n in (1, 9, 10)]
    assert members("time/<phase>", logged) == ["time/update"]
    assert "KL" not in hint("policy/entropy") and hint("policy/entropy").endswith("(nats)")
