"""The certificate that the clients' port shows, and its key, from two files."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from disagg_router.config import ConfigError
from disagg_router.http1 import HttpLimits
from disagg_router.logs import event
from disagg_router.mounted import Mounted

_log = logging.getLogger(__name__)


class CertFile(Mounted):
    """`context` is what a server listens with. Whatever pair is newest when a client says hello is what it is shown.

    The pair is not loaded into the context that listens: what fails half way would leave it with a certificate of one pair
    and a key of another.
    """

    what: ClassVar[str] = "TLS certificate and key"

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError if there is no usable pair to begin with."""
        super().__init__(certificate, key)

    def listening(self, limits: HttpLimits) -> dict[str, Any]:
        """Arguments of `create_server`."""
        return {
            "ssl": self.context,
            "ssl_handshake_timeout": limits.handshake_seconds,
            # It bounds also how long a closed connection may take to send what is left: the same as without TLS.
            "ssl_shutdown_timeout": limits.stall_seconds,
        }

    def _begin(self, contents: Sequence[bytes]) -> None:
        certificate, key = self._paths
        try:
            self._newest = self.context = _context(certificate, key)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"{certificate}, {key}: not a certificate with its key, in PEM and without a password: {exc}"
            ) from exc
        self.context.sni_callback = self._show_newest

    def _take_over(self, contents: Sequence[bytes]) -> None:
        try:
            self._newest = _context(*self._paths)
        except (OSError, ValueError) as exc:
            event(
                _log,
                logging.ERROR,
                "TLS certificate and key cannot be used; the old ones stay",
                error=str(exc),
            )
        else:
            event(_log, logging.INFO, "TLS certificate and key changed")

    def _show_newest(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> None:
        """Called in each handshake, also of a client that names no server."""
        connection.context = self._newest


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key, password="")  # else OpenSSL asks the terminal for one
    return context
