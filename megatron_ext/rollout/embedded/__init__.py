"""Embedded engine: a Qwen3 / Qwen3-MoE sampler in a process of its own, fed through ``publish`` like any engine."""
