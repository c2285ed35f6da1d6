"""Commands that hand a model on: sign it, publish it, and fetch it."""

from pathlib import Path
from typing import Annotated

import typer

from recap_ctr.cli.options import ArtifactPath, Force, Json, Quiet, VerifyKey
from recap_ctr.cli.output import print_json, tell
from recap_ctr.storage.places import shown


def sign(
    artifact: ArtifactPath,
    key: Annotated[
        Path, typer.Option("--key", help="An elliptic-curve private key, a PEM file without password.")
    ],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Sign an artifact, so that others can tell that it is yours. Nothing is sent anywhere.

    Example: recap sign model --key key.pem
    """
    from recap_ctr.inference.signing import sign as sign_artifact

    signature = sign_artifact(artifact, key)
    if as_json:
        print_json({"signature": str(signature)})
    tell(quiet, f"{signature} is the signature; sign again after any change, such as recap export.")
    tell(quiet, f"Next: recap serve {artifact} --verify-key KEY.pub, with the public key.")


def push(
    artifact: ArtifactPath,
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="hf://OWNER/NAME[@BRANCH], a directory, or a URL of one.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see a repository that is created.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Publish an artifact and its signature where others can pull them. Its training state is left out.

    A Hugging Face hub gets one commit. The token comes from HF_TOKEN or from the hub's own login.

    Example: recap push model hf://acme/click-model
    """
    from recap_ctr.inference.hub import push as push_artifact

    place = push_artifact(artifact, destination, force=force, private=not public)
    if as_json:
        print_json({"artifact": shown(artifact), "place": place})
    tell(quiet, f"{shown(artifact)} is at {place}")
    tell(quiet, f"Next: recap pull {destination} model")


def pull(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="hf://OWNER/NAME[@BRANCH], a directory, or a URL of one.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put the artifact.")],
    verify_key: VerifyKey = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch an artifact that was pushed, check all of its files, and put it in place in one step.

    Example: recap pull hf://acme/click-model model --verify-key key.pub
    """
    from recap_ctr.inference.hub import pull as pull_artifact

    artifact = pull_artifact(source, directory, force=force, verify_key=verify_key)
    if as_json:
        print_json({"artifact": str(artifact.path), "model": artifact.name})
    tell(quiet, f"{artifact.path}: {artifact.name}, {artifact.manifest['parameters']:,} parameters.")
    tell(quiet, f"Next: recap predict {artifact.path} rows.csv --out scores.csv")
