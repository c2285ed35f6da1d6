"""Publish and fetch artifacts through a repository of a Hugging Face hub, a directory, or an object store.

Only what a model needs for scoring is published: the files of its manifest, and a signature. `pull` checks an artifact
before it puts it in place, so only a good artifact can replace a good one.
"""

import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import Artifact, read_artifact
from recap_ctr.inference.manifest import CARD, MANIFEST, SIGNATURE
from recap_ctr.inference.signing import check_signature
from recap_ctr.storage.files import atomic_directory, atomic_file, copy_file, make_directory
from recap_ctr.storage.places import output_directory

REPOSITORY = re.compile(r"hf:/{1,2}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")  # A Path has lost one of the slashes.
README = "README.md"
HEAD = "---\nlibrary_name: recap-ctr\npipeline_tag: tabular-classification\n---\n\n"


def push(artifact: str | Path, destination: str | Path, *, force: bool = False, private: bool = True) -> str:
    """Publish an artifact, or that of a run or fit, and return where it is.

    `destination` is hf://OWNER/NAME, or hf://OWNER/NAME@BRANCH, whose repository is created if need be, `private` or
    not, and gets one commit; or it is a directory or the URL of one, where another artifact is replaced only by
    `force`.
    """
    published = read_artifact(Path(artifact))
    repository = _repository(destination)
    if repository is not None:
        return _commit(published, *repository, private=private)
    with output_directory(destination) as directory:
        _place(published, directory, force=force)
    return str(destination)


def pull(
    source: str | Path, directory: str | Path, *, force: bool = False, verify_key: str | Path | None = None
) -> Artifact:
    """Fetch an artifact from where `push` has put it, whole, into a directory, and return it.

    Another artifact in the directory is replaced only by `force`, in one step; anything else is never touched. With
    `verify_key`, nothing is replaced unless the owner of this public key has signed what was fetched.
    """
    with tempfile.TemporaryDirectory(prefix="recap-pull-") as temporary:
        fetched, repository = Path(temporary) / "artifact", _repository(source)
        if repository is None:
            _place(read_artifact(Path(source)), fetched, force=False)
        else:
            _download(*repository, fetched)
            if not (fetched / MANIFEST).is_file():
                raise InputError(f"{source} holds no artifact", fix="publish one: recap push")
        if verify_key is not None:
            check_signature(fetched, verify_key, name=str(source))
        _place(read_artifact(fetched), Path(directory), force=force)
    return read_artifact(Path(directory))


def _repository(place: str | Path) -> tuple[str, str | None] | None:
    """Return repository and revision of an hf:// address; None for any other place."""
    if not str(place).startswith("hf:"):
        return None
    match = REPOSITORY.fullmatch(str(place))
    if match is None:
        raise InputError(
            f"{place} names no repository", fix="write hf://OWNER/NAME or hf://OWNER/NAME@BRANCH"
        )
    return match[1], match[2]


def _files(artifact: Artifact) -> list[str]:
    """Return the files to publish, the manifest last, because it completes the artifact where files arrive one by
    one."""
    signature = [SIGNATURE] if (artifact.path / SIGNATURE).is_file() else []
    return [*artifact.manifest["files"], *signature, MANIFEST]


def _place(artifact: Artifact, directory: Path, *, force: bool) -> None:
    """Put a copy of an artifact into a directory; refuse if something else is there."""
    if directory.exists() and (directory.is_file() or any(directory.iterdir())):
        if not directory.is_dir() or not (directory / MANIFEST).is_file():
            raise InputError(f"{directory} exists and is no artifact", fix="choose another directory")
        if (directory / MANIFEST).read_bytes() == (artifact.path / MANIFEST).read_bytes():
            # Everything else is there already, perhaps with a training state beside it.
            _place_signature(artifact, directory)
            return
        if not force:
            raise InputError(f"{directory} holds another artifact", fix="add --force to replace it")
    with atomic_directory(directory) as partial:
        for name in _files(artifact):
            make_directory((partial / name).parent)
            copy_file(artifact.path / name, partial / name)
        read_artifact(partial)


def _place_signature(artifact: Artifact, directory: Path) -> None:
    """Put the signature of an artifact, if it has one, beside another copy of it."""
    if (artifact.path / SIGNATURE).is_file() and artifact.path.resolve() != directory.resolve():
        with atomic_file(directory / SIGNATURE) as file:
            file.write((artifact.path / SIGNATURE).read_bytes())


def _commit(artifact: Artifact, repository: str, revision: str | None, *, private: bool) -> str:
    """Replace the files of a repository by an artifact's in one commit, so that nobody can fetch half of one."""
    hub, files = _library(), _files(artifact)
    card = HEAD + (artifact.path / CARD).read_text(encoding="utf-8") if CARD in files else HEAD
    api = hub.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        present = set(api.list_repo_files(repository, revision=revision))
        surplus = present - {*files, README, ".gitattributes"}
        operations: list[Any] = [hub.CommitOperationDelete(path_in_repo=name) for name in sorted(surplus)]
        operations += [
            hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=artifact.path / name) for name in files
        ]
        operations.append(hub.CommitOperationAdd(path_in_repo=README, path_or_fileobj=card.encode()))
        message = f"{artifact.name}, data {artifact.manifest['data']['fingerprint'][:10]}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Vocabularies are Parquet files, and no data set.
            made = api.create_commit(repository, operations, commit_message=message, revision=revision)
    # Several libraries raise errors of their own here: about the network, the token or the name.
    except Exception as error:
        raise _refused(repository, error) from error
    return str(made.commit_url)


def _download(repository: str, revision: str | None, directory: Path) -> None:
    hub = _library()
    try:
        hub.snapshot_download(repository, revision=revision, local_dir=directory)
        shutil.rmtree(directory / ".cache", ignore_errors=True)
        for name in (README, ".gitattributes"):  # The hub adds these files; they are not signed.
            (directory / name).unlink(missing_ok=True)
    except Exception as error:  # See above.
        raise _refused(repository, error) from error


def _refused(repository: str, error: Exception) -> InputError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return InputError(
        f"hf://{repository}: {first}",
        fix="check the name, the network, and that HF_TOKEN may do this; HF_ENDPOINT names another hub",
    )


def _library() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise InputError("hf:// needs huggingface_hub", fix="pip install 'recap-ctr[hub]'") from None
    disable_progress_bars()
    return huggingface_hub
