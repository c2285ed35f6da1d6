"""Sign an artifact with a private key, and refuse one that was not signed by the key you trust.

Checksums say that an artifact is whole; a signature says who made it. Signatures follow OpenSSF model signing, cover
all files that are needed for scoring, and are made and verified offline.
"""

import tempfile
from pathlib import Path
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import read_artifact
from recap_ctr.inference.manifest import SIGNATURE, TRAINING_STATE, artifact_directory, read_artifact_manifest
from recap_ctr.storage.files import atomic_file

UNSIGNED = (SIGNATURE, TRAINING_STATE)  # What `update` goes on from stays where the model was made.
KEY_PAIR = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem; openssl ec -in key.pem -pubout -out key.pub"


def sign(artifact: str | Path, key: str | Path) -> Path:
    """Sign an artifact, or that of a run or fit, with an elliptic-curve private key; return the signature's file."""
    directory = read_artifact(Path(artifact)).path
    signing, hashing = _library("signing"), _library("hashing")
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=Path(key))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"{key}: {error}", fix=f"give a private key without password: {KEY_PAIR}") from None
    config = signer.set_hashing_config(_hashing(hashing))
    with tempfile.TemporaryDirectory(prefix="recap-sign-") as temporary:
        config.sign(directory, Path(temporary) / SIGNATURE)
        content = (Path(temporary) / SIGNATURE).read_bytes()
    with atomic_file(directory / SIGNATURE) as file:
        file.write(content)
    return directory / SIGNATURE


def check_signature(artifact: str | Path, key: str | Path, *, name: str | None = None) -> dict[str, Any]:
    """Refuse an artifact unless the owner of this public key signed it in its present state; return its manifest.

    `name` stands for the artifact in messages, where its path would mean nothing to the user.
    """
    directory = artifact_directory(Path(artifact))
    manifest = read_artifact_manifest(directory)
    verifying, hashing = _library("verifying"), _library("hashing")
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=Path(key))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"{key}: {error}", fix=f"give a public key: {KEY_PAIR}") from None
    if not (directory / SIGNATURE).is_file():
        raise InputError(f"{name or directory} is not signed", fix="sign it where it was made: recap sign")
    try:
        verifier.set_hashing_config(_hashing(hashing)).verify(directory, directory / SIGNATURE)
    except Exception as error:  # A forged signature may be anything, and fail anywhere.
        raise InputError(
            f"{name or directory} was not signed by {key} as it is: {str(error).strip()}",
            fix="fetch it again, or ask who made it",
        ) from None
    refuse_other_than(manifest, read_artifact_manifest(directory), directory)
    return manifest


def refuse_other_than(signed: dict[str, Any], manifest: dict[str, Any], path: Path) -> None:
    """Refuse an artifact that is not the one whose signature was checked."""
    if manifest != signed:
        raise InputError(f"{path} was replaced after its signature was checked", fix="run the command again")


def _hashing(hashing: Any) -> Any:
    return hashing.Config().set_ignored_paths(paths=UNSIGNED, ignore_git_paths=False)


def _library(part: str) -> Any:
    try:
        import model_signing.hashing
        import model_signing.signing
        import model_signing.verifying
    except ModuleNotFoundError as error:
        raise InputError(f"signatures need {error.name}", fix="pip install 'recap-ctr[sign]'") from None
    return getattr(model_signing, part)
