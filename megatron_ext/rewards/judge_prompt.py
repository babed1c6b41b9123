"""What a model that judges is sent, and how its answer is read.

Invariants (``tests/rewards/test_judge_prompt.py``):

1. The prompt is made from the view and the labels alone.
2. An answer is read as the first JSON object in it that has a ``label`` or a ``score``; without one as the label word
   it consists of, or the only one it mentions. A label it does not give is "", never a guess.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from string import Formatter

from megatron_ext.rewards.judge import Exchange, JudgeView, Verdict

FIELDS = ("prompt", "before", "current", "after", "labels")

SYSTEM = (
    "You judge one step of an agent at work. You see its task and what happened around the step, not how it all ended. "
    "Judge what the step did, by what you see."
)
TEMPLATE = """Task:
{prompt}

Before the step:
{before}

The step to judge:
{current}

After the step:
{after}

Choose the label that fits the step best:
{labels}

Answer with one JSON object: {{"label": "<one of the labels>", "reason": "<one sentence>"}}"""


def check_template(template: str) -> None:
    """Raises ``ValueError`` when a template names a field that there is none of, or leaves the step out."""
    try:
        used = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"template: {error}; a brace that is meant is written twice") from error
    for name in sorted(used - set(FIELDS)):
        raise ValueError(f"template: there is no field {{{name}}}; there is {', '.join(FIELDS)}")
    if "current" not in used:
        raise ValueError("template: lacks {current}, the step to judge")


def fill(template: str, view: JudgeView, labels: Mapping[str, str]) -> str:
    """The template with the view's parts as text."""
    return template.format(
        prompt=view.prompt,
        before=_exchanges(view.before),
        current=_exchange(view.current),
        after=_exchanges(view.after),
        labels="\n".join(f"- {name}: {meaning}" if meaning else f"- {name}" for name, meaning in labels.items()),
    )


def _exchanges(exchanges: tuple[Exchange, ...]) -> str:
    return "\n".join(map(_exchange, exchanges)) or "(nothing)"


def _exchange(exchange: Exchange) -> str:
    lines = [f"> {exchange.action}", exchange.observation]
    if exchange.info:
        lines.append(json.dumps(exchange.info, sort_keys=True, ensure_ascii=False, default=str))
    return "\n".join(line for line in lines if line)


def read_answer(text: str, labels: Mapping[str, str]) -> Verdict:
    """What a model's text says (``Verdict.calls`` is 0)."""
    for start in (match.start() for match in re.finditer(r"\{", text)):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(found, dict) and ("label" in found or "score" in found):
            return Verdict(
                label=_text(found.get("label")),
                score=_number(found.get("score")),
                reason=_text(found.get("reason")),
                correction=_text(found.get("correction")),
            )
    bare = text.strip().strip("`*\"'.:()[] \n").lower()
    for name in labels:
        if bare == name.lower():
            return Verdict(label=name)
    mentioned = [name for name in labels if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    return Verdict(label=mentioned[0] if len(mentioned) == 1 else "", reason=text.strip())


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
