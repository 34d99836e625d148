"""Keys, streams and sealed shares: X25519, HKDF-SHA256, ChaCha20 and ChaCha20-Poly1305 of ``cryptography``."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

__all__ = ["check_public", "commitment", "new_private", "opened", "pair_key", "public_of", "sealed", "stream"]

KEY = 32  # bytes of a private key, of a public key, of a seed and of a commitment
NONCE, AUTH = 12, 16  # bytes that sealing adds


def new_private() -> bytes:
    """A new private key, from the operating system's entropy."""
    return secrets.token_bytes(KEY)


def public_of(private: bytes) -> bytes:
    """The public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def check_public(public: bytes) -> None:
    """Refuse a public key with which every other key would agree on the same value (ValueError)."""
    X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))


def pair_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """The key that two parties agree on for one purpose. The purpose names protocol, run, exchange and parties."""
    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(hashes.SHA256(), KEY, salt=None, info=purpose.encode()).derive(shared)


def commitment(seed: bytes) -> bytes:
    """A hash of a random seed: it fixes the seed and does not tell it."""
    return hashlib.sha256(b"fedbraid seed " + seed).digest()


def stream(key: bytes, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pseudorandom words of the shapes and dtypes of ``like``: ChaCha20 with this key. Use a key for one stream."""
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return [
        np.frombuffer(encryptor.update(bytes(words.nbytes)), words.dtype.newbyteorder("<")).astype(words.dtype)
        for words in like
    ]


def sealed(key: bytes, text: bytes) -> bytes:
    """Encrypted and authenticated."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, None)


def opened(key: bytes, box: bytes) -> bytes | None:
    """The text of `sealed`; None if it was not sealed with this key."""
    try:
        return ChaCha20Poly1305(key).decrypt(box[:NONCE], box[NONCE:], None)
    except (InvalidTag, ValueError):
        return None
