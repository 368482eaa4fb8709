"""KV connector that moves a conversation's KV cache by push, from prefill to decode and back.

Loaded by vLLM as ``disagg_connector.connector:BidirectionalPushConnector``. The package must stay
importable without vLLM: everything that decides is pure and tested on its own.
"""

__version__ = "0.1.0"
