"""DisaggInference operator."""
