"""TLS: certificates that can be used and others, and clients that end amid a handshake."""

import os
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from frontend_server import MODEL, FrontendServer, frontend_server

from cearx.core.certificate import CannotUseCertificate, check_certificate
from cearx.core.config import FrontendConfig

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 1}
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""The beginning of a client's first message."""
TIMEOUT_S = 1


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)


def make_certificate(folder: Path, *key_options: str) -> tuple[Path, Path]:
    """A key and a certificate of its own for 127.0.0.1."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    files = ["-keyout", "key.pem", "-out", "cert.pem"]
    openssl("req", *kind, *(key_options or ("-nodes",)), *names, *files, folder=folder)
    return folder / "key.pem", folder / "cert.pem"


def make_old_certificate(folder: Path) -> tuple[Path, Path]:
    """One that was good for a day of 2020."""
    make_certificate(folder)
    openssl("req", "-new", "-key", "key.pem", "-subj", "/CN=x", "-out", "csr", folder=folder)
    (folder / "index").write_text("")
    (folder / "serial").write_text("01\n")
    (folder / "ca.conf").write_text(
        "[ca]\ndefault_ca=a\n[a]\ndatabase=index\nserial=serial\nnew_certs_dir=.\n"
        "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    days = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
    given = ("-selfsign", "-batch", "-keyfile", "key.pem", "-in", "csr", "-out", "old.pem")
    openssl("ca", "-config", "ca.conf", *given, *days, folder=folder)
    return folder / "key.pem", folder / "old.pem"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(files: tuple[Path, Path]) -> Iterator[FrontendServer]:
    key, cert = files
    with frontend_server(
        ssl_keyfile=key, ssl_certfile=cert, request_read_timeout=TIMEOUT_S
    ) as started:
        yield started


@pytest.fixture
def client(server: FrontendServer, files: tuple[Path, Path]) -> Iterator[httpx.Client]:
    trusting = ssl.create_default_context(cafile=str(files[1]))
    url = f"https://127.0.0.1:{server.port}"
    with httpx.Client(base_url=url, verify=trusting, timeout=10) as opened:
        yield opened


def test_answers_and_streams(server: FrontendServer, client: httpx.Client) -> None:
    """A client that trusts the certificate gets both; one that does not, and plain HTTP, do not."""
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    stream = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert stream.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.HTTPError):
        server.http.get("/health")
    with pytest.raises(httpx.ConnectError, match="self-signed"):
        httpx.get(f"https://127.0.0.1:{server.port}/health")


@pytest.mark.parametrize(
    ("sent", "is_at_once"),
    [
        (b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", True),
        (bytes(range(256)) * 8, True),
        (b"\x16\x03\x01\xff\xff" + b"a" * 70_000, True),
        (b"\x15\x03\x03\x00\x02\x02\x28", True),
        (b"", False),
        (HELLO, False),
    ],
)
def test_no_handshake(
    server: FrontendServer, client: httpx.Client, sent: bytes, is_at_once: bool
) -> None:
    """What is no TLS is cut off, at once or when it stands still, and hurts nobody."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        try:
            raw.sendall(sent)
            while raw.recv(4096):
                pass
        except ConnectionError:
            pass
    if not is_at_once:
        assert time.monotonic() - began > 0.9 * TIMEOUT_S
    assert client.get("/live").status_code == 200


def test_half_open_handshakes_are_in_nobodys_way(
    server: FrontendServer, client: httpx.Client
) -> None:
    """100 clients that stop amid their first message; then as many that break off behind it."""
    address = ("127.0.0.1", server.port)
    half = [socket.create_connection(address, timeout=20) for _ in range(100)]
    for index, raw in enumerate(half):
        raw.sendall(HELLO[: index % len(HELLO)])
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    for raw in half:
        try:
            assert raw.recv(100) == b""
        except ConnectionError:
            pass
        raw.close()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    body = b'{"model":"%s","prompt":"a","max_tokens":9000,"stream":true}' % MODEL.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for index in range(20):
        wrapped = context.wrap_socket(socket.create_connection(address, timeout=20))
        wrapped.sendall((head + body)[: index * 10])
        if index % 2:
            wrapped.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(wrapped.detach())  # no closing message of TLS
    server.core.wait_until(lambda core: core.num_running == 0)
    assert client.get("/live").status_code == 200


def test_a_slow_request_inside_tls(server: FrontendServer, files: tuple[Path, Path]) -> None:
    """It gets its 408 as any other."""
    context = ssl.create_default_context(cafile=str(files[1]))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped:
            wrapped.sendall(b"GET /li")
            assert wrapped.recv(100).startswith(b"HTTP/1.1 408 ")


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    """The start fails with the names of the files; nobody is asked for a password."""
    key, cert = make_certificate(tmp_path)
    assert check_certificate(FrontendConfig(ssl_keyfile=key, ssl_certfile=cert)) is None
    key.write_text("nonsense")
    for bad in (key, tmp_path / "none"):
        with pytest.raises(CannotUseCertificate, match=str(bad)):
            check_certificate(FrontendConfig(ssl_keyfile=bad, ssl_certfile=cert))
    key, cert = make_certificate(tmp_path, "-passout", "pass:secret")
    with pytest.raises(CannotUseCertificate, match="password"):
        check_certificate(FrontendConfig(ssl_keyfile=key, ssl_certfile=cert))


def test_a_certificate_that_has_expired(tmp_path: Path) -> None:
    """It can be used, and it is told that clients will refuse it."""
    key, cert = make_old_certificate(tmp_path)
    objection = check_certificate(FrontendConfig(ssl_keyfile=key, ssl_certfile=cert))
    assert objection == "certificate has expired"
