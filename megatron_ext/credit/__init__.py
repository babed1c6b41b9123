"""From rewards to per-token advantages: group statistics and the edit pipeline. Pure; no Megatron, no engine."""
