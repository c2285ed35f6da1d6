"""Where independent work runs: processes of this machine, one job each. It knows nothing of models.

A job is data, not code: the name of a function of this package and its arguments as JSON. So it can be run again after
a crash, by hand, or on another machine, and nothing is pickled.
"""

from recap_ctr.jobs.local import Job, run_jobs

__all__ = ["Job", "run_jobs"]
