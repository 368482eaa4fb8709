"""Every private name of vLLM that the connector uses: one module per subject, and one per vLLM version to gather them.

`load` picks the module for the vLLM that is installed, and refuses one that nobody has tried.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from disagg_connector.config import ConfigError

# vLLM release series -> module of this package.
SUPPORTED = {"0.32": "v0_32", "0.33": "v0_33"}


def module_for(version: str) -> str:
    """The module for a vLLM version string. Raises `ConfigError` naming the supported ones."""
    match = re.match(r"(\d+\.\d+)(\.|$|[^\d])", version)
    name = SUPPORTED.get(match.group(1)) if match else None
    if name is None:
        raise ConfigError(
            f"BidirectionalPushConnector does not know vLLM {version}. It relies on names that are private to "
            f"vLLM and is tried with: {', '.join(f'{series}.x' for series in SUPPORTED)}. Use one of these, or "
            "another kvTransfer mode"
        )
    return name


def load() -> ModuleType:
    """The compatibility module for the installed vLLM."""
    import vllm

    return importlib.import_module(f"disagg_connector.compat.{module_for(vllm.__version__)}")
