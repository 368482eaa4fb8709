"""Builders, pure: a DisaggInference's spec in, Kubernetes objects out; one module per kind of child."""
