"""Certificates for tests: an authority, and pairs of certificate and key that it has signed."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Pair:
    """PEM texts, and the serial number by which a client tells one certificate from another."""

    certificate: bytes
    key: bytes
    serial: int

    def write(self, folder: Path) -> tuple[Path, Path]:
        """As a Secret of type kubernetes.io/tls is mounted."""
        files = folder / "tls.crt", folder / "tls.key"
        for file, text in zip(files, (self.certificate, self.key), strict=True):
            file.write_bytes(text)
        return files


class Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self._serial = 1
        self.certificate = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(self._serial)
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def pair(self, password: bytes | None = None) -> Pair:
        """A new pair for localhost and 127.0.0.1."""
        self._serial += 1
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
        )
        signed = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "router")]), key, names)
        sealed = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        text = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, sealed)
        return Pair(signed.public_bytes(PEM), text, self._serial)

    def client(self) -> ssl.SSLContext:
        """What a client that trusts this authority, and nobody else, connects with."""
        return ssl.create_default_context(cadata=self.certificate.public_bytes(PEM).decode())


def serial(connection: ssl.SSLObject | ssl.SSLSocket) -> int:
    """Of the certificate that the server has shown."""
    shown = connection.getpeercert()
    assert shown is not None
    return int(str(shown["serialNumber"]), 16)
