"""The certificate that the router shows: read, held to its key and to the clock, and renewed.

Owns the words for what can be wrong with one. Never logs or keeps a key.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from kvdeploy.errors import SpecError

_HINT = "give the router a certificate chain and its key as PEM files, the key without a passphrase"


def read_tls(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with this certificate; None where none is named. Raises SpecError."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        message = "tls_cert_file and tls_key_file go together, and only one of them is given"
        raise SpecError(message, hint=_HINT)
    for what, path in (("certificate", cert), ("key", key)):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            message = f"the TLS {what} {path} cannot be read: {e}"
            raise SpecError(message, hint=_HINT) from e
        if "-----BEGIN" not in text:
            message = f"the TLS {what} {path} is no PEM file"
            raise SpecError(message, hint=_HINT)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load(context, cert, key)
    return context


def load(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Show this certificate from now on; open connections keep theirs. Raises SpecError."""
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except (ssl.SSLError, OSError) as e:
        reason = getattr(e, "reason", None) or str(e)
        if reason == "KEY_VALUES_MISMATCH":
            message = f"the TLS key {key} does not belong to the certificate {cert}"
        else:
            message = f"the TLS certificate {cert} and key {key} cannot be used: {reason}"
        raise SpecError(message, hint=_HINT) from e


def _refuse_passphrase() -> NoReturn:
    message = "the TLS key needs a passphrase, and nobody is there to type it"
    raise SpecError(message, hint=_HINT)


def find_expiry(context: ssl.SSLContext, cert: str) -> float:
    """When the certificate ends, in Unix time, by a handshake with it in memory.

    Raises SpecError: a client that trusts exactly this certificate does not take it today.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        context.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(8):  # a handshake takes three turns
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as e:
                message = f"the TLS certificate {cert} is not taken by clients: {e.verify_message}"
                raise SpecError(message, hint="renew it, and look at this machine's clock") from e
    shown = ends[0].getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
