"""`inside` is for the engine bundle's interpreter; see test_inside_engine."""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["inside"]
