"""Sizing the two pools by the KV reuse ratio. Pure: pages of metrics in, a decision with its reason out."""
