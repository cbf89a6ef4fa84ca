"""Ed25519 signatures, and their key files in PEM, compatible with openssl."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.receipts.document import canonical
from bitnet.core.support.files import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

INSTALL = 'pip install "bitnet-core[sign]"'

_PURPOSE = b"bitnet receipt\n"  # prefix of the signed bytes, so that signatures for other purposes do not match
_LARGEST = 1 << 16  # bytes of a key file


class NoCryptographyError(InvalidInputError):
    """The package ``cryptography`` is not installed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} needs the package cryptography.", hint=f"Install it: {INSTALL}")


def keygen(path: str | Path) -> str:
    """Make a key pair: the private key in ``path``, readable only by its owner, and the public key in ``path.pub``.

    Returns:
        The key's id, which is the public key: 32 bytes in hex.

    Raises:
        InvalidInputError: One of the two files exists, or ``cryptography`` is not installed.
        BitNetError: A file cannot be written.
    """
    try:
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise NoCryptographyError("Making a key") from None
    private, public = Path(path), Path(f"{path}.pub")
    key = Ed25519PrivateKey.generate()
    contents = {
        private: key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()),
        public: key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo),
    }
    made: list[Path] = []
    try:
        for file, content in contents.items():
            mode = 0o600 if file is private else 0o644
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
            made.append(file)
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)
    except BaseException as error:
        for file in made:
            file.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            hint = "Use another name, or move the file away; receipts that its key signed still need it."
            raise InvalidInputError(f"{error.filename} already exists.", hint=hint) from None
        if isinstance(error, OSError):
            where = error.filename or made[-1]  # an error of writing or closing names no file
            raise BitNetError(f"{where} cannot be written: {error.strerror or error}.") from None
        raise
    return key.public_key().public_bytes_raw().hex()


def sign(receipt: Mapping[str, Any], key: str | Path) -> dict[str, Any]:
    """The receipt with a signature; an existing signature is replaced.

    Args:
        key: The file of an Ed25519 private key, as :func:`keygen` makes it.

    Raises:
        InvalidInputError: The file cannot be read, or has no such key, or ``cryptography`` is not installed.
    """
    private = private_key(key)
    signature = {
        "algorithm": "ed25519",
        "key": private.public_key().public_bytes_raw().hex(),
        "value": private.sign(_PURPOSE + canonical(receipt)).hex(),
    }
    return {**receipt, "signature": signature}


def private_key(path: str | Path) -> Ed25519PrivateKey:
    """The private key in a file; errors as for :func:`sign`."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise NoCryptographyError("Signing") from None
    data = _read(path)
    try:
        key = load_pem_private_key(data, None)
    except TypeError:
        raise InvalidInputError(f"{path} has an encrypted key, which bitnet does not support.") from None
    except Exception:  # a file that is no key fails in many ways
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        hint = "'bitnet receipt keygen FILE' makes one; the file without .pub is the private key."
        raise InvalidInputError(f"{path} has no Ed25519 private key in PEM.", hint=hint)
    return key


def key_id(path: str | Path) -> str:
    """The id of the public key in a file.

    Raises:
        InvalidInputError: The file cannot be read, or has no such key, or ``cryptography`` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise NoCryptographyError("Checking a signature") from None
    data = _read(path)
    try:
        key = load_pem_public_key(data)
    except Exception:  # a file that is no key fails in many ways
        key = None
    if not isinstance(key, Ed25519PublicKey):
        private = b"PRIVATE KEY" in data
        hint = "It has a private key; the public key is in the file that ends in .pub." if private else None
        raise InvalidInputError(f"{path} has no Ed25519 public key in PEM.", hint=hint)
    return key.public_bytes_raw().hex()


def fits(receipt: Mapping[str, Any]) -> bool:
    """Whether the signature is valid for this receipt and the key it names.

    Raises:
        NoCryptographyError: ``cryptography`` is not installed.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise NoCryptographyError("Checking a signature") from None
    signature = receipt["signature"]
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["key"]))
        key.verify(bytes.fromhex(signature["value"]), _PURPOSE + canonical(receipt))
    except (InvalidSignature, ValueError):
        return False
    return True


def trusted_ids(keys: Sequence[str | Path]) -> set[str]:
    """The ids of public keys in files; errors as for :func:`key_id`."""
    return {key_id(path) for path in keys}


def _read(path: str | Path) -> bytes:
    try:
        return read_bytes(Path(path), _LARGEST)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"the key {path} cannot be read: {reason}.", hint="Check the path.") from None
