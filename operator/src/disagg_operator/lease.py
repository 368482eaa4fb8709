"""One operator at a time: a Lease that its holder renews, and that another takes over when it is no longer renewed.

Times are taken from the own clock alone, as client-go does: a Lease has run out when it was not seen to change for its
duration. Clocks of two machines are never compared.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from .errors import KubeError
from .naming import Manifest

_log = logging.getLogger(__name__)
LEASE_SECONDS = 15
RENEW_SECONDS = 5.0
POLL_SECONDS = 2.0


class LeaseLost(Exception):  # noqa: N818 - reads as what happened
    """Somebody else may be acting: this process must end."""


class Store(Protocol):
    """Where the Lease is kept; `Kube` is one. `replace` fails if the object changed since it was read."""

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None: ...

    async def create(self, manifest: Manifest) -> Manifest: ...

    async def replace(self, manifest: Manifest) -> Manifest: ...


@dataclass
class Lease:
    """The Lease `namespace/name`, and `holder`, who wants it."""

    store: Store
    namespace: str
    name: str
    holder: str
    monotonic: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    patience: float = RENEW_SECONDS
    """Seconds that a renewal may take. A request of its own accord takes longer than the lease lasts, if nobody answers."""

    async def acquire(self) -> None:
        """Waits until the Lease is ours."""
        seen, since = None, self.monotonic()
        while True:
            try:
                lease = await self.store.get("Lease", self.namespace, self.name)
                version = lease["metadata"]["resourceVersion"] if lease else None
                if version != seen:
                    seen, since = version, self.monotonic()
                if lease is None or self._is_free(lease, self.monotonic() - since):
                    await self._take(lease)
                    return
                _log.info("waiting for the lease that %s holds", lease["spec"].get("holderIdentity"))
            except KubeError as error:
                _log.warning("%s; trying again", error)
            await self.sleep(POLL_SECONDS)

    async def keep(self) -> None:
        """Renews the Lease for ever. Raises LeaseLost when it is another's, or could not be renewed in time."""
        renewed = self.monotonic()
        while True:
            await self.sleep(RENEW_SECONDS)
            began = self.monotonic()
            try:
                async with asyncio.timeout(self.patience):
                    lease = await self.store.get("Lease", self.namespace, self.name)
                    if lease is None or lease["spec"].get("holderIdentity") != self.holder:
                        raise LeaseLost(f"the lease {self.namespace}/{self.name} is no longer ours")
                    await self._take(lease)
                renewed = began  # others count from when it was written, which may be long before the answer
            except (KubeError, TimeoutError) as error:
                why = str(error) or f"no answer within {self.patience:g} s"
                _log.warning("renewing the lease: %s; trying again", why)
                if self.monotonic() - renewed > LEASE_SECONDS - RENEW_SECONDS:
                    raise LeaseLost(f"the lease could not be renewed in time: {why}") from error

    async def release(self) -> None:
        """Gives the Lease up, so that a successor need not wait for it to run out."""
        try:
            lease = await self.store.get("Lease", self.namespace, self.name)
            if lease is not None and lease["spec"].get("holderIdentity") == self.holder:
                lease["spec"]["holderIdentity"] = ""
                await self.store.replace(lease)
        except KubeError as error:
            _log.info("the lease was not released and runs out: %s", error)

    def _is_free(self, lease: Manifest, unchanged: float) -> bool:
        spec = lease["spec"]
        return spec.get("holderIdentity") in (None, "", self.holder) or unchanged > spec.get(
            "leaseDurationSeconds", LEASE_SECONDS
        )

    async def _take(self, lease: Manifest | None) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = {"holderIdentity": self.holder, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now}
        if lease is None:
            metadata = {"namespace": self.namespace, "name": self.name}
            spec = {**ours, "acquireTime": now}
            manifest = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": spec,
            }
            await self.store.create(manifest)
            return
        if lease["spec"].get("holderIdentity") != self.holder:
            ours["acquireTime"] = now
        await self.store.replace({**lease, "spec": {**lease["spec"], **ours}})
