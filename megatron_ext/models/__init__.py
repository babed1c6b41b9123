"""Megatron-Core models: building, HF interchange, back ends and the CPU platform."""
