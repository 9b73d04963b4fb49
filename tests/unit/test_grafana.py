"""The Grafana dashboard asks for metrics that are exported, by tags that these have."""

import json
import re
from pathlib import Path

from torchrl_vllm_sync.observe.metrics import METRICS, PREFIX

BOARD = json.loads((Path(__file__).parents[2] / "tutorials" / "grafana.json").read_text())
TARGETS = [
    (target["expr"], target["legendFormat"])
    for panel in BOARD["panels"]
    for target in panel["targets"]
]
ASKED = re.compile(rf"ray_{PREFIX}(\w+)\{{([^}}]*)\}}")


def metric_of(name):
    """The metric behind a series, and the tags of the series."""
    if name in METRICS:
        return METRICS[name], METRICS[name].tags
    base = METRICS[name.removesuffix("_bucket")]
    assert base.kind == "histogram", name
    return base, (*base.tags, "le")


def test_every_metric_is_shown_and_no_other_is_asked_for():
    asked = {name for expr, _ in TARGETS for name, _ in ASKED.findall(expr)}
    assert {metric_of(name)[0].name for name in asked} == METRICS.keys()
    assert sum(expr.count(PREFIX) for expr, _ in TARGETS) == sum(
        len(ASKED.findall(expr)) for expr, _ in TARGETS
    )


def test_series_are_chosen_grouped_and_named_by_tags_that_they_have():
    for expr, legend in TARGETS:
        for name, chosen in ASKED.findall(expr):
            _, tags = metric_of(name)
            assert 'service=~"$service"' in chosen
            assert {*re.findall(r"(\w+)=", chosen)} <= {*tags}, expr
        first = metric_of(ASKED.search(expr)[1])[1]
        kept = [{*one.split(", ")} for one in re.findall(r" by \(([^)]*)\)", expr)]
        assert all(one <= {*first} for one in kept), expr
        is_sum = expr.startswith(("sum(", "3600 * sum(", "max("))
        left = kept[0] if kept else set() if is_sum else {*first}
        assert {*re.findall(r"\{\{(\w+)\}\}", legend)} <= left, (expr, legend)


def test_rates_are_of_counters_and_quantiles_of_histograms():
    for expr, _ in TARGETS:
        assert expr.count("(") == expr.count(")")
        for call, name in re.findall(rf"(\w+)\(ray_{PREFIX}(\w+)\{{", expr):
            metric, _ = metric_of(name)
            is_rate = call in ("rate", "increase")
            assert is_rate == (metric.kind != "gauge"), expr
        assert ("histogram_quantile" in expr) == ("_bucket{" in expr)
        assert "histogram_quantile" not in expr or "by (le, " in expr
        assert re.search(r"_total\{[^}]*\}(?!\[)", expr) is None  # a total says little by itself


def test_panels_do_not_cover_each_other_and_can_be_told_apart():
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert len({(one["x"], one["y"]) for one in places}) == len(places)
    assert all(one["x"] + one["w"] <= 24 for one in places)
    for name in ("id", "title"):
        assert len({panel[name] for panel in BOARD["panels"]}) == len(places)
