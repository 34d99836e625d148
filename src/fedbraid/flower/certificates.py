"""TLS certificates and node keys: made for rehearsals, and checked if the user provides them."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import NameOID

__all__ = ["Certificates", "check_certificates", "make_certificates", "make_node_key"]

LOOPBACK = ("localhost", "127.0.0.1")
DAYS = 30  # validity of a rehearsal's certificates


class Certificates(NamedTuple):
    """The three files of a SuperLink with TLS."""

    authority: Path  # the nodes' --root-certificates
    certificate: Path
    key: Path

    @classmethod
    def at(cls, folder: Path) -> Certificates:
        return cls(folder / "ca.crt", folder / "server.pem", folder / "server.key")


def _write(place: Path, content: bytes, *, secret: bool) -> None:
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_certificates(folder: Path, hosts: tuple[str, ...] = LOOPBACK, *, days: float = DAYS) -> Certificates:
    """Make a certificate authority and a server certificate for ``hosts``, valid for ``days`` days.

    The certificate also names loopback: Flower's own processes and the gate connect to the SuperLink there.

    >>> import tempfile
    >>> check_certificates(make_certificates(Path(tempfile.mkdtemp())))
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates.at(folder)
    now = datetime.datetime.now(datetime.UTC)
    start, end = now - datetime.timedelta(days=1), now + datetime.timedelta(days=days)
    names = dict.fromkeys((*hosts, socket.gethostname(), *LOOPBACK))
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedbraid rehearsal authority")])
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    usage = {
        "digital_signature": True,
        "content_commitment": False,
        "key_encipherment": False,
        "data_encipherment": False,
        "key_agreement": False,
        "key_cert_sign": True,
        "crl_sign": True,
        "encipher_only": False,
        "decipher_only": False,
    }

    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer, critical=False)
        )

    root = (
        builder(authority, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    leaf = (
        builder(server, server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(name) for name in names]), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    _write(made.authority, root.public_bytes(Encoding.PEM), secret=False)
    _write(made.certificate, leaf.public_bytes(Encoding.PEM), secret=False)
    _write(made.key, _pem(server_key), secret=True)
    return made


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def check_certificates(files: Certificates) -> None:
    """Refuse files that are missing, unreadable or expired, or that do not belong to each other."""
    for what, place in files._asdict().items():
        if not place.is_file():
            raise ValueError(f"the {what} file {place} is missing: make it, or remove its folder to have new ones made")
    now = datetime.datetime.now(datetime.UTC)
    read = {}
    for place in (files.authority, files.certificate):
        try:
            read[place] = x509.load_pem_x509_certificate(place.read_bytes())
        except ValueError:
            raise ValueError(f"{place} is not a PEM certificate") from None
        expires = read[place].not_valid_after_utc
        if expires < now:
            raise ValueError(
                f"the certificate {place} expired on {expires:%Y-%m-%d}: remove {place.parent} to have new ones made"
            )
        if read[place].not_valid_before_utc > now:
            raise ValueError(f"the certificate {place} is not valid before {read[place].not_valid_before_utc:%Y-%m-%d}")
    try:
        key = load_pem_private_key(files.key.read_bytes(), None)
    except (ValueError, TypeError):
        raise ValueError(f"{files.key} is not an unencrypted PEM private key") from None
    if key.public_key() != read[files.certificate].public_key():
        raise ValueError(f"the key {files.key} does not belong to the certificate {files.certificate}")
    try:
        read[files.certificate].verify_directly_issued_by(read[files.authority])
    except Exception:
        raise ValueError(f"the certificate {files.certificate} was not issued by {files.authority}") from None


def make_node_key(place: Path) -> Path:
    """Make a node's private key at ``place`` and its public key at ``place.pub``; returns the public key's file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    public = place.with_name(f"{place.name}.pub")
    if place.exists():
        check_node_key(place)
        return public
    key = ec.generate_private_key(ec.SECP384R1())
    _write(place, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), secret=True)
    _write(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n", secret=False)
    return public


def check_node_key(place: Path) -> None:
    """Refuse a node key that SuperNodes cannot use."""
    if not place.is_file():
        raise ValueError(f"the node key {place} is missing")
    try:
        key = load_ssh_private_key(place.read_bytes(), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{place} is not an unencrypted elliptic-curve key in OpenSSH format")
