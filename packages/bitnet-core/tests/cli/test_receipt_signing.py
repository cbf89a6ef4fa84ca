"""Signed receipts and their keys."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import receipts
from bitnet.core.errors import BitNetError, ReceiptError

Bitnet = Callable[..., Any]
Document = dict[str, Any]

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if not isinstance(value, dict | list) or not value:
        yield place
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield from leaves(value[key], (*place, key))


def test_no_field_of_a_signed_one_can_be_changed(signed: Document, tmp_path: Path) -> None:
    places = list(leaves(signed))
    assert len(places) > 60
    for place in places:
        copy = json.loads(json.dumps(signed))
        at = copy
        for key in place[:-1]:
            at = at[key]
        old = at[place[-1]]
        if isinstance(old, str):
            at[place[-1]] = old[:-1] + ("0" if old[-1:] != "0" else "1")
        elif isinstance(old, int | float) and not isinstance(old, bool):
            at[place[-1]] = old + 1
        else:
            at[place[-1]] = (
                {None: "x", False: True, True: False}.get(old, 1) if not isinstance(old, dict | list) else ["y"]
            )
        if place != ("digest",):
            copy["digest"] = receipts.digest(copy)
        with pytest.raises(ReceiptError):
            receipts.verify(copy, keys=[tmp_path / "k.pub"])
    assert receipts.verify(signed, keys=[tmp_path / "k.pub"]).trusted


def test_openssl_accepts_the_signature(signed: Document, tmp_path: Path, require_device: Any) -> None:
    """The form that is signed is the one the schema tells, and the keys are files that others read."""
    openssl = shutil.which("openssl")
    require_device("openssl", None if openssl else "there is no openssl")
    assert openssl is not None
    rest = {k: v for k, v in signed.items() if k not in ("digest", "signature")}
    data = b"bitnet receipt\n" + json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    (tmp_path / "signature").write_bytes(bytes.fromhex(signed["signature"]["value"]))
    verify = [
        openssl,
        "pkeyutl",
        "-verify",
        "-pubin",
        "-inkey",
        "k.pub",
        "-rawin",
        "-in",
        "data",
        "-sigfile",
        "signature",
    ]
    for content, good in ((data, True), (data.replace(b'"seed":0', b'"seed":1'), False)):
        (tmp_path / "data").write_bytes(content)
        assert (subprocess.run(verify, capture_output=True, check=False, cwd=tmp_path).returncode == 0) == good
    key = ["pkey", "-pubin", "-in", "k.pub", "-outform", "DER"]
    der = subprocess.run([openssl, *key], capture_output=True, check=True, cwd=tmp_path).stdout
    assert der[-32:].hex() == signed["signature"]["key"]


def test_who_signed(bitnet: Bitnet, signed: Document) -> None:
    own = signed["signature"]["key"][:16]
    alone = bitnet("receipt", "verify", "s.json")
    assert (alone.status, alone.err) == (0, "")
    assert f"by the key {own}, which may be anyone's: name the keys you trust with --key" in alone.out
    made = bitnet("receipt", "keygen", "other")
    assert made.status == 0
    assert own not in made.out
    among = bitnet("receipt", "verify", "s.json", "--key", "other.pub", "--key", "k.pub")
    assert (among.status, f"by the key {own}, one of those given" in among.out) == (0, True)
    other = bitnet("receipt", "verify", "s.json", "--key", "other.pub")
    assert (other.status, f"it was signed by the key {signed['signature']['key']}, which is not one" in other.err) == (
        6,
        True,
    )


def test_a_key_from_the_environment(bitnet: Bitnet, model: Path, tmp_path: Path) -> None:
    """Its name is no part of the receipt: somebody will put the key itself there."""
    bitnet("receipt", "keygen", "secret-name")
    run = ("run", "-m", model, "Hello", "-n", "4", "--receipt", "r.json")
    assert bitnet(*run, BITNET_RECEIPT_KEY="secret-name").status == 0
    assert "secret-name" not in (tmp_path / "r.json").read_text()
    assert "BITNET_RECEIPT_KEY" not in (tmp_path / "r.json").read_text()
    assert bitnet("receipt", "verify", "r.json", "--key", "secret-name.pub").status == 0
    bitnet("receipt", "keygen", "option")
    assert bitnet(*run, "--receipt-key", "option", BITNET_RECEIPT_KEY="secret-name").status == 0
    assert bitnet("receipt", "verify", "r.json", "--key", "option.pub").status == 0


def test_keygen_replaces_nothing(bitnet: Bitnet, tmp_path: Path) -> None:
    made = bitnet("receipt", "keygen", "k")
    assert (made.status, made.err) == (0, "")
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
        old = os.umask(0)
        try:
            assert bitnet("receipt", "keygen", "open").status == 0
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o600
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert bitnet("receipt", "keygen", "k").err.startswith("bitnet: error: k already exists.")
    (tmp_path / "k").unlink()
    ran = bitnet("receipt", "keygen", "k")
    assert (ran.status, "k.pub already exists" in ran.err, (tmp_path / "k").exists()) == (2, True, False)
    assert (tmp_path / "k.pub").read_bytes() == before[tmp_path / "k.pub"]
    ran = bitnet("receipt", "keygen", "no/such/k")
    assert (ran.status, "no/such/k cannot be written: No such file" in ran.err) == (1, True)


@pytest.mark.parametrize("full", ["new", "new.pub"])
def test_keygen_names_the_file_that_a_full_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """And leaves neither file behind, not even a private key that was complete."""
    opened = []

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            opened.append(self)
            if len(opened) == ["new", "new.pub"].index(full) + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(BitNetError, match=rf"/{full} cannot be written: No space left on device\.$"):
        receipts.keygen(tmp_path / "new")
    assert list(tmp_path.glob("new*")) == []


LIMITED = """
import resource, signal, sys
from bitnet.core.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of a process's files")
def test_a_real_limit_of_the_file_size(tmp_path: Path) -> None:
    """The system itself refuses the write, after the file was opened."""
    commands = {
        "k": ("receipt", "keygen", "k"),
        "r.json": ("run", "--device", "cpu", "Hi", "-n", "2", "--receipt", "r.json"),
    }
    for name, command in commands.items():
        before = sorted(tmp_path.iterdir())
        done = subprocess.run(
            [sys.executable, "-B", "-c", LIMITED, *command],  # compiled modules would be cut off at the limit
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert f"bitnet: error: {name} cannot be written: File too large." in done.stderr
        assert [path for path in sorted(tmp_path.iterdir()) if path not in before and path.is_file()] == []


def test_what_is_no_key(bitnet: Bitnet, signed: Document, model: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    key = form.load_pem_private_key((tmp_path / "k").read_bytes(), None)
    locked = form.BestAvailableEncryption(b"pass")
    (tmp_path / "locked").write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked))
    other = generate_private_key(SECP256R1()).private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    )
    (tmp_path / "ec").write_bytes(other)
    (tmp_path / "zeros").write_bytes(bytes(100))
    (tmp_path / "new.json").unlink(missing_ok=True)
    for name, said in (
        ("absent", "the key absent cannot be read: No such file"),
        ("zeros", "zeros has no Ed25519 private key in PEM. 'bitnet receipt keygen FILE' makes one"),
        ("k.pub", "k.pub has no Ed25519 private key"),
        ("ec", "ec has no Ed25519 private key"),
        ("locked", "locked has an encrypted key"),
        (".", "the key . cannot be read"),
    ):
        # The model is absent as well: what is wrong with the key is told before anything is loaded.
        ran = bitnet("run", "-m", "absent.gguf", "Hi", "--receipt", "new.json", "--receipt-key", name)
        assert (ran.status, said in ran.err, ran.err.count("\n")) == (2, True, 1), ran
    assert not (tmp_path / "new.json").exists()
    for name, said in (
        ("absent", "the key absent cannot be read"),
        ("k", "k has no Ed25519 public key in PEM. It has a private key"),
        ("zeros", "zeros has no Ed25519 public key in PEM"),
    ):
        ran = bitnet("receipt", "verify", "s.json", "--key", name)
        assert (ran.status, said in ran.err, ran.err.count("\n")) == (2, True, 1), ran
    ran = bitnet("run", "-m", model, "Hi", "--receipt-key", "k")
    assert (ran.status, "--receipt-key needs --receipt" in ran.err) == (2, True)


def test_without_cryptography(
    bitnet: Bitnet, signed: Document, honest: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for args in (
        ("run", "-m", "absent.gguf", "Hi", "--receipt", "x.json", "--receipt-key", "k"),
        ("receipt", "keygen", "new"),
        ("receipt", "verify", "s.json", "--key", "k.pub"),
    ):
        ran = bitnet(*args)
        assert (ran.status, 'Install it: pip install "bitnet-core[sign]"' in ran.err) == (2, True), ran
    ran = bitnet("receipt", "verify", "s.json")
    assert (ran.status, ran.err.startswith("not checked: the signature (")) == (0, True)
    assert f"NOT CHECKED: the file claims the key {signed['signature']['key'][:16]}" in ran.out
    assert "by the key" not in ran.out
    assert bitnet("receipt", "verify", "r.json").status == 0


def test_a_made_up_signer_without_cryptography(signed: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    signed["signature"] = signed["signature"] | {"key": "ab" * 32, "value": "cd" * 64}
    signed["digest"] = receipts.digest(signed)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    verdict = receipts.verify(signed)
    assert (verdict.signed_by, verdict.trusted) == (None, False)
    assert "the signature (" in verdict.unchecked[0]
