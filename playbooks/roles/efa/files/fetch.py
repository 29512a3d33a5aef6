"""Fetches the EFA installer and unpacks it, if and only if the right key signed it.

  fetch.py URL VERSION FINGERPRINT FOLDER     leaves FOLDER/aws-efa-installer

A download that was cut off goes on where it stopped. What is not signed right is removed, so that
the next run fetches it anew. Whatever goes wrong is one sentence on stderr.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess  # noqa: TID251  # stands alone on the node
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

KEY = "aws-efa-installer.key"
TREE = "aws-efa-installer"
TRIES = 5
PIECE = 1 << 20


class Refused(Exception):  # noqa: N818  # not an error of this program
    """One sentence, with what to do."""


def fetch(url: str, to: Path) -> None:
    """A file, whole or not at all; its pieces lie in TO.part meanwhile."""
    part = to.with_name(f"{to.name}.part")
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(2**attempt)  # noqa: TID251
        said, again = pull(url, part)
        if not said:
            part.replace(to)
            return
        if not again:
            break
    msg = (
        f"could not fetch {url} ({said}): give the node a way to it (a NAT or a proxy), or set"
        " efa_url to a mirror that has the installer, its .sig and its key"
    )
    raise Refused(msg)


def pull(url: str, part: Path) -> tuple[str, bool]:
    """What is missing of a file: (why it is not whole, whether to try again)."""
    have = part.stat().st_size if part.exists() else 0
    rest = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(url, headers=rest)  # noqa: S310  # signed, wherever from
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            # 200: the server knows no ranges and begins anew.
            append = answer.status == 206
            with part.open("ab" if append else "wb") as out:
                shutil.copyfileobj(answer, out, PIECE)
            length = answer.headers.get("Content-Length")
    except urllib.error.HTTPError as e:
        if e.code == 416:  # asked beyond its end: another file lies there now
            part.unlink()
        return f"HTTP {e.code}", e.code == 416 or e.code >= 500
    except (OSError, HTTPException) as e:
        return str(getattr(e, "reason", e)), True
    whole = not length or part.stat().st_size == int(length) + (have if append else 0)
    return "" if whole else "the connection ended early", True


def keyring(key: Path) -> Path:
    """The key as gpgv wants it: without armour."""
    data = key.read_bytes()
    if data.lstrip().startswith(b"-----BEGIN"):
        _, _, rest = data.partition(b"-----BEGIN PGP PUBLIC KEY BLOCK-----")
        body = rest.partition(b"-----END")[0].replace(b"\r", b"")
        lines = body.partition(b"\n\n")[2].split()
        # The last line is a checksum of the armour.
        data = base64.b64decode(b"".join(line for line in lines if not line.startswith(b"=")))
    ring = key.with_suffix(".gpg")
    ring.write_bytes(data)
    return ring


def check(archive: Path, signature: Path, key: Path, fingerprint: str) -> None:
    """Raises Refused unless the key with this fingerprint signed the archive."""
    try:
        done = subprocess.run(
            (
                "/usr/bin/gpgv",
                "--status-fd=1",
                f"--keyring={keyring(key)}",
                str(signature),
                str(archive),
            ),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except FileNotFoundError:
        msg = "gpgv is missing, which checks signatures: apt-get install gpgv"
        raise Refused(msg) from None
    except ValueError:
        msg = f"{KEY} is no OpenPGP key: it was removed, run again"
        raise Refused(msg) from None
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("[GNUPG:]")]
    words = {row[0] for row in told if row}
    # VALIDSIG: the fingerprint of the key that signed first, of its primary key last.
    signers = {f for row in told if row[:1] == ["VALIDSIG"] for f in (row[1], row[-1])}
    if done.returncode == 0 and "GOODSIG" in words and fingerprint in signers:
        return
    if signers:
        why = f"it is signed by {min(signers)}, not by {fingerprint}"
    elif "BADSIG" in words:
        why = "its signature does not fit it: it was altered"
    elif words & {"NO_PUBKEY", "ERRSIG"}:
        why = f"it is signed by another key than {KEY}"
    else:
        why = (done.stderr.strip().splitlines() or ["gpgv said nothing"])[-1]
    msg = (
        f"{archive.name} is not what its makers signed: {why}. It was removed and nothing of it was"
        " run. Run again to fetch it anew; when that does not help, do not trust where it comes"
        " from (efa_url)"
    )
    raise Refused(msg)


def unpack(archive: Path, folder: Path) -> None:
    """FOLDER/aws-efa-installer, whole or not at all."""
    part, tree = folder / "part", folder / TREE
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(tree, ignore_errors=True)
    part.mkdir()
    done = subprocess.run(
        ("/usr/bin/tar", "-xzf", str(archive), "-C", str(part), "--no-same-owner"),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode or not (part / TREE / "efa_installer.sh").is_file():
        said = (done.stderr.strip().splitlines() or ["it has no efa_installer.sh"])[-1]
        msg = f"could not unpack {archive.name} in {folder}: {said}"
        raise Refused(msg)
    (part / TREE).rename(tree)
    part.rmdir()


def main(argv: list[str]) -> int:
    url, version, fingerprint, where = argv
    folder = Path(where)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    archive = folder / f"aws-efa-installer-{version}.tar.gz"
    signature, key = folder / f"{archive.name}.sig", folder / KEY
    fingerprint = re.sub(r"\s", "", fingerprint).upper()
    try:
        for file in (key, signature):
            fetch(f"{url.rstrip('/')}/{file.name}", file)
        if not archive.exists():
            fetch(f"{url.rstrip('/')}/{archive.name}", archive)
        try:
            check(archive, signature, key, fingerprint)
        except Refused:
            for file in (archive, signature, key):
                file.unlink()
            raise
        unpack(archive, folder)
    except (Refused, OSError, subprocess.TimeoutExpired) as e:
        sys.stderr.write(f"{e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
