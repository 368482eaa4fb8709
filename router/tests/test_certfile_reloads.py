"""Which certificate clients are shown while its files change: handshakes in memory."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from disagg_router.certfile import CertFile
from disagg_router.config import ConfigError
from router.tests.certificates import Authority, Pair, serial

AUTHORITY = Authority()


class Talk:
    """A client and a server that have shaken hands, over buffers in place of sockets."""

    def __init__(
        self,
        server: ssl.SSLContext,
        client: ssl.SSLContext | None = None,
        name: str | None = "localhost",
        session: ssl.SSLSession | None = None,
    ) -> None:
        client = client or AUTHORITY.client()
        client.check_hostname = name is not None
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(down, up, server_hostname=name, session=session)
        self.server = server.wrap_bio(up, down, server_side=True)
        waiting = [self.client, self.server]
        while waiting:
            side = waiting.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(side)

    def carries(self, text: bytes) -> bool:
        self.client.write(text)
        heard = self.server.read(100)
        self.server.write(heard)
        return self.client.read(100) == text


def shown(certificate: CertFile, name: str | None = "localhost") -> int:
    return serial(Talk(certificate.context, name=name).client)


@pytest.mark.parametrize("name", ["localhost", None], ids=["by name", "without a name"])
def test_a_changed_pair_is_shown_to_new_connections_and_hurts_no_open_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None
) -> None:
    caplog.set_level(logging.INFO)
    old, new = AUTHORITY.pair(), AUTHORITY.pair()
    certificate = CertFile(*old.write(tmp_path))
    before = Talk(certificate.context, name=name)
    assert serial(before.client) == old.serial
    new.write(tmp_path)
    assert shown(certificate, name) == old.serial, "nobody has looked yet"
    certificate.look()
    assert shown(certificate, name) == new.serial
    assert before.carries(b"still here")
    assert [record.getMessage() for record in caplog.records] == ["TLS certificate and key changed"]
    certificate.look()
    assert len(caplog.records) == 1, "nothing new"
    newest = AUTHORITY.pair()
    newest.write(tmp_path)
    certificate.look()
    assert shown(certificate, name) == newest.serial


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_resumes_a_session_from_before_is_served(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    certificate = CertFile(*AUTHORITY.pair().write(tmp_path))
    client = AUTHORITY.client()
    client.maximum_version = version
    before = Talk(certificate.context, client)
    assert before.carries(b"once")  # TLS 1.3 gives out sessions after the handshake
    AUTHORITY.pair().write(tmp_path)
    certificate.look()
    for session in (before.client.session, None):
        after = Talk(certificate.context, client, session=session)
        assert after.client.session_reused == (session is not None)
        assert after.carries(b"again")


def broken_pairs() -> dict[str, Pair]:
    good, other = AUTHORITY.pair(), AUTHORITY.pair()
    return {
        "a key of another": Pair(good.certificate, other.key, 0),
        "no certificate": Pair(b"", good.key, 0),
        "no key": Pair(good.certificate, b"nonsense", 0),
        "half a certificate": Pair(good.certificate[:200], good.key, 0),
        "exchanged": Pair(good.key, good.certificate, 0),
        "a key with a password": AUTHORITY.pair(password=b"secret"),
    }


@pytest.mark.parametrize("broken", broken_pairs().values(), ids=broken_pairs().keys())
def test_a_broken_pair_is_not_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: Pair
) -> None:
    old, new = AUTHORITY.pair(), AUTHORITY.pair()
    certificate = CertFile(*old.write(tmp_path))
    broken.write(tmp_path)
    for _ in range(3):
        certificate.look()
    assert shown(certificate) == old.serial
    assert [record.levelno for record in caplog.records] == [logging.ERROR], "said once"
    assert "the old ones stay" in caplog.text
    assert "PRIVATE" not in caplog.text + repr([vars(record) for record in caplog.records])
    new.write(tmp_path)
    certificate.look()
    assert shown(certificate) == new.serial


def test_files_that_cannot_be_read_take_nothing_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = AUTHORITY.pair(), AUTHORITY.pair()
    certificate = CertFile(*old.write(tmp_path))
    (tmp_path / "tls.key").unlink()
    for _ in range(3):
        certificate.look()
    assert shown(certificate) == old.serial
    assert len(caplog.records) == 1
    new.write(tmp_path)
    certificate.look()
    assert shown(certificate) == new.serial


@pytest.mark.parametrize("broken", broken_pairs().values(), ids=broken_pairs().keys())
def test_without_a_good_pair_there_is_no_start(tmp_path: Path, broken: Pair) -> None:
    with pytest.raises(ConfigError, match="not a certificate with its key") as caught:
        CertFile(*broken.write(tmp_path))
    assert str(tmp_path / "tls.crt") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key"])
def test_without_its_files_there_is_no_start(tmp_path: Path, missing: str) -> None:
    files = AUTHORITY.pair().write(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        CertFile(*files)
    assert str(caught.value).startswith(str(tmp_path / missing))


@pytest.mark.filterwarnings("ignore:.*TLSv1:DeprecationWarning")
@pytest.mark.parametrize("changed", [False, True], ids=["at first", "after a change"])
def test_only_tls_from_1_2_and_http_1_1_are_spoken(tmp_path: Path, changed: bool) -> None:
    certificate = CertFile(*AUTHORITY.pair().write(tmp_path))
    if changed:
        AUTHORITY.pair().write(tmp_path)
        certificate.look()
    client = AUTHORITY.client()
    client.set_alpn_protocols(["h2", "http/1.1"])
    assert Talk(certificate.context, client).client.selected_alpn_protocol() == "http/1.1"
    client = AUTHORITY.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert Talk(certificate.context, client).client.version() == "TLSv1.2"
    client = AUTHORITY.client()
    client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        Talk(certificate.context, client)
