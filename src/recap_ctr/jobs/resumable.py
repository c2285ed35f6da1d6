"""Jobs whose results are kept on disk, so that an interrupted run does none of them twice."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import Executor, Job
from recap_ctr.jobs.progress import say
from recap_ctr.storage.files import make_directory, read_object, remove_directory, write_json


class ResumableJobs:
    """Run jobs by an executor, and keep each result in a directory as soon as its job has ended.

    Results are found again by the title of a run and the number of the job in it, so titles must differ, and the same
    title must have the same jobs. Whatever decides the jobs, such as the number of workers, goes through `once`.
    """

    def __init__(self, executor: Executor, directory: Path) -> None:
        make_directory(directory)
        self._executor, self._directory = executor, directory
        self.shares: dict[str, float] = {}
        """The share of the jobs that are done, by title."""
        self.shares_before: dict[str, float] = {}
        """The same when they began: what an earlier run has done."""

    @property
    def workers(self) -> int:
        """Return how many jobs run at a time."""
        return self._executor.workers

    def run(
        self,
        jobs: Sequence[Job],
        *,
        title: str,
        quiet: bool = False,
        done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run the jobs without a result, and return the results of all in order.

        `done` is called with the index and the result of those that are run.
        """
        results = {i: value for i in range(len(jobs)) if (value := self._kept(self._file(title, i)))}
        missing = [i for i in range(len(jobs)) if i not in results]
        self.shares[title] = self.shares_before[title] = len(results) / max(len(jobs), 1)
        if results and not quiet:
            say(f"{title}: {len(results)} of {len(jobs)} were done before")

        def keep(at: int, result: Any) -> None:
            write_json(self._file(title, missing[at]), {"result": result})
            self.shares[title] += 1 / len(jobs)
            if done is not None:
                done(missing[at], result)

        fresh = self._executor.run([jobs[i] for i in missing], title=title, quiet=quiet, done=keep)
        results |= {i: {"result": result} for i, result in zip(missing, fresh, strict=True)}
        return [results[i]["result"] for i in range(len(jobs))]

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned, a JSON value, when it was first called under this name."""
        file = self._directory / f"{name}.json"
        kept = self._kept(file)
        if kept is None:
            kept = {"result": make()}
            write_json(file, kept)
        return kept["result"]

    def forget(self, title: str, index: int) -> None:
        """Forget the result of a job: what it made is about to be removed."""
        self._file(title, index).unlink(missing_ok=True)

    def remove_abandoned(self, parent: Path) -> None:
        """Remove the directories in `parent` that no result names: jobs that did not end have left them."""
        texts = [file.read_text() for file in self._directory.glob("*.json")]
        for entry in parent.iterdir():
            is_job = entry.is_dir() and entry != self._directory
            if is_job and not any(entry.name in text for text in texts):
                remove_directory(entry)

    def _file(self, title: str, index: int) -> Path:
        return self._directory / f"{title.replace(' ', '-')}-{index:06d}.json"

    @staticmethod
    def _kept(file: Path) -> dict[str, Any] | None:
        """Return the content of a file; None if it is absent, or damaged: then the job is done again."""
        with suppress(FileNotFoundError, InputError):
            return read_object(file, "the result of a job")
        return None
