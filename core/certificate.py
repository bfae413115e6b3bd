"""The server's certificate, tried before anything slow: can TLS use it, and will clients accept it?

Owns both answers and serves nothing. Called by `supervisor.py`.
"""

import ssl
from pathlib import Path

from cearx.core.config import FrontendConfig


class CannotUseCertificate(Exception):
    """One clear line why there is no TLS."""


def check_certificate(config: FrontendConfig) -> str | None:
    """What clients will have against the certificate, if anything.

    Raises CannotUseCertificate for files that TLS cannot use.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    cert, key = config.ssl_certfile, config.ssl_keyfile

    def refuse_password() -> str:
        raise CannotUseCertificate(f"TLS cannot use {key}: a key with a password is not supported")

    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key, password=refuse_password)
        return _objection(server, cert)
    except OSError as error:  # ssl.SSLError is one
        raise CannotUseCertificate(f"TLS cannot use {cert} and {key}: {error}") from error


def _objection(server_context: ssl.SSLContext, cert: Path) -> str | None:
    """Of a client that trusts whoever has signed it, from a handshake in memory."""
    client_context = ssl.create_default_context(cafile=str(cert))
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    try:
        for side in (client, server, client):  # hello, certificate, judgement
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    return None
