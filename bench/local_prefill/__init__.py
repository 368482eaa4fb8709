"""Where prompts are computed, simulated: always on prefill, always on decode, by a threshold, and by the cost model."""
