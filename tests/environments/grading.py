"""Reward functions that the task-file tests name by import path."""

from __future__ import annotations

from typing import Any


def exact(answer: str, row: dict[str, Any]) -> float:
    return float(answer.strip() == row["answer"])


def detailed(answer: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 0.5, "success": answer == row["answer"]}


def undefined(answer: str, row: dict[str, Any]) -> float:
    return float("nan")


not_callable = 3
