"""The prompt of a model that judges, and how its answers are read (``megatron_ext/rewards/judge_prompt.py``)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.rewards.judge import Exchange, JudgeView
from megatron_ext.rewards.judge_prompt import TEMPLATE, check_template, fill, read_answer

LABELS = {"D": "decisive progress", "E": "", "N": "none", "R": "regression"}
VIEW = JudgeView(
    step=1,
    prompt="Open {the} door.",
    before=(Exchange("look", "a room"),),
    current=Exchange("take key", "taken", {"goals": ["key"], "at": "hall"}),
    after=(),
    opening=Exchange("", "Open {the} door."),
)


def test_the_prompt_by_hand() -> None:  # invariant 1
    text = fill("{prompt}|{before}|{current}|{after}|{labels}|{{}}", VIEW, LABELS)
    assert text == (
        "Open {the} door.|> look\na room|> take key\ntaken\n"
        '{"at": "hall", "goals": ["key"]}|(nothing)|- D: decisive progress\n- E\n- N: none\n- R: regression|{}'
    )


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("D", "D"),
        (" d.\n", "D"),
        ("**R**", "R"),
        ('{"label": "E", "reason": "looked around"}', "E"),
        ('I think {not json} so:\n```json\n{"reason": "x", "label": "R"}\n```', "R"),
        ('{"why": 1} {"label": "N"}', "N"),
        ("The step is a regression, so R it is.", "R"),
        ("Either D or R.", ""),
        ("no idea", ""),
        ('{"label": "magnificent"}', "magnificent"),
        ('{"label": null}', ""),
        ('{"label": ["D"]}', '["D"]'),
        ("Decisive", ""),
        ("{" * 50, ""),
    ],
)
def test_labels_are_read_never_guessed(answer: str, label: str) -> None:  # invariant 2
    assert read_answer(answer, LABELS).label == label


def test_scores_reasons_and_corrections() -> None:
    verdict = read_answer('{"score": 0.5, "reason": "r", "correction": "c"}', LABELS)
    assert (verdict.label, verdict.score, verdict.reason, verdict.correction) == ("", 0.5, "r", "c")
    for odd in ("NaN", "Infinity", '"1"', "true", "1" + "0" * 400):
        assert read_answer(f'{{"label": "D", "score": {odd}}}', LABELS).score is None


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    verdict = read_answer(text, LABELS)
    assert not verdict.failed and verdict.calls == 0


def test_templates_are_checked() -> None:
    check_template(TEMPLATE)
    for bad, says in [
        ("{curent}", "no field {curent}"),
        ("{prompt}", "lacks {current}"),
        ("{current", "brace"),
        ("{current} {}", "no field {}"),
    ]:
        with pytest.raises(ValueError, match=says):
            check_template(bad)
