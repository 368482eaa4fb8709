"""How many pods each pool of engines is to have, and how pods leave it. Pure.

A pool that gets smaller loses the KV of its highest ordinals. So these pods take no new turns first, which the label on
their Service tells the routers; what they hold is moved by the turns that come in the meantime; then they go.
"""
