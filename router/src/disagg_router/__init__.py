"""DisaggInference router: one OpenAI endpoint in front of a prefill pool and a decode pool."""

__version__ = "0.1.0"
