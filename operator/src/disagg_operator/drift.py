"""Whether a child is as it should be, so that nothing is written when it is. Pure.

Two things make a write due: what we want changed since the last write (the hash in the annotation differs; only
server-side apply then knows which fields to take away), or somebody changed a field of ours.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from .naming import ANNOTATION_APPLIED, Manifest


def is_due(wanted: Manifest, live: Manifest | None) -> bool:
    """Whether `wanted` has to be applied."""
    if live is None:
        return True
    annotations = live["metadata"].get("annotations") or {}
    if annotations.get(ANNOTATION_APPLIED) != wanted["metadata"]["annotations"][ANNOTATION_APPLIED]:
        return True
    return not covers(live, wanted)


def covers(live: Any, wanted: Any) -> bool:
    """Whether everything in `wanted` is in `live`, which may have more: defaults, other people's fields.

    Of a list of objects each must be covered by some item. Empty values may be missing, the API server leaves them out.
    Quantities are compared by amount: it writes `1000m` as `1`.
    """
    if live == wanted:  # nearly always, and quick
        return True
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return False
        return all(
            covers(live[key], value) if key in live else _is_empty(value) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(live, Sequence) or isinstance(live, str):
            return False
        if any(isinstance(item, Mapping) for item in wanted):
            return all(any(covers(candidate, item) for candidate in live) for item in wanted)
        return list(live) == list(wanted)
    return _same_amount(live, wanted)


def _is_empty(value: Any) -> bool:
    return value is False or (isinstance(value, str | Mapping | Sequence) and not value)


_QUANTITY = re.compile(r"^([+-]?[0-9.]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i)|([numkMGTPE]))?$")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def _same_amount(live: object, wanted: object) -> bool:
    one, other = _amount(live), _amount(wanted)
    return one is not None and one == other


def _amount(value: object) -> Decimal | None:
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, exponent, binary, suffix = match.groups()
    try:
        amount = Decimal(number + (exponent or ""))
    except ArithmeticError:
        return None
    if binary:
        return amount * Decimal(2) ** _BINARY[binary]
    return amount.scaleb(_DECIMAL[suffix]) if suffix else amount
