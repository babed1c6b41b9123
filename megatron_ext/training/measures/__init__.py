"""What a step measured: metrics, time, memory."""
